"""The head on Hopper GPUs: the platform's matmuls with a row kernel between them, and a matmul with statistics in its
epilogue.

    backend          chunked sweeps with the row kernels of ``logits/mosaic_gpu`` over a chunk's logits
    sparse           the sparse backward without logits, and the calls it cannot serve
    column_screen    active columns, found inside the forward matmul
    sparse_backward  the backward over all active columns together, for most calls
    column_chunks    the backward over some columns at a time, if memory is short
    hard_rows        rows above the tolerance: through all other columns
    tile_mask        visited tiles of tokens and active columns
    dx_tiles         memory slots for the tiles of dx
    dweight_buffer   dx inside the dW buffer, before dW is written
    limits           shapes supported by the kernels, and reasons against all others
    kernels/         pipeline (the shared matmul), schedule (tiles per block), stats_matmul (forward
                     statistics, with stats_epilogue), dlogits_matmul (dx from known statistics), dynamic_matmul
                     (a matmul with extents known only to the device)
"""
