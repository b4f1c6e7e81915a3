"""What the calls of a drop-in did, counted."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Stats:
    """What the calls of a drop-in did."""

    planned: int = 0
    """Training calls that ran a plan (or the original forward, where the plan says so)."""
    fallbacks: Counter[str] = field(default_factory=Counter)
    """Training calls outside the guards, which ran the original forward, by reason."""
    plans: int = 0
    """Plans that were made."""
    replanned: Counter[str] = field(default_factory=Counter)
    """Those of them that were made because a call had changed, by what was other."""
