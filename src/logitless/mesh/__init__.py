"""Many devices: which arrays are cut over which mesh axes, and the collectives that follow from it.

    sharding               what a user says (``Sharding``), and what follows from it for one call (``Placement``)
    ambient                how a call gets onto its mesh, and what is refused where nobody named one
    over_mesh              a backend around a backend: ``shard_map`` around each of its passes
    collectives            what a device gathers, merges and reduces
    vocab_parallel         a device that has a part of the columns
    vocab_parallel_sparse  the same with a sparse backward
    head_pieces            a large dW leaves its TPU in pieces

``custom_vjp`` is outside and ``jax.shard_map`` inside both passes: a kernel sees the arrays of its device, and no
compiler partitions the kernel. Loss maths over ``[B, T]`` statistics stays outside, in plain JAX over global arrays:
sequences may cross shards, denominators are global, and there is no second formula for any of it.
"""
