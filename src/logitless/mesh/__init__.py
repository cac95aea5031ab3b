"""Many devices: which arrays are cut over which mesh axes, and the collectives that follow from it.

    sharding               the user's ``Sharding``, and its ``Placement`` for a call
    ambient                places a call on its mesh; refuses sharded arrays without a mesh
    over_mesh              a backend around a backend: ``shard_map`` around each pass
    collectives            gathers, merges and reductions on a device
    vocab_parallel         a device with some of the columns
    vocab_parallel_sparse  a device with some of the columns, and a sparse backward
    head_pieces            a large dW leaves the TPU in pieces

``custom_vjp`` is outside and ``jax.shard_map`` inside both passes: a kernel sees the arrays of its device, and no
compiler partitions the kernel. Loss maths over ``[B, T]`` statistics stays outside, in plain JAX over global arrays:
sequences may cross shards, denominators are global, and there is no second formula for any of it.
"""
