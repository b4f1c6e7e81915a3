"""The plans of a drop-in, and which of them serves a call.

A plan is looked up by whether gradients are resident when the forward begins and, if sizes are dynamic, by
what the tensor arguments are. One for resident gradients serves where there are none, too.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .guards import Guard, described
from .planned import Planned
from .sizes import why_not_at

PLANS = 8
"""Plans that are kept; each has its own graphs."""

_Key = tuple[bool, tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class Entry:
    """One plan that can run."""

    guard: Guard
    planned: Planned
    rebuild: Callable[[Any], Any]
    """Output tensors to the model's output."""


@dataclass(slots=True)
class Entries:
    """The plans of a drop-in."""

    dynamic: bool
    """The plans have symbolic sizes."""
    plans: dict[_Key, Entry] = field(default_factory=dict)
    refused: dict[_Key, str] = field(default_factory=dict)
    """Why there is no plan for these calls, though there is one for others."""

    def _key(self, tensors: Sequence[torch.Tensor], resident: bool) -> _Key:
        return resident, described(list(tensors)) if self.dynamic else ()

    def at(self, tensors: Sequence[torch.Tensor], resident: bool) -> Entry | None:
        """The plan for a call's tensors; None if there is none for them.

        Args:
            tensors: of the call.
            resident: gradients exist when the forward begins.
        """
        resident, size = key = self._key(tensors, resident)
        found = self.plans.get(key)
        if found is None and not resident:
            found = self.plans.get((True, size))
        if found is not None or not self.dynamic:
            return found
        for entry in self.distinct(resident):
            if not why_not_at(entry.planned, tensors):
                self.plans[key] = entry
                return entry
        return None

    def distinct(self, resident: bool) -> list[Entry]:
        """Plans that serve a call, each once, in the order in which they were made.

        Args:
            resident: gradients exist when the forward begins.
        """
        found = {id(e): e for (has, _), e in self.plans.items() if has or not resident}
        return list(found.values())

    def has_size(self, tensors: Sequence[torch.Tensor]) -> bool:
        """A call with such tensors has been looked up before."""
        return any(self._key(tensors, resident) in self.plans for resident in (True, False))

    def keep(self, entry: Entry, tensors: Sequence[torch.Tensor], resident: bool) -> None:
        """Add a plan; the oldest of too many is dropped."""
        self.plans[self._key(tensors, resident)] = entry
        kept = {id(entry) for entry in self.distinct(resident=False)[-PLANS:]}
        self.plans = {key: e for key, e in self.plans.items() if id(e) in kept}

    def clear(self) -> None:
        """Drop all plans."""
        self.plans.clear()

    def refuse(self, why: str, tensors: Sequence[torch.Tensor], resident: bool) -> None:
        """Remember that there is no plan for a call."""
        self.refused[self._key(tensors, resident)] = why

    def why_refused(self, tensors: Sequence[torch.Tensor], resident: bool) -> str:
        """Why there is no plan for a call; empty if none was refused."""
        return self.refused.get(self._key(tensors, resident), "") if self.refused else ""
