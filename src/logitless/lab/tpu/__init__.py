"""Memory and cycles of a program on an absent TPU: ``logitless tpu compile | cycles``.

aot         compiled ahead of time by libtpu, the real compiler: what it refuses, bytes per chip
cycles      time by the compiler's own cycle simulator
loss_program  the programs that are compiled: loss and gradients at a named shape
command     ``logitless tpu``
"""
