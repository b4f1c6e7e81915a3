"""The rules of CUDA's caching allocator, each with numbers worked out by hand, and its invariants."""

from dataclasses import replace

import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st

from remat.ir import Block, Instant, Phase, Role, Trace
from remat.passes import profile
from remat.passes.allocator import allocator_for, simulate
from remat.passes.allocator_config import AllocatorConfig
from remat.passes.caching_allocator import CachingAllocator, Chunk
from remat.passes.rounding import round_up, rounded

KIB, MIB, GIB = 2**10, 2**20, 2**30
EXPANDABLE = AllocatorConfig(expandable_segments=True)


def allocate(allocator: CachingAllocator, size: int) -> Chunk:
    chunk = allocator.allocate(size)
    assert chunk is not None
    return chunk


def trace(*blocks: tuple[int, int, int], scratch: tuple[int, ...] = ()) -> Trace:
    """Blocks as bytes, birth, death; as many instants as `scratch` has."""
    return Trace(
        tuple(
            Instant(f"i{i}", "op", Phase.FORWARD, sympy.Integer(s)) for i, s in enumerate(scratch)
        ),
        tuple(
            Block(f"b{i}", Role.ACTIVATION, sympy.Integer(size), birth, death)
            for i, (size, birth, death) in enumerate(blocks)
        ),
    )


def test_small_blocks_are_packed_into_segments_of_2_mib() -> None:
    allocator = CachingAllocator(AllocatorConfig())
    a, b, c = (allocate(allocator, size) for size in (1, 513, MIB))
    assert [chunk.size for chunk in (a, b, c)] == [512, 1024, MIB]
    assert [chunk.address for chunk in (a, b, c)] == [0, 512, 1536]
    assert (allocator.reserved, allocator.segments) == (2 * MIB, 1)
    assert allocator.inactive_split == MIB - 1536
    assert allocator.requested == 1 + 513 + MIB
    allocate(allocator, MIB)  # the rest, MIB - 1536 bytes, is too small
    assert (allocator.reserved, allocator.segments) == (4 * MIB, 2)


def test_one_byte_beyond_1_mib_belongs_to_the_large_pool() -> None:
    allocator = CachingAllocator(AllocatorConfig())
    chunk = allocate(allocator, MIB + 1)
    assert (chunk.size, chunk.pool.small, allocator.reserved) == (MIB + 512, False, 20 * MIB)
    allocate(allocator, MIB)
    assert allocator.reserved == 22 * MIB


@pytest.mark.parametrize(
    ("size", "segment"),
    [
        (MIB + 512, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 512, 12 * MIB),
        (33 * MIB, 34 * MIB),
    ],
)
def test_large_segments(size: int, segment: int) -> None:
    allocator = CachingAllocator(AllocatorConfig())
    allocate(allocator, size)
    assert allocator.reserved == segment


def test_rest_of_up_to_1_mib_is_not_split_off_a_large_block() -> None:
    allocator = CachingAllocator(AllocatorConfig())
    whole = allocate(allocator, 11 * MIB)  # a segment of 12 MiB
    assert (whole.size, allocator.allocated, allocator.slack) == (12 * MIB, 12 * MIB, MIB)
    assert allocator.requested == 11 * MIB
    allocator.free(whole)
    assert allocator.slack == 0
    part = allocate(allocator, 11 * MIB - 512)
    assert (part.size, allocator.slack, allocator.reserved) == (11 * MIB - 512, 0, 12 * MIB)
    assert allocator.inactive_split == MIB + 512


def test_smallest_fitting_block_serves_then_the_lowest_address() -> None:
    allocator = CachingAllocator(AllocatorConfig())
    chunks = [allocate(allocator, size * MIB) for size in (40, 20, 30, 20)]
    for chunk in chunks:
        allocator.free(chunk)
    again = [allocate(allocator, size * MIB) for size in (20, 20, 20)]
    assert [chunk.address for chunk in again] == [40 * MIB, 90 * MIB, 60 * MIB]
    assert again[2].size == 20 * MIB  # split from the block of 30 MiB
    assert (allocator.reserved, allocator.inactive_split) == (110 * MIB, 10 * MIB)


def test_freed_neighbours_merge_on_both_sides() -> None:
    allocator = CachingAllocator(AllocatorConfig())
    a, b, c, d = (allocate(allocator, 5 * MIB) for _ in range(4))
    assert (allocator.reserved, allocator.inactive_split) == (20 * MIB, 0)
    allocator.free(a)
    allocator.free(c)
    assert allocator.inactive_split == 10 * MIB
    allocate(allocator, 8 * MIB)  # 10 MiB are free, but in two parts
    assert allocator.reserved == 40 * MIB
    allocator.free(b)
    assert allocate(allocator, 15 * MIB).address == 0
    assert allocator.reserved == 40 * MIB
    assert d.address == 15 * MIB


