"""Memory and cost of a call before it runs: ``logitless.plan``, and the command ``logitless plan``.

plan        the function: the route of the call, its memory, its FLOPs and a roofline time
program     the real program of a call, compiled for a device that may not be there
estimate    the closed estimate of bytes and FLOPs where no compiler is at hand
chips       public numbers of accelerators; routing as if on one of them
mesh        ``data=8,fsdp=4,tensor=2`` as a mesh, and the plan of a step on one
command     ``logitless plan``
"""
