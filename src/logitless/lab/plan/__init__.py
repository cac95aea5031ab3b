"""Memory and cost of a call before it runs: ``logitless.plan``, and the command ``logitless plan``.

plan        the function: route, memory, FLOPs and roofline time of a call
program     the real program of a call, compiled for a possibly absent device
estimate    a closed estimate of bytes and FLOPs, used without a compiler
chips       public numbers of accelerators; routing as if on a given chip
mesh        ``data=8,fsdp=4,tensor=2`` as a mesh, and the plan for a step on a mesh
command     ``logitless plan``
"""
