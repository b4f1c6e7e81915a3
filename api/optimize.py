"""The entry points: `optimize_checkpoints` and `plan_checkpoints`."""

from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from remat.ir.fake import Dynamic
from remat.passes import Plan, StepProtocol
from remat.solvers import Limits

from .dropin import Remat
from .identity import become_dropin, make_dropin
from .options import Options, check, check_example, patterns_of
from .settings import is_disabled, with_settings

LossFn = Callable[[Any], torch.Tensor]


@with_settings
def optimize_checkpoints(
    model: nn.Module,
    budget_gb: float | str,
    example_args: tuple[Any, ...] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    loss_fn: LossFn | None = None,
    optimizer: Optimizer | str | None = "auto",
    protocol: StepProtocol | None = None,
    cost_model: str = "roofline",
    time_limit_s: float = 60.0,
    gap: float = 0.01,
    save: Sequence[str] = (),
    recompute: Sequence[str] = (),
    dynamic: Dynamic | None = None,
    plan_at: Mapping[str, int] | None = None,
    on_new_size: str = "replan",
    inplace: bool = False,
    cache_dir: str | PathLike[str] | None = None,
    verify: bool = False,
    on_failure: str | None = None,
) -> nn.Module:
    """A model that trains like `model`, with the peak memory of the whole step under a budget.

    Losses, gradients, buffers and the random stream are bit for bit those of `model`; what changes is
    which activations are kept for backward and which are computed again.

    Args:
        model: in the mode in which it trains.
        budget_gb: a number of GB (10**9 bytes), or a string: "8GB", "24GiB", "900MB", "123456B", "80%" (of
            the device's memory), "auto" (that memory less 5 %). It caps everything on the device:
            parameters, buffers, inputs, gradients, optimizer state, activations, temporaries.
        example_args: positional arguments of one training call; real, fake or meta tensors. Without
            any, the plan is made on the first training call.
        example_kwargs: keyword arguments of that call.
        loss_fn: output of the model to a scalar, if the loss is outside the model. Its memory is counted
            then; it is not called in training.
        optimizer: whose state and temporaries count: an optimizer, a name in `torch.optim`, or None;
            "auto" takes the live optimizer that holds the parameters, else assumes AdamW.
        protocol: what else is resident when, in your loop.
        cost_model: "roofline" (predicted for the device at hand; for a GPU that is not in
            `passes/devices.py`, with the figures of "generic-gpu"), the name of a device to predict for
            ("a100-80gb"), or "timed" (ops are timed here).
        time_limit_s: solver time, seconds.
        gap: stop when the overhead is proven to be within this fraction of step time of the least.
        save: patterns ``module glob::op glob`` of forward ops whose results are never computed again, such as
            "layers.*.attn::aten.mm.default". Either part may be left out: "layers.*" is every op in these
            modules, "::aten.mm*" these ops anywhere.
        recompute: patterns of ops whose results are not kept from forward to backward.
        dynamic: sizes that change from call to call, by argument and dimension, with your names for them:
            ``{"input_ids": {0: "batch", 1: "seq"}, "labels": {0: "batch", 1: "seq"}}``. The plan then runs
            at other sizes too, wherever its peak there is under the budget; `plan.peak` is its formula.
        plan_at: the sizes to plan for, by name; those of the example if None, and for names left out.
        on_new_size: at sizes that no plan covers within the budget, "replan" makes another plan under the
            same budget, and "refuse" raises a GuardError.
        inplace: change `model` itself, for optimizers, trainers and wrappers that hold it already.
        cache_dir: folder in which plans are kept, so that the next process with the same step, budget and
            options need not solve again; None keeps none.
        verify: the first step of each plan is run in eager, too, on copies of buffers and random state, and
            outputs and gradients are compared bit for bit. That step takes the memory and time of both.
        on_failure: where the model cannot be captured or planned, "warn" trains the original model, with
            one warning; "raise" raises. None raises if there are example arguments, and warns on a
            training call.

    Returns:
        A `torch.fx.GraphModule` that is an instance of `type(model)` and shares its parameters, buffers
        and submodules; `model` itself with ``inplace=True``. Its attribute `remat` holds plan, statistics
        and `explain()`. Options that are not given come from outside, if they are set there: see
        `settings`. With ``REMAT_DISABLE=1`` nothing is planned, and the original forward runs.

    Raises:
        InfeasibleBudgetError: no plan fits; says what would, and names the pattern that is in the way.
        PatternError: a pattern matches nothing, or cannot be kept.
        UnsupportedGraphError: the model cannot be captured, or does what a planned step would not repeat;
            says where and what to do.
        ValueError: a budget or option that cannot be read.
        TypeError: the budget is neither number nor string, the model is no module, or the example
            arguments do not fit its forward.

    Whatever is raised, the model, its buffers, gradients and the random state are as before. Without
    example arguments the first two are raised by the first training call, and so is the third with
    ``on_failure="raise"``. Training may raise, besides what eager raises:
        InfeasibleBudgetError: the loop has turned out to need more than was planned for (gradients that
            are accumulated, another optimizer, an output that receives a gradient), and no plan fits.
        GuardError: an output receives a gradient that is not among the `gradient_outputs` you named, or for
            which the step cannot be run again (see `rerun`); or, with ``on_new_size="refuse"``, no plan
            covers a call's sizes.
        VerifyError: with ``verify=True``, the planned step differs from eager.
    """
    limits = Limits(time_limit_s, gap)
    check_example(example_args)
    protocol = protocol or StepProtocol()
    options = Options(
        budget_gb,
        loss_fn,
        optimizer,
        protocol,
        cost_model,
        limits,
        patterns_of(save, recompute),
        dynamic,
        on_new_size,
        Path(cache_dir) if cache_dir is not None else None,
        verify,
        on_failure,
        sees_others=not (example_args or example_kwargs),
        outputs={} if protocol.gradient_outputs == "auto" else None,
    )
    check(options, model)
    example = (tuple(example_args), dict(example_kwargs or {}))
    if not inplace:
        return _begun(make_dropin(model, options), example, plan_at or {})
    with become_dropin(model, options):
        return _begun(model, example, plan_at or {})


