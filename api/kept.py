"""The plans that a drop-in keeps, and which of them a call can run.

Definitions.
    (1) A *family* is the plans that were made under one guard: the same kinds of arguments, state of the
        model, autocast. In it are plans for gradients that are resident at forward or not, and for sizes
        that one plan does not cover.
    (2) Sizes *change* if they are named in `dynamic`; or, without that, if a call is like a kept one but
        for them. Then names are made up for them, and a family with these as symbols is planned:
        one short batch is enough to have every other one planned.

Names that are made up: sizes that have always been equal so far are one size. If they turn out to differ, the
next family has them apart.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from remat.ir.fake import Dynamic, sizes_of
from remat.ir.functional import argument_names

from .guards import Guard, State, described
from .outside import Outside, Remedy
from .planned import Planned
from .sizes import why_not_at

PLANS = 8
"""Plans that are kept; each has its own graphs."""
Key = tuple[bool, tuple[Any, ...]]
"""Whether gradients are resident when the forward begins, and, if sizes change, what the arguments are."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A plan that is kept."""

    guard: Guard
    planned: Planned
    rebuild: Callable[[Any], Any]
    beside: int
    """Bytes that are counted for other models."""
    left: int
    """Bytes that a forward leaves for its backward."""


@dataclass(slots=True)
class Family:
    """Plans under one guard."""

    guard: Guard
    dynamic: Dynamic
    """Sizes that change."""
    entries: dict[Key, Entry] = field(default_factory=dict)

    def key(self, tensors: Sequence[torch.Tensor], resident: bool) -> Key:
        """What the choice of a plan depends on."""
        return resident, described(list(tensors)) if self.dynamic else ()

    def distinct(self, resident: bool) -> list[Entry]:
        """Entries that serve a call, each once, in the order in which they were made.

        Args:
            resident: gradients exist when the forward begins; a plan for that serves without them, too.
        """
        found = {id(e): e for (has, _), e in self.entries.items() if has or not resident}
        return list(found.values())

    def at(self, tensors: Sequence[torch.Tensor], resident: bool) -> Entry | None:
        """The entry for a call inside the guard; None if there is no plan for it."""
        key = self.key(tensors, resident)
        found = self.entries.get(key)
        if found is None and not resident:
            found = self.entries.get((True, key[1]))
        if found is not None or not self.dynamic:
            return found
        for entry in self.distinct(resident):
            if not why_not_at(entry.planned, tensors):
                self.entries[key] = entry
                return entry
        return None

    def check(self, tensors: list[torch.Tensor], pattern: object) -> Outside | State:
        """`Guard.check`; a call that has two numbers for one size is outside, too."""
        found = self.guard.check(tensors, pattern)
        if isinstance(found, Outside) or not self.dynamic:
            return found
        _, size = self.key(tensors, False)
        if (True, size) in self.entries or (False, size) in self.entries:
            return found
        try:
            next(iter(self.entries.values())).planned.request.sizes_in(tensors)
        except ValueError as error:
            return Outside(str(error), Remedy.SIZES)
        return found


@dataclass(slots=True)
class Kept:
    """All plans of a drop-in."""

    families: list[Family] = field(default_factory=list)
    """The one in use last."""

    def serving(
        self, tensors: list[torch.Tensor], pattern: object
    ) -> tuple[Family, State] | Outside | None:
        """The family that a call belongs to, with parameters and buffers as they are now.

        If there is none, how the call differs from the family in use; None if there are no families.
        """
        first: Outside | None = None
        for family in reversed(self.families):
            found = family.check(tensors, pattern)
            if not isinstance(found, Outside):
                if family is not self.families[-1]:
                    self.families.remove(family)
                    self.families.append(family)
                return family, found
            first = first or found
        return first

    def add(self, family: Family, key: Key, entry: Entry) -> None:
        """Keep a plan, in a family that is known or new, and only the last plans that were made."""
        family.entries[key] = entry
        self.families = [f for f in self.families if f is not family] + [family]
        made = [e for f in self.families for e in f.distinct(resident=False)]
        for old in made[:-PLANS]:
            for f in self.families:
                f.entries = {k: e for k, e in f.entries.items() if e is not old}
        self.families = [f for f in self.families if f.entries]


def changing(
    family: Family,
    forward: Callable[..., Any],
    tensors: Sequence[torch.Tensor],
    pattern: Any,
) -> Dynamic:
    """The sizes of a family that change, and those in which a call like its own differs from it.

    Args:
        family: a call is outside its guard for its sizes.
        forward: of the model, bound.
        tensors: of that call.
        pattern: of that call.
    """
    names = argument_names(forward, pattern, len(tensors))
    known = [tuple(spec[0] for spec in entry.guard.arguments) for entry in family.distinct(False)]
    known.append(tuple(tensor.shape for tensor in tensors))
    history: dict[tuple[int, ...], str] = {}
    found: dict[str, dict[int, str]] = {}
    for i, dim in _dims(tensors):
        sizes = tuple(shapes[i][dim] for shapes in known)
        was = family.dynamic.get(names[i], {})
        if len(set(sizes)) > 1 or dim in was:
            name = history.setdefault(sizes, f"{names[i]}_{dim}")
            found.setdefault(names[i], {})[dim] = name
    try:
        sizes_of(tensors, names, found)
    except ValueError:  # an argument that holds several tensors, of different sizes
        return {}
    return found


def _dims(tensors: Sequence[torch.Tensor]) -> Iterator[tuple[int, int]]:
    return ((i, dim) for i, tensor in enumerate(tensors) for dim in range(tensor.dim()))


def largest(
    family: Family,
    dynamic: Dynamic,
    forward: Callable[..., Any],
    tensors: Sequence[torch.Tensor],
    pattern: Any,
) -> dict[str, int]:
    """Sizes at which a plan for changing sizes is made: the largest so far if they cover the call's."""
    names = argument_names(forward, pattern, len(tensors))
    now = sizes_of(tensors, names, dynamic)
    before = dict(now)
    for i, dim in _dims(tensors):
        if name := dynamic.get(names[i], {}).get(dim):
            before[name] = int(family.guard.arguments[i][0][dim])
    return before if all(1 < now[name] <= before[name] for name in now) else now
