"""The head on Hopper GPUs: the platform's matmuls with a row kernel between them, and a matmul with statistics in its
epilogue.

    backend    chunked sweeps whose passes over a chunk's logits are the row kernels of ``logits/mosaic_gpu``
    pipeline   the matmul that the next three are epilogues of; schedule says who computes what, limits what it takes
    matmul     forward statistics, no logits (epilogue)
    dx         dx of some columns from known statistics, no logits
    product    a matmul whose extents only the device knows
    sparse     the sparse backward without logits: screen finds its columns, most calls then go at_once (blocks, hard),
               the others in_chunks; room says how much goes at a time, slots where dx stands
"""
