"""What a training step takes from the GPU through PyTorch's caching allocator, simulated.

Definition. The trace's allocations run through `CachingAllocator` (or `ExpandableAllocator`), one at
a time:
    (1) Blocks with ``birth == -1`` are allocated first, in the order of the trace.
    (2) At instant i: the blocks born at i are allocated, in the order of the trace; then the instant's
        scratch, as one block, is allocated, the state is recorded, and the scratch is freed; then the
        blocks with ``death == i`` are freed, in the order of the trace.
    (3) Before the step is repeated, the blocks that it left behind are freed, and those of (1) that it
        freed are allocated again. The other blocks of (1) stay where they are.
All figures are of the last repetition, as PyTorch shows them for one step of a loop after
``reset_peak_memory_stats``: the first step starts with an empty cache and may reserve less.

A prediction, not a measurement. Not handled: what `caching_allocator` does not handle, the order of
allocations inside one op, and memory that is not in the trace (see `device_memory`).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import sympy

from remat.ir import Trace

from .allocator_config import AllocatorConfig
from .caching_allocator import CachingAllocator, Chunk
from .expandable_segments import ExpandableAllocator
from .memory import at_binding


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """A request that failed after all cached memory that could be given back was."""

    repeat: int
    """Number of the repetition, from 0."""
    instant: int
    """Instant in it; -1: before the step."""
    name: str
    """Block that was to be allocated, or instant whose scratch was."""
    requested: int
    """Bytes asked for."""
    allocated: int
    """Bytes allocated at that moment."""
    reserved: int
    """Bytes reserved at that moment."""
    largest_free: int
    """Bytes of the largest free block that may serve such a request."""


@dataclass(frozen=True, slots=True)
class AllocatorUse:
    """Bytes that the allocator holds over a step, at one binding."""

    allocated: tuple[int, ...]
    """Bytes of allocated blocks at each instant, as ``torch.cuda.memory_allocated`` counts them."""
    requested: tuple[int, ...]
    """Bytes asked for at each instant, unrounded."""
    reserved: tuple[int, ...]
    """Bytes taken from the driver at each instant, as ``torch.cuda.memory_reserved`` counts them."""
    peak_allocated: int
    """Bytes; comparable with ``torch.cuda.max_memory_allocated``."""
    peak_requested: int
    """Bytes."""
    peak_reserved: int
    """Bytes; comparable with ``torch.cuda.max_memory_reserved``."""
    peak_instant: int
    """First instant at which `peak_allocated` is reached; -1: before the step."""
    slack: int
    """Bytes of `peak_allocated` that belong to larger blocks that were not split."""
    inactive_split: int
    """Bytes of free blocks at `peak_instant` in segments that are in use."""
    segments: int
    """Segments at the end; with expandable segments, the pools that have a range."""
    out_of_memory: OutOfMemory | None
    """The failure that ended the simulation; the curves end before it."""

    def __str__(self) -> str:
        """The figures without the curves."""
        text = (
            f"allocated {self.peak_allocated} bytes at the peak, reserved {self.peak_reserved} in "
            f"{self.segments} segments; {self.inactive_split} bytes of them in free parts of segments in use"
        )
        failure = self.out_of_memory
        if failure is None:
            return text
        return (
            f"out of memory at {failure.name}: {failure.requested} bytes asked for, {failure.reserved} "
            f"reserved, {failure.allocated} of them allocated; before that: {text}"
        )


def allocator_for(config: AllocatorConfig) -> CachingAllocator:
    """An empty allocator of the kind that the settings ask for."""
    return ExpandableAllocator(config) if config.expandable_segments else CachingAllocator(config)


def simulate(
    trace: Trace,
    config: AllocatorConfig | None = None,
    binding: Mapping[sympy.Symbol, int] | None = None,
    repeats: int = 2,
) -> AllocatorUse:
    """Run the allocations of a step through the allocator.

    Args:
        trace: the step; sizes are the bytes that are asked for, unrounded.
        config: the allocator's settings; PyTorch's defaults if None.
        binding: the integer of every symbol that occurs in a size.
        repeats: how often the step runs, at least once.
    """
    if repeats < 1:
        raise ValueError(f"a step cannot run {repeats} times")
    run = _Run(trace, allocator_for(config or AllocatorConfig()), binding or {})
    failure = None
    for repeat in range(repeats):
        failure = run.step(repeat)
        if failure is not None:
            break
    return run.use(failure)


class _Run:
    """A simulation under way."""

    def __init__(
        self, trace: Trace, allocator: CachingAllocator, binding: Mapping[sympy.Symbol, int]
    ) -> None:
        self.trace = trace
        self.allocator = allocator
        n = len(trace.instants)
        blocks = trace.blocks
        sizes = {
            size: at_binding(size, binding)
            for size in dict.fromkeys(x.size for x in blocks)
            | dict.fromkeys(x.scratch for x in trace.instants)
        }
        self.sizes = [sizes[block.size] for block in blocks]
        self.scratch = [0] + [sizes[instant.scratch] for instant in trace.instants]
        # Index 0 is before the step: instant i is at i + 1.
        self.born: list[list[int]] = [[] for _ in range(n + 1)]
        self.dying: list[list[int]] = [[] for _ in range(n + 2)]
        for number, block in enumerate(blocks):
            self.born[block.birth + 1].append(number)
            self.dying[block.death + 1].append(number)
        self.live: dict[int, Chunk] = {}
        self.rows: list[tuple[int, int, int, int, int]] = []

    def step(self, repeat: int) -> OutOfMemory | None:
        """Run the step once; rows of allocated, requested, reserved, slack, inactive bytes."""
        self.rows = []
        self._free(b for b in self.dying[-1] if self.trace.blocks[b].birth >= 0)
        for i, numbers in enumerate(self.born):
            for number in numbers:
                if self.sizes[number] and number not in self.live:
                    chunk = self.allocator.allocate(self.sizes[number])
                    if chunk is None:
                        name = self.trace.blocks[number].name
                        return self._failed(repeat, i - 1, name, self.sizes[number])
                    self.live[number] = chunk
            if self.scratch[i]:
                chunk = self.allocator.allocate(self.scratch[i])
                if chunk is None:
                    name = self.trace.instants[i - 1].name
                    return self._failed(repeat, i - 1, name, self.scratch[i])
                self._record()
                self.allocator.free(chunk)
            else:
                self._record()
            self._free(self.dying[i])
        return None

    def _free(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            chunk = self.live.pop(number, None)
            if chunk is not None:
                self.allocator.free(chunk)

    def _record(self) -> None:
        a = self.allocator
        self.rows.append((a.allocated, a.requested, a.reserved, a.slack, a.inactive_split))

    def _failed(self, repeat: int, instant: int, name: str, requested: int) -> OutOfMemory:
        a = self.allocator
        pool = a.pool_of(a.block_size(requested))
        largest = a.largest_free(pool)
        return OutOfMemory(repeat, instant, name, requested, a.allocated, a.reserved, largest)

    def use(self, failure: OutOfMemory | None) -> AllocatorUse:
        """The figures of the last step."""
        start = self.rows or [(0, 0, 0, 0, 0)]
        rows = self.rows[1:]
        allocated, requested, reserved = (tuple(row[k] for row in rows) for k in range(3))
        peak = max(rows or start[:1])[0]
        instant = allocated.index(peak) if rows else -1
        return AllocatorUse(
            allocated,
            requested,
            reserved,
            peak_allocated=peak,
            peak_requested=max(requested, default=start[0][1]),
            peak_reserved=max(reserved, default=start[0][2]),
            peak_instant=instant,
            slack=start[instant + 1][3],
            inactive_split=start[instant + 1][4],
            segments=self.allocator.segments,
            out_of_memory=failure,
        )
