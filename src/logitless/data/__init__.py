"""Arrays for a loss call, made on the host or in a step: shifted targets, packed rows, advantages."""
