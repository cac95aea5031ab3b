"""Logits-level kernels for TPUs (Pallas Mosaic).

backend    what is launched on which problem
kernels    the three kernels' bodies: what is done with a block of rows
rows       the sweeps over a group of rows in VMEM
tiles      how logits ``[N, V]`` are cut into blocks
"""
