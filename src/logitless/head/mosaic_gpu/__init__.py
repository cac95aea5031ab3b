"""The head on Hopper GPUs: the platform's matmuls with a row kernel between them, and a matmul with statistics in its
epilogue.

    backend    chunked sweeps whose passes over a chunk's logits are the row kernels of ``logits/mosaic_gpu``
    matmul     forward statistics by one matmul, no logits; epilogue, schedule and limits belong to it
    sparse     the sparse backward without logits; screen finds its columns
"""
