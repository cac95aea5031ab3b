"""The sparse backward in plain JAX: the algorithm that every sparse backend shares."""
