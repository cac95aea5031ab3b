"""The head on Hopper GPUs: the platform's matmuls with a row kernel between them, and a matmul with statistics in its
epilogue.

    backend          chunked sweeps whose passes over a chunk's logits are the row kernels of ``logits/mosaic_gpu``
    sparse           the sparse backward without logits, and where it cannot serve
    column_screen    the active columns, found inside the forward matmul
    sparse_backward  the backward over all active columns at once, which most calls take
    column_chunks    the backward over some columns at a time, where they do not fit at once
    hard_rows        rows that would leave out too much: through all other columns
    tile_mask        the tiles of tokens and active columns that the backward visits
    dx_tiles         the slots of memory that hold the tiles of dx
    dweight_buffer   which part of dW's memory holds dx before dW is written
    limits           what the kernels take, and why not the rest
    kernels/         pipeline (the shared matmul), schedule (who computes which tile), stats_matmul (forward
                     statistics, with stats_epilogue), dlogits_matmul (dx from known statistics), dynamic_matmul
                     (a matmul whose extents only the device knows)
"""