def _begun(
    dropin: nn.Module, example: tuple[tuple[Any, ...], dict[str, Any]], sizes: Mapping[str, int]
) -> nn.Module:
    """The drop-in, planned if there is an example; switched off if the user says so."""
    remat: Remat = vars(dropin)["remat"]
    if is_disabled():
        remat.disable()
    elif example != ((), {}):
        remat.prepare(dropin, *example, sizes)
    return dropin


@with_settings
def plan_checkpoints(
    model: nn.Module,
    budget_gb: float | str,
    example_args: tuple[Any, ...] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    loss_fn: LossFn | None = None,
    optimizer: Optimizer | str | None = "auto",
    protocol: StepProtocol | None = None,
    cost_model: str = "roofline",
    time_limit_s: float = 60.0,
    gap: float = 0.01,
    save: Sequence[str] = (),
    recompute: Sequence[str] = (),
    dynamic: Dynamic | None = None,
    plan_at: Mapping[str, int] | None = None,
    on_new_size: str = "replan",
    cache_dir: str | PathLike[str] | None = None,
) -> Plan:
    """The plan that `optimize_checkpoints` would run, without running it; see there.

    Parameters may be fake or on the meta device: a model of any size is planned on a small machine.
    """
    planned = optimize_checkpoints(
        model,
        budget_gb,
        example_args,
        example_kwargs or {},
        loss_fn=loss_fn,
        optimizer=optimizer,
        protocol=protocol,
        cost_model=cost_model,
        time_limit_s=time_limit_s,
        gap=gap,
        save=save,
        recompute=recompute,
        dynamic=dynamic,
        plan_at=plan_at,
        on_new_size=on_new_size,
        cache_dir=cache_dir,
        on_failure="raise",
    )
    plan = vars(planned)["remat"].plan
    if plan is None:
        off = "REMAT_DISABLE is set: " if is_disabled() else ""
        raise ValueError(f"{off}plan_checkpoints needs example arguments of one training call")
    assert isinstance(plan, Plan)
    return plan
