"""Two sequences laid beside each other: where one is found in the other, and what is common to both.

Definitions.
    (1) *Distance* of two sequences: the fewest insertions, deletions and replacements of one item that make
        one of the other (Levenshtein).
    (2) The best place of a pattern in a text: the stretch of the text with the smallest distance from the
        pattern; the one that ends last, if there are several, and of those the longest.
    (3) *Common pairs*: a longest common subsequence, as pairs of indices. Where several items of the text
        could be taken, the earliest is.

Both are exact. A column of the table of dynamic programming is an integer with one bit for each item of the
pattern: (1) and (2) as in Myers, "A fast bit-vector algorithm for approximate string matching based on
dynamic programming" (J. ACM 46, 1999), in Hyyrö's form; (3) as in Hyyrö, "Bit-parallel LCS-length computation
revisited" (AWOCA 2004). So 20,000 items beside 60,000 take seconds. `difflib` looks for the longest block
again and again: it is slower by orders if few items make up most of a sequence, as sizes of tensors do, and
what it finds need not be longest in total.
(3) keeps len(pattern) * len(text) / 8 bytes, without what both begin and end with.
"""

from bisect import bisect_left
from collections.abc import Sequence

Pair = tuple[int, int]
"""Index in the pattern, index in the text."""


def _masks(pattern: Sequence[int]) -> dict[int, int]:
    """Item -> the bits where the pattern has it."""
    places: dict[int, bytearray] = {}
    for index, item in enumerate(pattern):
        bits = places.setdefault(item, bytearray(len(pattern) // 8 + 1))
        bits[index // 8] |= 1 << index % 8
    return {item: int.from_bytes(bits, "little") for item, bits in places.items()}


def distances(pattern: Sequence[int], text: Sequence[int], anchored: bool) -> list[int]:
    """Distance of the pattern from the nearest stretch that ends before each index of the text.

    Args:
        pattern: at least one item.
        text: in which it is looked for.
        anchored: only stretches that begin with the text count.

    Returns:
        len(text) + 1 numbers.
    """
    masks, full = _masks(pattern), (1 << len(pattern)) - 1
    last = 1 << (len(pattern) - 1)
    rises, falls, distance = full, 0, len(pattern)  # of the column, from item to item
    found = [distance]
    for item in text:
        equal = masks.get(item, 0)
        diagonal = (((equal & rises) + rises) ^ rises) | equal | falls
        up, down = falls | (full & ~(diagonal | rises)), rises & diagonal  # along the row
        distance += bool(up & last) - bool(down & last)
        up = (up << 1 | anchored) & full
        rises, falls = (down << 1 & full) | (full & ~(diagonal | up)), up & diagonal
        found.append(distance)
    return found


def _stretch(pattern: Sequence[int], text: Sequence[int], end: int) -> slice:
    """The longest of the best places of the pattern that end there."""
    reach = text[max(end - 2 * len(pattern), 0) : end]
    back = distances(pattern[::-1], reach[::-1], anchored=True)
    longest = len(reach) - back[::-1].index(min(back))
    return slice(end - longest, end)


def best_place(pattern: Sequence[int], text: Sequence[int]) -> slice:
    """Definition (2); the pattern has at least one item."""
    found = distances(pattern, text, anchored=False)
    return _stretch(pattern, text, len(text) - found[::-1].index(min(found)))


def next_place(pattern: Sequence[int], text: Sequence[int], begin: int, most: int) -> slice | None:
    """First place from `begin` on where the distance is `most` at the most, if there is one."""
    found = distances(pattern, text[begin:], anchored=False)
    end = next((i for i, distance in enumerate(found) if distance <= most), None)
    return None if end is None else _stretch(pattern, text, begin + end)


def common_pairs(pattern: Sequence[int], text: Sequence[int]) -> list[Pair]:
    """Definition (3)."""
    shorter = min(len(pattern), len(text))
    head = next((i for i in range(shorter) if pattern[i] != text[i]), shorter)
    rest = range(1, shorter - head + 1)
    tail = next((i - 1 for i in rest if pattern[-i] != text[-i]), shorter - head)
    ends = len(pattern) - tail, len(text) - tail
    middle = _common(pattern[head : ends[0]], text[head : ends[1]])
    return [
        *((i, i) for i in range(head)),
        *((head + i, head + j) for i, j in middle),
        *((ends[0] + i, ends[1] + i) for i in range(tail)),
    ]


def _common(pattern: Sequence[int], text: Sequence[int]) -> list[Pair]:
    masks, full = _masks(pattern), (1 << len(pattern)) - 1
    flat = (
        full  # bit i: the common subsequence is no longer with item i of the pattern than without
    )
    columns = [flat]
    for item in text:
        taken = flat & masks.get(item, 0)
        flat = ((flat + taken) | (flat - taken)) & full
        columns.append(flat)
    pairs: list[Pair] = []
    i, j = len(pattern), len(text)
    while i and j:
        if columns[j] >> (i - 1) & 1:
            i -= 1
            continue
        j -= 1
        if columns[j] >> (i - 1) & 1:
            i -= 1
            pairs.append((i, j))
    return pairs[::-1]


def near_pairs(
    pattern: Sequence[int], text: Sequence[int], pairs: Sequence[Pair], reach: int
) -> list[Pair]:
    """Pairs of equal items that are in neither sequence paired, and in a slightly different order.

    Args:
        pattern: one sequence.
        text: the other.
        pairs: common pairs.
        reach: how many items of the text apart the two may be.
    """
    matched, taken = dict(pairs), {j for _, j in pairs}
    left: dict[int, list[int]] = {}
    for j, item in enumerate(text):
        if j not in taken:
            left.setdefault(item, []).append(j)
    found: list[Pair] = []
    expected = 0
    for i, item in enumerate(pattern):
        if i in matched:
            expected = matched[i] + 1
            continue
        candidates = left.get(item, [])
        at = bisect_left(candidates, expected)
        near = [k for k in (at - 1, at) if 0 <= k < len(candidates)]
        nearest = min(near, key=lambda k: abs(candidates[k] - expected), default=-1)
        if near and abs(candidates[nearest] - expected) <= reach:
            found.append((i, candidates.pop(nearest)))
    return found
