"""A predicted step as what an allocator sees: a sequence of allocations and frees, and addresses for them.

Definitions.
    (1) Allocations are numbered in the order in which they are made: what is there before the step, in the
        order of the timeline; then at each instant the tensors born at it, in the order of the timeline, and
        the scratch of the op, as one allocation.
    (2) At the end of an instant its scratch is freed, then the tensors that die at it, in the order of (1).
        So the bytes allocated are largest, within an instant, when its last allocation is made, and are
        then the timeline's.
        A tensor that is written over another one is no allocation: the other's lives on under its name.
    (3) What is held at no instant, or is empty, is left out.
    (4) Addresses: best fit in one segment that grows. The smallest free block that is large enough, the
        lowest address among equals; what is left of it stays free; freed neighbours merge. Sizes are rounded
        up to `BLOCK` bytes.

Not handled: the pools and segments of PyTorch's allocator; `remat.passes.allocator` simulates those.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from .step_report import SCRATCH, HeldTensor, Timeline

BLOCK = 512
"""Bytes; sizes of blocks are multiples of it, as in PyTorch's CUDA allocator."""


@dataclass(frozen=True, slots=True)
class Event:
    """One call of the allocator."""

    is_free: bool
    number: int
    """Of the allocation."""


def rounded(size: int) -> int:
    """Bytes of the block that serves a request."""
    return max(-(-size // BLOCK), 1) * BLOCK


def allocations(timeline: Timeline) -> tuple[HeldTensor, ...]:
    """Definitions (1) and (3); a tensor of role `SCRATCH` for the scratch of an op."""
    n = len(timeline.ops)
    storages = _storages(timeline)
    before = [tensor for tensor in storages if tensor.birth < 0]
    born: list[list[HeldTensor]] = [[] for _ in range(n)]
    for tensor in storages:
        if 0 <= tensor.birth < n:
            born[tensor.birth].append(tensor)
    for instant, op in enumerate(timeline.ops):
        if op.scratch:
            born[instant].append(
                HeldTensor(
                    name=f"{SCRATCH} of {op.name}",
                    role=SCRATCH,
                    bytes=op.scratch,
                    birth=instant,
                    death=instant,
                    text="",
                    op=op.target,
                    module=op.module,
                    source=op.source,
                )
            )
    made = [*before, *(each for instant in born for each in instant)]
    return tuple(each for each in made if each.bytes and each.death >= max(each.birth, 0))


def _storages(timeline: Timeline) -> list[HeldTensor]:
    """Tensors with memory of their own, which lives until the last one that is written over it dies."""
    n = len(timeline.ops)
    deaths = [tensor.death for tensor in timeline.tensors]
    for number in reversed(range(len(deaths))):  # a tensor is written over one before it
        if (over := timeline.tensors[number].over) >= 0:
            deaths[over] = deaths[number]
    return [
        replace(tensor, death=min(death, n))
        for tensor, death in zip(timeline.tensors, deaths, strict=True)
        if tensor.over < 0
    ]


def events(made: Sequence[HeldTensor], instants: int) -> Iterator[Event]:
    """Definition (2), without the allocations that are made before the step.

    Args:
        made: allocations in their order.
        instants: number of instants of the step.
    """
    born: list[list[int]] = [[] for _ in range(instants)]
    dying: list[list[int]] = [[] for _ in range(instants)]
    for number, each in enumerate(made):
        if each.birth >= 0:
            born[each.birth].append(number)
        if each.death < instants:
            dying[each.death].append(number)
    for instant in range(instants):
        yield from (Event(False, number) for number in born[instant])
        freed = sorted(dying[instant], key=lambda number: made[number].role != SCRATCH)
        yield from (Event(True, number) for number in freed)


def place(sizes: Sequence[int], calls: Iterable[Event]) -> tuple[tuple[int, ...], int]:
    """Definition (4).

    Args:
        sizes: bytes of each allocation.
        calls: all calls, those before the step included.

    Returns:
        Offset of each allocation, and the size of the segment, both in bytes.
    """
    offsets = [0] * len(sizes)
    free: list[tuple[int, int]] = []  # size and offset, sorted
    size_at: dict[int, int] = {}  # offset of a free block -> size
    start_of: dict[int, int] = {}  # end of a free block -> offset
    top = 0

    def take(offset: int) -> int:
        size = size_at.pop(offset)
        del start_of[offset + size], free[bisect_left(free, (size, offset))]
        return size

    def give(offset: int, size: int) -> None:
        if offset + size in size_at:
            size += take(offset + size)
        if offset in start_of:
            before = start_of[offset]
            size += take(before)
            offset = before
        size_at[offset], start_of[offset + size] = size, offset
        insort(free, (size, offset))

    for call in calls:
        size = rounded(sizes[call.number])
        if call.is_free:
            give(offsets[call.number], size)
            continue
        fitting = bisect_left(free, (size, 0))
        if fitting < len(free):
            offset = free[fitting][1]
            left = take(offset) - size
            if left:
                give(offset + size, left)
        else:
            offset = start_of.get(top, top)
            if offset < top:
                take(offset)
            top = offset + size
        offsets[call.number] = offset
    return tuple(offsets), top
