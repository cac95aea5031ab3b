"""The Hopper head kernels: a pipelined matmul with several epilogues."""
