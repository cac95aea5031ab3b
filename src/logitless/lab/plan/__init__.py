"""What a call will need, from shapes alone: ``logitless.plan`` and the command of that name. Nothing compiles or runs.

    head          the plan of a head-level call on one chip
    tpu           what its kernels need
    sparse        what a sparse backward costs for an assumed policy
    mesh          the same call on each chip of a mesh, and its collectives
    work          the numbers that bytes and FLOPs are made of
    chips         public numbers of accelerators; planning as if on one of them
    prediction    a plan, in words and as JSON
    command       ``logitless plan``
    scaling       writes docs/scaling.md

The package is not called ``plan``: as a submodule of that name it would hide the public function ``logitless.plan``.
"""
