"""Logits-level kernels for Hopper GPUs (Pallas Mosaic GPU).

backend    what is launched on which problem, and the rule for its tiles
kernels    the three kernels
tiles      how a row is worked on: copies, patches, the two sweeps
layout     where rows lie in memory, and how they are cut into tiles
scalars    the maths of a row's statistics inside a kernel

For two distributions, a student's and its teacher's:

pair_rows     the two kernels: statistics of both, the student's dlogits
peaked_sums   what a sweep over both carries, and the statistics made of it
"""
