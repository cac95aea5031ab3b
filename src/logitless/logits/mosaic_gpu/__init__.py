"""Logits-level kernels for Hopper GPUs (Pallas Mosaic GPU).

backend    what is launched on which problem
kernels    the three kernels
row_sweep  how a row is worked on: copies, patches, sums, the two sweeps
layout     where rows lie in memory, how they are cut into tiles, and which shapes are served
scalars    the maths of a row's statistics inside a kernel

For two distributions, a student's and its teacher's:

pair_rows  the two kernels: statistics of both, the student's dlogits
"""