def test_power_of_2_steps() -> None:
    allocator = CachingAllocator(AllocatorConfig.from_env("roundup_power2_divisions:4"))
    sizes = {
        2048: 2048,
        2049: 2560,
        1200: 1536,
        5000: 5120,
        6 * MIB + 1: 7 * MIB,
        8 * MIB: 8 * MIB,
    }
    assert {size: allocator.block_size(size) for size in sizes} == sizes
    by_interval = AllocatorConfig.from_env("roundup_power2_divisions:[256:1,512:2,1024:4,>:8]")
    allocator = CachingAllocator(by_interval)
    assert allocator.block_size(300 * MIB + 1) == 300 * MIB + 512
    assert allocator.block_size(600 * MIB) == 768 * MIB
    assert allocator.block_size(1100 * MIB) == 1280 * MIB
    assert allocator.block_size(2100 * MIB) == 2304 * MIB


def test_blocks_beyond_max_split_size_are_kept_whole() -> None:
    allocator = CachingAllocator(AllocatorConfig.from_env("max_split_size_mb:40"))
    big = allocate(allocator, 100 * MIB)
    allocator.free(big)
    allocate(allocator, 30 * MIB)  # may not take a block of 40 MiB or more
    assert allocator.reserved == 130 * MIB
    assert allocate(allocator, 81 * MIB).size == 100 * MIB  # less than 20 MiB larger
    assert allocator.slack == 19 * MIB
    assert allocator.reserved == 130 * MIB
    allocate(allocator, 80 * MIB)
    assert allocator.reserved == 210 * MIB


def test_blocks_far_larger_than_an_oversize_request_are_refused() -> None:
    allocator = CachingAllocator(AllocatorConfig.from_env("max_split_size_mb:40"))
    allocator.free(allocate(allocator, 100 * MIB))
    allocate(allocator, 80 * MIB)  # 20 MiB smaller
    assert allocator.reserved == 180 * MIB


def test_expandable_pools_map_pages_on_demand() -> None:
    allocator = allocator_for(EXPANDABLE)
    allocate(allocator, 100)
    assert allocator.reserved == 2 * MIB
    first = allocate(allocator, 11 * MIB)
    assert (allocator.reserved, allocator.slack) == (22 * MIB, 0)
    second = allocate(allocator, 11 * MIB)  # 9 MiB are mapped already
    assert (second.address, allocator.reserved) == (11 * MIB, 42 * MIB)
    allocator.free(first)
    allocator.free(second)  # one free block of 40 MiB, which can grow
    assert allocate(allocator, 50 * MIB).address == 0
    assert (allocator.reserved, allocator.segments) == (62 * MIB, 2)
    assert allocator.inactive_split == 0


def test_expandable_best_fit_spares_the_end_of_the_range() -> None:
    allocator = allocator_for(EXPANDABLE)
    first, _ = allocate(allocator, 18 * MIB), allocate(allocator, 12 * MIB)
    allocator.free(first)  # 18 MiB free at 0, 10 MiB free at 30 MiB before unmapped pages
    assert allocate(allocator, 5 * MIB).address == 0
    assert allocator.reserved == 40 * MIB


def test_wholly_free_pages_are_unmapped_when_memory_is_short() -> None:
    allocator = allocator_for(replace(EXPANDABLE, device_memory=100 * MIB))
    first, middle = allocate(allocator, 50 * MIB), allocate(allocator, 10 * MIB)
    allocate(allocator, 10 * MIB)
    assert allocator.reserved == 80 * MIB
    allocator.free(first)
    assert allocator.allocate(80 * MIB) is None  # the pages up to 40 MiB were given back
    assert allocator.reserved == 40 * MIB
    allocator.free(middle)
    assert allocate(allocator, 60 * MIB).address == 0
    assert allocator.reserved == 80 * MIB


def test_whole_cached_segments_are_released_before_giving_up() -> None:
    allocator = CachingAllocator(AllocatorConfig(device_memory=100 * MIB))
    allocator.free(allocate(allocator, 60 * MIB))
    kept = allocate(allocator, 500)
    assert allocator.reserved == 62 * MIB
    assert allocate(allocator, 90 * MIB).size == 90 * MIB  # the cached 60 MiB went
    assert (allocator.reserved, allocator.segments) == (92 * MIB, 2)
    assert allocator.allocate(10 * MIB) is None
    assert kept.address == 0


