"""Alignment is exact: it equals the textbook tables."""

from collections.abc import Sequence
from itertools import pairwise

from hypothesis import example, given, settings
from hypothesis import strategies as st

from remat.views.alignment import (
    best_place,
    common_pairs,
    distances,
    near_pairs,
    next_place,
)

few = st.lists(st.integers(0, 3), max_size=14)
some = st.lists(st.integers(0, 3), min_size=1, max_size=8)


def distance(a: Sequence[int], b: Sequence[int]) -> int:
    """Wagner and Fischer."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        above, row = row, [i]
        for j, y in enumerate(b, 1):
            row.append(min(above[j] + 1, row[j - 1] + 1, above[j - 1] + (x != y)))
    return row[-1]


def longest_common(a: Sequence[int], b: Sequence[int]) -> int:
    row = [0] * (len(b) + 1)
    for x in a:
        above, row = row, [0]
        for j, y in enumerate(b, 1):
            row.append(above[j - 1] + 1 if x == y else max(above[j], row[j - 1]))
    return row[-1]


@settings(deadline=None)
@given(some, few)
def test_distances_are_those_of_the_nearest_stretch(pattern: list[int], text: list[int]) -> None:
    ends = range(len(text) + 1)
    assert distances(pattern, text, anchored=True) == [
        distance(pattern, text[:end]) for end in ends
    ]
    assert distances(pattern, text, anchored=False) == [
        min(distance(pattern, text[begin:end]) for begin in range(end + 1)) for end in ends
    ]


@settings(deadline=None)
@given(some, few)
def test_no_stretch_is_better_later_or_longer(pattern: list[int], text: list[int]) -> None:
    place = best_place(pattern, text)
    every = [
        (distance(pattern, text[begin:end]), -end, begin)
        for end in range(len(text) + 1)
        for begin in range(end + 1)
    ]
    found = distance(pattern, text[place]), -place.stop, place.start
    assert found == min(every)


@settings(deadline=None)
@given(few, few)
@example([1, 2, 3], [1, 2, 3])
@example([1, 2, 2, 3], [1, 2, 3])
@example([], [1])
def test_common_pairs_are_a_longest_common_subsequence(a: list[int], b: list[int]) -> None:
    pairs = common_pairs(a, b)
    assert all(a[i] == b[j] for i, j in pairs)
    for (i, j), (k, m) in pairwise(pairs):
        assert i < k
        assert j < m
    assert len(pairs) == longest_common(a, b)


@settings(deadline=None)
@given(few, few, st.integers(0, 5))
def test_near_pairs_are_new_and_of_equal_items(a: list[int], b: list[int], reach: int) -> None:
    pairs = common_pairs(a, b)
    more = near_pairs(a, b, pairs, reach)
    assert all(a[i] == b[j] for i, j in more)
    every = pairs + more
    assert len({i for i, _ in every}) == len({j for _, j in every}) == len(every)


def test_an_item_is_found_as_far_away_as_it_may_be() -> None:
    a, b = [9, 1, 2, 3, 4], [1, 2, 3, 4, 9]
    pairs = common_pairs(a, b)
    assert near_pairs(a, b, pairs, 4) == [(0, 4)]
    assert near_pairs(a, b, pairs, 3) == []


def test_of_equal_items_the_earliest_are_paired() -> None:
    assert common_pairs([1, 5, 2], [1, 5, 5, 5, 2]) == [(0, 0), (1, 1), (2, 4)]


def test_the_next_place_is_the_first_that_is_good_enough() -> None:
    pattern, text = [1, 2, 3, 4], [1, 2, 3, 4, 9, 9, 1, 2, 4, 9, 1, 2, 3, 4]
    assert next_place(pattern, text, 4, 1) == slice(6, 9)
    assert next_place(pattern, text, 4, 0) == slice(10, 14)
    assert next_place(pattern, text, 9, 0) == slice(10, 14)
    assert next_place(pattern, text, 11, 0) is None
