"""Workspaces of CUDA's matrix library, as blocks of a trace.

cuBLAS takes one workspace for each handle and stream from torch's allocator at its first product, and
keeps it. The forward and the optimizer step run in one thread with one handle, backward in autograd's
thread with another. Source: `docs/memory.md`, and the peaks published with Liger-Kernel, which have two of
them where both phases have products.

Not described: further streams, and the workspaces of cuDNN, which depend on its choice of algorithm.
"""

import sympy

from remat.ir import Block, Phase, Role, Trace

from .device_memory import DeviceOverheads

_PRODUCTS = (
    "addmm",
    "mm",
    "bmm",
    "baddbmm",
    "addbmm",
    "addmv",
    "mv",
    "dot",
    "_scaled_mm",
    "_grouped_mm",
)
FORWARD_WORKSPACE = "cuBLAS workspace of the main thread"
BACKWARD_WORKSPACE = "cuBLAS workspace of the autograd thread"
OTHER_WORKSPACES = "workspaces of other libraries"


def with_workspaces(trace: Trace, overheads: DeviceOverheads, *, first: bool) -> Trace:
    """The trace with a workspace for every thread that computes products, and those of other libraries.

    Args:
        trace: of an eager step.
        overheads: of the device.
        first: the step is the first one of the process: workspaces of cuBLAS are made in it.
    """
    blocks = list(trace.blocks)
    end = len(trace.instants)
    size = overheads.cublas_workspace
    if other := overheads.other_workspaces:
        blocks.append(Block(OTHER_WORKSPACES, Role.WORKSPACE, sympy.Integer(other), -1, end))
    threads = ((FORWARD_WORKSPACE, False), (BACKWARD_WORKSPACE, True))
    for name, backward in threads[: overheads.cublas_handles]:
        users = [
            i
            for i, instant in enumerate(trace.instants)
            if (instant.phase is Phase.BACKWARD) is backward and _is_product(instant.target)
        ]
        if users and size:
            birth = users[0] if first else -1
            blocks.append(Block(name, Role.WORKSPACE, sympy.Integer(size), birth, end))
    return Trace(trace.instants, tuple(sorted(blocks, key=lambda block: block.birth)))


def _is_product(target: str) -> bool:
    return target.split(".")[1:2] != [] and target.split(".")[1] in _PRODUCTS
