"""Measured peak of a step: what the device's allocator really had.

Definitions.
    (1) *Level* = bytes that the allocator has handed out and not got back.
    (2) Measured peak of a step = the largest level during it, minus the level at its start.
        Memory from before the step that is freed inside it makes room; the peak is never < 0.

On CPU the level is rebuilt from the allocation events of `torch.profiler`. The profiler drops the
release of a block that was allocated before it was started, so the warm-up steps run inside the
same profile and the measured step is marked. On CUDA the allocator keeps the maximum itself; its
figure counts whole blocks, which are rounded up to 512 bytes.

Not measured: memory that is not asked of torch's allocator (Python objects, workspaces that a
library maps itself), fragmentation, and any device but the CPU and the current CUDA device.
"""

import gc
from collections.abc import Callable
from itertools import accumulate

import torch
from torch.profiler import ProfilerActivity, profile, record_function

_MARK = "remat: measured step"


def measure_peak(step: Callable[[], object], warmup: int = 1) -> int:
    """Run `step` and return its measured peak, bytes.

    If the step allocates on the current CUDA device, the figure is that device's, else the CPU's.

    Args:
        step: one whole training step; its result is dropped.
        warmup: how often the step is run first, so that lazily created state exists and the memory
            that one step leaves to the next is known.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        for _ in range(warmup):
            step()
        gc.collect()
        cuda_start = _start_cuda()
        with record_function(_MARK):
            step()
        cuda_peak = _peak_cuda() - cuda_start
    if cuda_peak > 0:
        return cuda_peak
    events = sorted(record.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    mark = next(event for event in reversed(events) if event.name() == _MARK)
    start, end = mark.start_ns(), mark.start_ns() + mark.duration_ns()
    changes: list[int] = [
        event.nbytes()
        for event in events
        if event.name() == "[memory]" and start <= event.start_ns() <= end
    ]
    return max(accumulate(changes, initial=0))


def _start_cuda() -> int:
    """Forget the maximum so far; return the level, bytes; 0 without CUDA."""
    if not torch.cuda.is_available():
        return 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def _peak_cuda() -> int:
    """Largest level since `_start_cuda`, bytes; 0 without CUDA."""
    if not torch.cuda.is_available():
        return 0
    return torch.cuda.max_memory_allocated()
