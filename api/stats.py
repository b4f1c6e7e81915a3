"""What the calls of a drop-in did, counted."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Stats:
    """What the calls of a drop-in did."""

    planned: int = 0
    """Training calls that ran a plan (or the original forward, where the plan says so)."""
    fallbacks: Counter[str] = field(default_factory=Counter)
    """Training calls that ran the original forward without a plan, by reason."""
    uncapped: Counter[str] = field(default_factory=Counter)
    """Backwards of planned calls that eager computed, without the cap, by reason."""
    plans: int = 0
    """Plans that were made."""
    found: int = 0
    """Those of them that were found in the cache."""
    replanned: Counter[str] = field(default_factory=Counter)
    """Those of them that were made because a call, or its backward, had changed, by what was other."""
    failed: str = ""
    """Why there is no plan and none is tried for: every call runs the original forward. Empty otherwise."""
    verified: str = ""
    """With ``verify=True``: what the last step that was verified has shown; empty before."""
