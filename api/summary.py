"""What a launched run says when it ends."""

import os
import sys
from typing import TYPE_CHECKING

from .budget import in_units

if TYPE_CHECKING:
    from .launched import Found, Launched


def say(message: str) -> None:
    """A message of ours among the script's own output."""
    print(f"remat: {message}", file=sys.stderr, flush=True)


def rank() -> int:
    """Number of this process among those that train together; launchers put it in the environment."""
    return int(os.environ.get("RANK", "0"))


def summary(launched: "Launched") -> str:
    """All that the run is to be told by, several lines."""
    lines = [line for found in launched.found for line in _module(found, launched)]
    if not any(found.stats.planned for found in launched.found):
        lines.append(f"NOTHING RAN UNDER A PLAN. {_why_nothing(launched)}".rstrip())
    lines += [
        f"{name} owns little of what the optimizer holds: {calls} training calls of it are not planned"
        for name, calls in launched.finder.small.items()
    ]
    planned = [found for found in launched.found if found.plan and not found.failure]
    if len(planned) > 1:
        lines.append(
            f"{len(planned)} modules have plans of their own. Each counts the parameters, gradients and "
            "optimizer state of the others, and what was outstanding when it was made, not what they keep "
            "later: together they may need more than the budget."
        )
    return "\n".join(f"remat: {line}" for line in lines)


def _why_nothing(launched: "Launched") -> str:
    if launched.found:
        return ""
    if not launched.finder.optimizers:
        return "The script has no torch.optim.Optimizer now and none was used in training."
    return (
        "No module that owns an optimizer's parameters was called in training with gradients enabled "
        "(forward() without a call, a compiled model, or processes that the script starts are not seen)."
    )


def _module(found: "Found", launched: "Launched") -> list[str]:
    plan, stats = found.plan, found.stats
    if plan is None:
        why = found.failure or "No training call came after it was found."
        return [f"{found.name} was NOT planned. {why}"]
    by = ", planned by the script itself" if found.by_script else ""
    if plan.is_eager:
        head = f"{found.name}{by}: the budget is above eager's own peak, the step runs as it is"
    else:
        head = f"{found.name}{by}: trained under a plan, +{plan.overhead:.1%} time predicted"
    fallbacks = sum(stats.fallbacks.values())
    if missed := fallbacks + sum(stats.uncapped.values()):
        head += f"; BUT {missed} OF {fallbacks + stats.planned} CALLS HAD NO CAP"
    over = found.peak is not None and (found.peak.bytes or 0) > plan.budget_bytes
    if over:
        head += "; OVER THE BUDGET (what the script keeps, or a loss larger than a cross-entropy?)"
    lines = [head, f"  budget     {_bytes(plan.budget_bytes)}"]
    of_several = " of the plan with the largest" if stats.plans > 1 else ""
    lines.append(
        f"  predicted  {_bytes(plan.peak_bytes)} at the peak{of_several}; "
        f"eager {in_units(plan.baseline_peak_bytes)}, "
        f"least found {in_units(plan.least_peak_bytes)}"
    )
    lines.append(f"  measured   {_measured(found, launched)}")
    lines.append(f"  counted    optimizer {plan.optimizer}; loss {plan.loss}" + _other(found))
    cached = f", {stats.found} of them found in the cache" if stats.found else ""
    lines.append(
        f"  calls      {stats.planned} planned, {fallbacks} not; {stats.plans} plans made{cached}"
    )
    lines += [f"    {n} x original forward, no cap: {why}" for why, n in stats.fallbacks.items()]
    lines += [f"    {n} x eager's backward, no cap: {why}" for why, n in stats.uncapped.items()]
    lines += [f"    another plan: {why}" for why in stats.replanned]
    if found.early:
        lines.append(f"    {found.early} before an optimizer held its parameters: no cap")
    if found.failure:
        lines.append(f"    from then on without a cap: {found.failure}")
    return lines


def _other(found: "Found") -> str:
    return f"; {in_units(found.other_bytes)} beside the model" if found.other_bytes else ""


def _measured(found: "Found", launched: "Launched") -> str:
    if found.device.type == "cuda":
        import torch

        return f"{_bytes(torch.cuda.max_memory_allocated(found.device))} since it was planned (allocator)"
    if not launched.settings.get("measure"):
        return "not measured on CPU (--measure does)"
    if found.peak is None or found.peak.bytes is None:
        return "not measured: there were fewer than four undisturbed steps after planning"
    return f"{_bytes(found.peak.bytes)} in one step (allocator)"


def _bytes(size: int) -> str:
    return f"{in_units(size):>10} {size:>15,} B"
