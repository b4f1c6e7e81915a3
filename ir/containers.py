"""Contents of lists, dicts and sets, nested in one another to any depth: copied, compared, put back.

Not seen: the inside of other objects.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

PLAIN = (str, bytes, int, float, complex, bool)


@dataclass(frozen=True, slots=True)
class Contents:
    """What every container in a value held at one time."""

    held: tuple[tuple[Any, Any], ...]
    """Each container, and its elements in a plain one."""

    def changed(self) -> bool:
        """Whether a container now has other elements, or another order of them."""
        return any(not _same_elements(now, before) for now, before in self.held)

    def put_back(self) -> None:
        """Give every container that has changed its elements again; others may not be writable."""
        for now, before in self.held:
            if not _same_elements(now, before):
                now.clear()
                now.extend(before) if isinstance(now, list) else now.update(before)


def contents(value: object) -> Contents:
    """The contents of `value` now, if it is a container, and of all containers in it."""
    return Contents(tuple((each, elements(each)) for each in containers(value)))


def elements(container: Any) -> Any:
    """The elements of a list, dict or set, in a plain one."""
    kind = next(kind for kind in (list, dict, set) if isinstance(container, kind))
    return kind(container)


def containers(value: object) -> Iterator[Any]:
    """`value`, if it is a list, dict or set, and all of these in it, each once, outermost first."""
    seen: set[int] = set()
    ahead = [value]
    while ahead:
        each = ahead.pop()
        if id(each) in seen or not isinstance(each, list | dict | set | tuple):
            continue
        seen.add(id(each))
        if not isinstance(each, tuple):
            yield each
        ahead += list(each.values()) if isinstance(each, dict) else list(each)


def same(now: object, before: object) -> bool:
    """Whether two values are one object, or equal and plain."""
    equal = type(now) is type(before) and isinstance(now, PLAIN) and now == before
    return now is before or equal


def _same_elements(now: Any, before: Any) -> bool:
    if len(now) != len(before):
        return False
    if isinstance(now, set):  # a copy may have another order
        return bool(now == before)
    if isinstance(now, dict):
        return list(now) == list(before) and all(map(same, now.values(), before.values()))
    return all(map(same, now, before))
