"""How a call differs from those that a plan is for, and what can be done about it."""

from dataclasses import dataclass
from enum import Enum, auto


class Remedy(Enum):
    """What makes a call that is outside a plan's guard a planned one."""

    NONE = auto()
    """Nothing: it runs the original forward. What differs may be other at every call, like a counter."""
    PLAN = auto()
    """Another plan, for this kind of call."""
    SIZES = auto()
    """Another plan, for changing sizes: only the sizes of arguments differ."""


@dataclass(frozen=True, slots=True)
class Outside:
    """Why a call is outside a plan's guard."""

    why: str
    remedy: Remedy = Remedy.NONE
