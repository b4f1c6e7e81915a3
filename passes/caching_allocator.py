"""PyTorch's CUDA caching allocator as a state machine: allocate, free, and what is held meanwhile.

Follows ``c10/cuda/CUDACachingAllocator.cpp`` (commit 001074d2 and PyTorch 2.13).
    (1) A request is rounded up to a block size. Blocks up to 1 MiB live in the small pool, larger ones
        in the large pool; a pool never serves the other's requests.
    (2) The smallest free block that is large enough serves a request, the lowest address among equals.
        What is left of it is split off if it is worth it (`_splits`); if not, the whole block counts
        as allocated: that is *slack*.
    (3) Without such a block a segment is taken from the driver. If the driver refuses, cached segments
        that are wholly free are given back and it is asked again; then the request fails.
    (4) A freed block merges with free neighbours of its segment and stays cached.

Not handled: several streams, memory pools of CUDA graphs, the driver's own fragmentation and rounding;
`expandable_segments` has the other way of growing.
New segments lie above all earlier ones; addresses decide only between free blocks of one size.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass, field

from .allocator_config import AllocatorConfig


@dataclass(slots=True, eq=False)
class Chunk:
    """A block of a segment, free or allocated: what PyTorch calls ``Block``."""

    pool: "Pool"
    address: int
    size: int
    """Bytes."""
    mapped: bool = True
    """Whether there is memory behind the addresses; if not, the pool is expandable."""
    requested: int = 0
    """Bytes that were asked for; 0 if it is free."""
    rounded: int = 0
    """The same, rounded up to a block size."""
    before: "Chunk | None" = None
    after: "Chunk | None" = None
    """Neighbours in the segment."""
    age_from: int = 0
    """Look-ups that its pool had seen when it was freed."""

    @property
    def split(self) -> bool:
        """Whether it is only a part of its segment."""
        return self.before is not None or self.after is not None


@dataclass(slots=True, eq=False)
class Pool:
    """Free blocks that serve requests of one kind."""

    small: bool
    page: int
    """Bytes of a page that is mapped at a time, if the pool is expandable."""
    free: list[tuple[int, int, Chunk]] = field(default_factory=list)
    """Size, address and block, sorted."""
    unmapped: list[tuple[int, Chunk]] = field(default_factory=list)
    """Address and block, sorted."""
    end: int = 0
    """First address that was never used."""
    lookups: int = 0


class CachingAllocator:
    """The allocator of one device; its attributes are PyTorch's statistics of this moment."""

    def __init__(self, config: AllocatorConfig) -> None:
        """An allocator that holds nothing yet."""
        self.config = config
        self.small = Pool(True, config.small_buffer)
        self.large = Pool(False, config.large_segment_size)
        self.allocated = 0
        """Bytes of the allocated blocks."""
        self.requested = 0
        """Bytes that were asked for in them."""
        self.slack = 0
        """Bytes of them that a split would have left free."""
        self.reserved = 0
        """Bytes taken from the driver."""
        self.inactive_split = 0
        """Bytes of free blocks whose segment is in use; 0 with expandable segments, as in PyTorch."""
        self.segments = 0
        """Segments, or expandable ranges, in use."""

    def allocate(self, requested: int) -> Chunk | None:
        """A block for `requested` bytes (more than 0); None if there is no memory for it."""
        size = self.block_size(requested)
        pool = self.pool_of(size)
        chunk = self._cached(pool, size)
        if chunk is None:
            self._collect_garbage()
            chunk = self._from_driver(pool, size)
        if chunk is None and self._release_oversize(pool, size):
            chunk = self._from_driver(pool, size)
        if chunk is None:
            self._release_cached()
            chunk = self._from_driver(pool, size)
        if chunk is None:
            return None
        if self._splits(chunk, size):
            rest = self._cut(chunk, size)
            self._put(rest)
        chunk.requested, chunk.rounded = requested, size
        self.allocated += chunk.size
        self.requested += requested
        self.slack += chunk.size - size
        return chunk

    def free(self, chunk: Chunk) -> None:
        """Return a block to its pool."""
        self.allocated -= chunk.size
        self.requested -= chunk.requested
        self.slack -= chunk.size - chunk.rounded
        chunk.requested = chunk.rounded = 0
        self._merge(chunk, chunk.before)
        self._merge(chunk, chunk.after)
        self._put(chunk)

    def block_size(self, requested: int) -> int:
        """Rule (1): `requested` rounded up to the size of a block."""
        least = self.config.min_block_size
        interval = min(max(requested.bit_length() - 21, 0), 15)
        divisions = self.config.roundup_power2_divisions[interval]
        if divisions > 1 and requested > least * divisions:
            step = (1 << (requested.bit_length() - 1)) // divisions
            return -(-requested // step) * step
        return -(-requested // least) * least

    def segment_size(self, size: int) -> int:
        """Bytes that the driver is asked for when no cached block serves a block of `size`."""
        config = self.config
        if size <= config.small_size:
            return config.small_buffer
        if size < config.min_large_alloc:
            return config.large_segment_size
        return -(-size // config.round_large) * config.round_large

    def pool_of(self, size: int) -> Pool:
        """The pool that serves blocks of `size`."""
        return self.small if size <= self.config.small_size else self.large

    def largest_free(self, pool: Pool) -> int:
        """Bytes of the largest cached block of a pool."""
        return pool.free[-1][0] if pool.free else 0

    # Free blocks.

    def _put(self, chunk: Chunk) -> None:
        chunk.age_from = chunk.pool.lookups
        insort(chunk.pool.free, (chunk.size, chunk.address, chunk))
        if chunk.split:
            self.inactive_split += chunk.size

    def _take(self, chunk: Chunk) -> None:
        free = chunk.pool.free
        del free[bisect_left(free, (chunk.size, chunk.address))]
        if chunk.split:
            self.inactive_split -= chunk.size

    def _cached(self, pool: Pool, size: int) -> Chunk | None:
        """Rule (2): the free block that serves `size`, taken from its pool."""
        pool.lookups += 1
        free = pool.free
        i = bisect_left(free, (size, 0))
        if i == len(free):
            return None
        chunk = free[self._preferred(free, i)][2]
        limit = self.config.max_split_size
        if size < limit <= chunk.size:
            return None
        if size >= limit and chunk.size >= size + self.config.max_non_split_rounding:
            return None
        self._take(chunk)
        return chunk

    def _preferred(self, free: list[tuple[int, int, Chunk]], fitting: int) -> int:
        """Which of the free blocks, from index `fitting` on, is taken."""
        return fitting

    def _splits(self, chunk: Chunk, size: int) -> bool:
        rest = chunk.size - size
        if chunk.pool.small:
            return rest >= self.config.min_block_size
        return size < self.config.max_split_size and rest > self.config.small_size

    def _cut(self, chunk: Chunk, size: int) -> Chunk:
        """Shorten a block to `size`; the rest is a new block after it."""
        rest = Chunk(chunk.pool, chunk.address + size, chunk.size - size, chunk.mapped)
        rest.before, rest.after = chunk, chunk.after
        if rest.after is not None:
            rest.after.before = rest
        chunk.size, chunk.after = size, rest
        return rest

    def _merge(self, chunk: Chunk, other: Chunk | None) -> None:
        """Rule (4): let `chunk`, in no list, absorb a neighbour if that is free too."""
        if other is None or other.requested or other.mapped != chunk.mapped:
            return
        self._take(other)
        if other is chunk.before:
            chunk.address, chunk.before = other.address, other.before
            if chunk.before is not None:
                chunk.before.after = chunk
        else:
            chunk.after = other.after
            if chunk.after is not None:
                chunk.after.before = chunk
        chunk.size += other.size

    # The driver.

    def _driver_has(self, size: int) -> bool:
        limit = self.config.device_memory
        return limit is None or self.reserved + size <= limit

    def _from_driver(self, pool: Pool, size: int) -> Chunk | None:
        """Rule (3): a block of at least `size` in memory that was not reserved before."""
        segment = self.segment_size(size)
        allowed = self.config.allowed_memory
        if allowed is not None and self.reserved + segment > allowed:
            return None
        return self._grow(pool, size)

    def _grow(self, pool: Pool, size: int) -> Chunk | None:
        """A new segment for a block of `size`."""
        segment = self.segment_size(size)
        if not self._driver_has(segment):
            return None
        chunk = Chunk(pool, pool.end, segment)
        pool.end += segment
        self.reserved += segment
        self.segments += 1
        return chunk

    def _release(self, chunk: Chunk) -> None:
        self._take(chunk)
        self.reserved -= chunk.size
        self.segments -= 1

    def _release_cached(self) -> None:
        """Give back all that is wholly free."""
        for pool in (self.large, self.small):
            for _, _, chunk in tuple(pool.free):
                if not chunk.split:
                    self._release(chunk)

    def _release_oversize(self, pool: Pool, size: int) -> bool:
        """Give back unsplittable segments until `size` would fit; False if they do not suffice."""
        limit = self.config.max_split_size
        wanted = max(size, limit)
        i = bisect_left(pool.free, (wanted, 0))
        if i < len(pool.free):
            self._release(pool.free[i][2])
            return True
        released = 0
        while released < wanted and pool.free and self.largest_free(pool) >= limit:
            released += self.largest_free(pool)
            self._release(pool.free[-1][2])
        return released >= wanted

    def _collect_garbage(self) -> None:
        """Give back the older of the unused large segments if reserved memory exceeds the threshold."""
        allowed = self.config.allowed_memory
        if not self.config.garbage_collection_threshold or allowed is None:
            return
        target = self.reserved - int(self.config.garbage_collection_threshold * allowed)
        whole = [chunk for _, _, chunk in self.large.free if not chunk.split]
        age = {chunk: self.large.lookups - chunk.age_from for chunk in whole}
        while target > 0 and age:
            mean = sum(age.values()) / len(age)
            for chunk in [chunk for chunk in age if age[chunk] >= mean]:
                target -= chunk.size
                del age[chunk]
                self._release(chunk)
