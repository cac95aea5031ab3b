"""Other libraries' trainers on this library's losses. Each is imported by name and needs its library only then."""