def test_oversize_segments_are_released_first() -> None:
    config = AllocatorConfig.from_env("max_split_size_mb:40", device_memory=200 * MIB)
    allocator = CachingAllocator(config)
    small, *big = (allocate(allocator, size * MIB) for size in (30, 50, 60, 60))
    for chunk in (small, *big):
        allocator.free(chunk)
    allocate(allocator, 110 * MIB)  # 60 + 60 suffice: 30 and 50 stay cached
    assert allocator.reserved == (30 + 50 + 110) * MIB


def test_old_segments_are_collected_beyond_the_threshold() -> None:
    text = "garbage_collection_threshold:0.5,per_process_memory_fraction:0.5"
    config = AllocatorConfig.from_env(text, device_memory=400 * MIB)  # threshold at 100 MiB
    allocator = CachingAllocator(config)
    old, young = allocate(allocator, 60 * MIB), allocate(allocator, 50 * MIB)
    allocator.free(old)
    allocate(allocator, 300)
    allocator.free(young)  # ages: 1 look-up and 0
    allocate(allocator, 70 * MIB)
    assert allocator.reserved == (50 + 2 + 70) * MIB
    assert allocator.allocate(130 * MIB) is None  # the fraction allows 200 MiB
    assert allocator.reserved == (2 + 70) * MIB


def test_the_instant_of_running_out_is_reported() -> None:
    step = trace((60 * MIB, -1, 3), (30 * MIB, 0, 0), (45 * MIB, 1, 2), scratch=(0, 0, 0))
    out = simulate(step, AllocatorConfig(device_memory=100 * MIB)).out_of_memory
    assert out is not None
    assert (out.repeat, out.instant, out.name, out.requested) == (0, 1, "b2", 45 * MIB)
    assert (out.allocated, out.reserved, out.largest_free) == (60 * MIB, 60 * MIB, 0)
    fits = simulate(step, AllocatorConfig(device_memory=106 * MIB))  # the 30 MiB are released
    assert fits.out_of_memory is None
    assert fits.peak_reserved == 106 * MIB


def test_fragmentation_runs_out_of_memory_that_is_free() -> None:
    blocks = [(2 * MIB, 0, 0 if i % 2 else 2) for i in range(10)]
    step = trace(*blocks, (10 * MIB, 1, 1), scratch=(0, 0))
    out = simulate(step, AllocatorConfig(device_memory=20 * MIB)).out_of_memory
    assert out is not None
    assert (out.allocated, out.reserved, out.largest_free) == (10 * MIB, 20 * MIB, 2 * MIB)


def test_scratch_counts_at_its_instant_and_may_fail() -> None:
    step = trace((3 * MIB, -1, 1), scratch=(4 * MIB,))
    use = simulate(step)
    assert (use.allocated, use.reserved, use.peak_instant) == ((7 * MIB,), (20 * MIB,), 0)
    step = trace((3 * MIB, -1, 1), scratch=(40 * MIB,))
    out = simulate(step, AllocatorConfig(device_memory=50 * MIB)).out_of_memory
    assert out is not None
    assert (out.name, out.instant) == ("i0", 0)


def test_later_repetitions_reuse_what_is_cached() -> None:
    step = trace((12 * MIB, -1, 2), (2 * MIB, 0, 2), (22 * MIB, 1, 1), scratch=(0, 0))
    first, later = simulate(step, repeats=1), simulate(step, repeats=5)
    assert first.reserved == (32 * MIB, 54 * MIB)
    assert later.reserved == (54 * MIB, 54 * MIB)
    assert first.allocated == later.allocated == (14 * MIB, 36 * MIB)


def test_a_step_without_instants_is_what_is_resident() -> None:
    use = simulate(trace((5, -1, 0)))
    assert (use.peak_allocated, use.peak_requested, use.peak_reserved) == (512, 5, 2 * MIB)
    assert (use.peak_instant, use.allocated) == (-1, ())


