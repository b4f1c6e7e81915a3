"""What fits, and at which cost, if activations are recomputed: questions of a report that plans answer.

Each answer is a plan that was made at that size, for the same loss and optimizer. A size is said to fit if
a plan was found; that no larger one fits is as far as was found, not proven.
"""

from collections.abc import Mapping

from remat.ir import InfeasibleBudgetError
from remat.ir.fake import is_fake
from remat.passes import StepProtocol
from remat.passes.formula_solve import last

from .example import StepRequest, resized
from .optimize import optimize_checkpoints
from .plan_frontier import plan_frontier
from .planned import Planned
from .views.step_report import Point

_SECONDS = 10.0
"""Solver time of one plan."""
_MOST = 4096
"""No size is tried that is more times as large as the first."""


def planned_at(
    request: StepRequest, device: str, budget: int, sizes: Mapping[str, int]
) -> Planned:
    """The step at sizes, planned under a budget in bytes.

    Raises:
        InfeasibleBudgetError: no plan was found.
        ValueError: the plan is for a device that is not at hand, and the model has data; or the step does
            what no plan takes into account.
    """
    if ignored := _not_planned(request):
        raise ValueError(f"plans do not take {', '.join(ignored)} into account: analyze without")
    has_data = not any(is_fake(parameter) for parameter in request.model.parameters())
    if request.cuda and has_data and not any(p.is_cuda for p in request.model.parameters()):
        raise ValueError(
            f"a plan for {device} needs a model without data here: build it under torch.device('meta')"
        )
    loop = request.loop
    args, kwargs = resized(request, sizes)
    model = optimize_checkpoints(
        request.model,
        f"{budget}B",
        args,
        kwargs,
        loss_fn=request.loss_fn,
        optimizer=request.optimizer,
        protocol=StepProtocol(
            gradients_resident=loop.gradients_resident or loop.accumulation_steps > 1,
            outputs_held=loop.outputs_held,
        ),
        cost_model="roofline" if has_data else device,
        time_limit_s=_SECONDS,
        on_failure="raise",
    )
    planned = vars(model)["remat"].planned
    if planned is None:
        raise ValueError("REMAT_DISABLE is set, so nothing is planned")
    assert isinstance(planned, Planned)
    return planned


def _not_planned(request: StepRequest) -> list[str]:
    """Options of the analysed step that a plan would leave out."""
    loop = request.loop
    options = {
        "precision": request.dtype is not None or request.autocasts,
        "clip_gradients": loop.clips_gradients,
        "grad_scaler": loop.scales_loss,
        "master_weights": loop.master_weights,
    }
    return [name for name, is_on in options.items() if is_on]


def largest_planned(
    request: StepRequest, device: str, name: str, budget: int, sizes: Mapping[str, int], least: int
) -> int:
    """The largest value of `name` for which a plan is found, from `least` (which fits) on."""

    def fits(value: int) -> bool:
        try:
            planned_at(request, device, budget, {**sizes, name: value})
        except InfeasibleBudgetError:
            return False
        return True

    low, high = least, max(1, 2 * least)
    while fits(high):
        low, high = high, 2 * high
        if high > _MOST * max(1, least):
            return low
    return last(fits, low, high)


def frontier(
    request: StepRequest, device: str, peak: int, sizes: Mapping[str, int], count: int
) -> tuple[Point, ...]:
    """Plans at `count` budgets, from the least peak that was found to eager's `peak`."""
    return plan_frontier(planned_at(request, device, peak, sizes), count, _SECONDS)
