"""The Hopper head kernels: one pipelined matmul and its epilogues."""
