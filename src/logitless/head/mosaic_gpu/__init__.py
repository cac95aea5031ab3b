"""The head on Hopper GPUs: the platform's matmuls with a row kernel between them, and a matmul with statistics in its
epilogue.

    backend          chunked sweeps with the row kernels of ``logits/mosaic_gpu`` over a chunk's logits
    stored_dx        the same with the dx of all tokens in memory: one matmul for dH, one for dW
    sparse           the sparse backward without logits, as a backend
    column_screen    active columns, found inside the forward matmul, and the tiles of tokens in which they are active
    sparse_backward  the whole data flow over the active columns, in phases
    dweight_buffer   the memory of dW, dx inside it before dW is written, and the matmuls over that dx
    kernels/         schedule (tiles, and who computes which), pipeline (the shared matmul), stats_matmul (forward
                     statistics), dlogits_matmul (dx from known statistics), dynamic_matmul (a matmul with extents known
                     only to the device)
"""
