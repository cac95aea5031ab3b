"""Many devices: which arrays are cut over which mesh axes, and the collectives that follow from it.

``custom_vjp`` stands outside and ``jax.shard_map`` inside both passes, so that a kernel sees the arrays of its own
device and nobody partitions it. Loss maths over ``[B, T]`` statistics stays outside, in plain JAX over global arrays:
sequences may cross shards, denominators are global, and there is no second formula for any of it.
"""
