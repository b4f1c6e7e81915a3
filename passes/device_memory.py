"""What is on a GPU beside the tensors: library workspaces, the CUDA context, NCCL's buffers.

Nothing here is a measurement of the machine at hand: each constant is documented or was reported for
some machine, the field says where, and every field can be set.
    (1) Workspaces of cuBLAS come from PyTorch's caching allocator and are never freed: they belong to
        allocated and reserved memory, as blocks that are there before the step.
    (2) What ``nvidia-smi`` shows for the process = reserved memory + CUDA context + NCCL.

Not described: cuDNN's workspaces (they depend on the algorithm, and are freed after each call),
kernels loaded later than the context, other processes, what the driver keeps for itself, AMD GPUs.
"""

import re
from dataclasses import dataclass

from .devices import device

_KIB = 2**10
_MIB = 2**20

CAPABILITIES = {
    "rtx4090": (8, 9),
    "a100-40gb": (8, 0),
    "a100-80gb": (8, 0),
    "generic-gpu": (8, 0),  # assumed
    "h100": (9, 0),
    "h200": (9, 0),
}
"""CUDA compute capability by device; https://developer.nvidia.com/cuda-gpus."""

TRANSFORMER_ENGINE_WORKSPACE = {(8, 0): 4 * _MIB, (9, 0): 32 * _MIB + _KIB}
"""Bytes by compute capability: ``get_cublas_workspace_size_bytes`` in Transformer Engine's
``pytorch/module/base.py``, and 1 KiB more that is not explained; Megatron-LM's published memory has them."""
SMALL_WORKSPACE = 2 * 4096 * _KIB + 8 * 16 * _KIB
"""Bytes: ``:4096:2:16:8``, 8,519,680. ``parseChosenWorkspaceSize`` in
``aten/src/ATen/cuda/CublasHandlePool.cpp``."""
LARGE_WORKSPACE = 8 * 4096 * _KIB
"""Bytes: 32 MiB, on Hopper, and since pytorch/pytorch#175344 on Blackwell. Same function."""


@dataclass(frozen=True, slots=True)
class DeviceOverheads:
    """Bytes on a device that no tensor accounts for."""

    cublas_workspace: int
    """Bytes of workspace for each cuBLAS handle and stream. cuBLASLt shares it since
    pytorch/pytorch#168175; before, it had 1 MiB of its own."""
    cublas_handles: int = 2
    """Handles with a workspace: PyTorch has one for each thread that multiplies matrices, here the
    thread of the forward and autograd's. 0 for a step without matrix products. Two explain the peaks
    published for Liger-Kernel and Megatron-LM to within a few kB."""
    other_workspaces: int = 0
    """Bytes that other libraries keep of torch's allocator, such as Transformer Engine's workspace for
    products (`TRANSFORMER_ENGINE_WORKSPACE`)."""
    context: tuple[int, int] = (287 * 10**6, 450 * _MIB)
    """Bytes of the CUDA context with lazy loading, from 11.7 on: least and most of what was reported
    (pytorch/pytorch#86509; 300 to 450 MiB in #107667, #109888)."""
    nccl_pair: tuple[int, int] = (544 * 10**6, 1600 * 10**6)
    """Bytes of an NCCL communicator of 2 GPUs, outside PyTorch's allocator: least and most of what
    was reported (NVIDIA/nccl#964 on A100; NVIDIA/nccl#864)."""
    nccl_many: tuple[int, int] = (688 * 10**6, 6000 * 10**6)
    """Bytes of a communicator of 3 GPUs or more (same sources; NVIDIA/nccl#1685 lies between)."""
    communicators: int = 1
    """NCCL communicators of the process if there is more than one GPU."""

    @property
    def workspaces(self) -> int:
        """Bytes of all workspaces: part of allocated memory."""
        return self.cublas_handles * self.cublas_workspace + self.other_workspaces


def overheads_for(device_name: str, cublas_config: str | None = None) -> DeviceOverheads:
    """What to expect on a device.

    Args:
        device_name: one that `devices.device` knows, except ``cpu``.
        cublas_config: value of ``CUBLAS_WORKSPACE_CONFIG``; PyTorch's default for the device if None.

    Raises:
        ValueError: if there is no such GPU, or `cublas_config` has no ``:size:count`` in it.
    """
    name = device(device_name).name
    if name not in CAPABILITIES:
        raise ValueError(f"{name} is not a GPU; there are: {', '.join(CAPABILITIES)}")
    if cublas_config is not None:
        return DeviceOverheads(cublas_workspace(cublas_config))
    return DeviceOverheads(LARGE_WORKSPACE if CAPABILITIES[name] >= (9, 0) else SMALL_WORKSPACE)


def cublas_workspace(config: str) -> int:
    """Bytes that ``CUBLAS_WORKSPACE_CONFIG`` asks for: ``:size:count`` in KiB, any number of times.

    Raises:
        ValueError: if there is no such pair in it (PyTorch warns, and takes its default).
    """
    pairs = re.findall(r":([0-9]+):([0-9]+)", config)
    if not pairs:
        raise ValueError(
            f"no :KiB:count in CUBLAS_WORKSPACE_CONFIG {config!r}, as in ':4096:2:16:8'"
        )
    return sum(int(size) * _KIB * int(count) for size, count in pairs)


def nvidia_smi(reserved: int, overheads: DeviceOverheads, world_size: int = 1) -> tuple[int, int]:
    """Bytes that ``nvidia-smi`` may show for the process: least and most.

    Args:
        reserved: bytes that PyTorch's allocator reserves, cuBLAS workspaces included.
        overheads: of the device.
        world_size: GPUs that train together.
    """
    nccl = overheads.nccl_pair if world_size == 2 else overheads.nccl_many
    count = overheads.communicators if world_size > 1 else 0
    low, high = (reserved + overheads.context[k] + count * nccl[k] for k in (0, 1))
    return low, high
