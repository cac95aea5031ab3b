"""What a program would need on a TPU that is not there: memory from the real compiler, time from its simulator."""
