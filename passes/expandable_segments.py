"""The CUDA caching allocator with ``expandable_segments:True``.

Definition, beyond that of `caching_allocator`; source: "Expandable Segments" and the functions
``find_expandable_block``, ``map_block`` and ``unmap_block`` of ``c10/cuda/CUDACachingAllocator.cpp``.
    (1) Each pool is one range of addresses. Pages (2 MiB in the small pool, 20 MiB in the large one)
        are mapped into it at the lowest address where free and unmapped blocks have room together.
    (2) Every rest is split off, so there is no slack. A free block before unmapped addresses counts,
        when blocks are compared, with what it can grow to.
    (3) When the driver refuses a page, all pages that are wholly free are unmapped, and it is asked
        again.

Not handled: the end of the range (PyTorch reserves addresses for 9/8 of the device's memory).
"""

from bisect import bisect_left, insort

from .caching_allocator import CachingAllocator, Chunk, Pool

_ADDRESSES = 2**60  # bytes of a range: more than any device has


class ExpandableAllocator(CachingAllocator):
    """The allocator of one device; `reserved` is what is mapped."""

    def _put(self, chunk: Chunk) -> None:
        if chunk.mapped:
            insort(chunk.pool.free, (chunk.size, chunk.address, chunk))
        else:
            insort(chunk.pool.unmapped, (chunk.address, chunk))

    def _take(self, chunk: Chunk) -> None:
        if chunk.mapped:
            free = chunk.pool.free
            del free[bisect_left(free, (chunk.size, chunk.address))]
        else:
            chunk.pool.unmapped.remove((chunk.address, chunk))

    def _preferred(self, free: list[tuple[int, int, Chunk]], fitting: int) -> int:
        i = fitting
        while i + 1 < len(free) and _room(free[i + 1][2]) < _room(free[i][2]):
            i += 1
        return i

    def _splits(self, chunk: Chunk, size: int) -> bool:
        return chunk.size - size >= self.config.min_block_size

    def _release_oversize(self, pool: Pool, size: int) -> bool:
        return False

    def _release_cached(self) -> None:
        for pool in (self.large, self.small):
            for _, _, chunk in tuple(pool.free):
                self._unmap(chunk)

    def _grow(self, pool: Pool, size: int) -> Chunk | None:
        """Rule (1): a block of at least `size`, pages mapped for it."""
        chunk = self._lowest_room(pool, size)
        if not chunk.mapped and not self._map(chunk, min(chunk.size, size)):
            return None
        while chunk.size < size:
            following = chunk.after
            assert following is not None, "free space ends before the room that was found"
            if not self._map(following, min(size - chunk.size, following.size)):
                return None
            chunk = following
        self._take(chunk)
        return chunk

    def _lowest_room(self, pool: Pool, size: int) -> Chunk:
        """First of the free and unmapped neighbours that together hold `size`."""
        for _, chunk in pool.unmapped:
            before = chunk.before
            start = chunk if before is None or before.requested else before
            room = 0
            end: Chunk | None = start
            while room < size and end is not None and not end.requested:
                room, end = room + end.size, end.after
            if room >= size:
                return start
        assert pool.end == 0, "the range of addresses is used up"
        pool.end = _ADDRESSES // pool.page * pool.page
        self.segments += 1
        chunk = Chunk(pool, 0, pool.end, mapped=False)
        self._put(chunk)
        return chunk

    def _map(self, chunk: Chunk, size: int) -> bool:
        """Map the pages of the first `size` bytes of an unmapped block; it becomes a free block."""
        size = -(-size // chunk.pool.page) * chunk.pool.page
        if not self._driver_has(size):
            return False
        self._take(chunk)
        if size < chunk.size:
            self._put(self._cut(chunk, size))
        chunk.mapped = True
        self.reserved += size
        self._merge(chunk, chunk.before)
        self._merge(chunk, chunk.after)
        self._put(chunk)
        return True

    def _unmap(self, chunk: Chunk) -> None:
        """Unmap the pages that lie wholly in a free block."""
        page = chunk.pool.page
        first = -(-chunk.address // page) * page
        last = (chunk.address + chunk.size) // page * page
        if first >= last:
            return
        self._take(chunk)
        if last < chunk.address + chunk.size:
            self._put(self._cut(chunk, last - chunk.address))
        if chunk.address < first:
            pages = self._cut(chunk, first - chunk.address)
            self._put(chunk)
            chunk = pages
        chunk.mapped = False
        self.reserved -= chunk.size
        self._merge(chunk, chunk.before)
        self._merge(chunk, chunk.after)
        self._put(chunk)


def _room(chunk: Chunk) -> int:
    """Bytes that a free block has, or can grow to."""
    after = chunk.after
    return chunk.size + (after.size if after is not None and not after.mapped else 0)