def test_settings_are_read_as_pytorch_reads_them() -> None:
    config = AllocatorConfig.from_env(
        " expandable_segments : True, max_split_size_mb:512,pinned_use_background_threads:True,"
        "roundup_power2_divisions:[256:1,512:2,>:8],backend:native"
    )
    assert config.expandable_segments
    assert config.max_split_size == 512 * MIB
    assert config.roundup_power2_divisions == (1,) * 9 + (2,) + (8,) * 6
    assert AllocatorConfig.from_env("") == AllocatorConfig()
    assert AllocatorConfig.from_env("large_segment_size_mb:40").max_non_split_rounding == 40 * MIB


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_split_mb:5", "'max_split_mb:5'; there are, as key:value: max_split_size_mb"),
        ("expandable_segments", "there are, as key:value"),
        ("expandable_segments:true", "must be True or False"),
        ("max_split_size_mb:19", "max_split_size_mb must be at least 20"),
        ("max_split_size_mb:x", "invalid literal"),
        ("large_segment_size_mb:10", "must exceed 10"),
        ("roundup_power2_divisions:3", "3 is not a power of 2"),
        ("garbage_collection_threshold:1", "between 0 and 1"),
        ("backend:cudaMallocAsync", "only the native backend"),
    ],
)
def test_wrong_settings_are_named(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AllocatorConfig.from_env(text)


SIZES = st.one_of(st.integers(1, 3 * MIB), st.integers(1, 64).map(lambda n: n * MIB + 512))
CONFIGS = st.sampled_from(
    [
        AllocatorConfig(),
        EXPANDABLE,
        AllocatorConfig(device_memory=200 * MIB),
        replace(EXPANDABLE, device_memory=200 * MIB),
        AllocatorConfig.from_env("max_split_size_mb:20,roundup_power2_divisions:8"),
        AllocatorConfig.from_env(
            "garbage_collection_threshold:0.3,per_process_memory_fraction:0.9,max_split_size_mb:24",
            device_memory=300 * MIB,
        ),
    ]
)


def check(allocator: CachingAllocator, live: list[Chunk]) -> None:
    """Blocks tile their segments, no two free ones touch, and the statistics are their sums."""
    free = [x for pool in (allocator.small, allocator.large) for _, _, x in pool.free]
    unmapped = [x for pool in (allocator.small, allocator.large) for _, x in pool.unmapped]
    for chunk in [*free, *live, *unmapped]:
        after = chunk.after
        if after is not None:
            assert after.before is chunk
            assert after.address == chunk.address + chunk.size
            assert chunk.requested or after.requested or chunk.mapped != after.mapped
    assert allocator.reserved == sum(chunk.size for chunk in [*free, *live])
    assert allocator.allocated == sum(chunk.size for chunk in live) <= allocator.reserved
    assert allocator.requested == sum(chunk.requested for chunk in live) <= allocator.allocated
    split = sum(chunk.size for chunk in free if chunk.split)
    assert allocator.inactive_split == (0 if unmapped else split)
    config = allocator.config
    rounding = MIB if config.max_split_size > GIB else config.max_non_split_rounding
    for chunk in live:
        assert chunk.size - chunk.rounded <= rounding
        assert chunk.rounded - chunk.requested < max(512, chunk.requested / 8 + 512)


@settings(deadline=None)
@given(CONFIGS, st.lists(st.tuples(SIZES, st.integers(0, 99)), max_size=60))
def test_invariants(config: AllocatorConfig, events: list[tuple[int, int]]) -> None:
    allocator = allocator_for(config)
    live: list[Chunk] = []
    for size, choice in events:
        if choice < 40 and live:
            allocator.free(live.pop(choice % len(live)))
        else:
            chunk = allocator.allocate(size)
            assert chunk is not None or config.device_memory is not None
            live += [chunk] if chunk is not None else []
        check(allocator, live)
    for chunk in live:
        allocator.free(chunk)
    check(allocator, [])
    assert allocator.allocated == allocator.requested == allocator.slack == 0
    if not config.expandable_segments:
        free = len(allocator.small.free) + len(allocator.large.free)
        assert (free, allocator.inactive_split) == (allocator.segments, 0)


BLOCKS = st.lists(st.tuples(SIZES, st.integers(-1, 7), st.integers(0, 8)), max_size=30)


@settings(deadline=None)
@given(BLOCKS, st.lists(st.integers(0, 5 * MIB), min_size=8, max_size=8), st.booleans())
def test_allocated_is_the_rounded_profile_and_slack(
    blocks: list[tuple[int, int, int]], scratch: list[int], expandable: bool
) -> None:
    step = trace(*((s, a, max(a, b)) for s, a, b in blocks), scratch=tuple(scratch))
    use = simulate(step, AllocatorConfig(expandable_segments=expandable), repeats=3)
    assert use.requested == profile(step).bytes
    expected = profile(rounded(step)).bytes
    assert all(have >= want for have, want in zip(use.allocated, expected, strict=True))
    assert use.peak_allocated == expected[use.peak_instant] + use.slack
    if expandable:
        assert use.allocated == expected


def test_sizes_round_up_symbolically() -> None:
    b, s = sympy.symbols("b s", integer=True, positive=True)
    assert round_up(1024 * b * s + 512, 512) == 1024 * b * s + 512
    assert round_up(512 * b * (s + 1), 512) == 512 * b * (s + 1)
    assert round_up(sympy.Integer(513), 512) == 1024
    odd = round_up(4 * b * s, 512)
    assert [int(odd.subs({b: 1, s: n})) for n in (0, 1, 128, 129)] == [0, 512, 512, 1024]
    half = round_up(512 * sympy.floor(s / 2), 512)
    assert int(half.subs({s: 5})) == 1024
