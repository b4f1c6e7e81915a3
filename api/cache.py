"""Plans kept in a folder for later processes: one JSON file for each step that was planned.

Definitions.
    (1) A step's *fingerprint* is the hash of all that its plan depends on: the lifted graph (ops, sizes,
        types, names, source lines, scratch), what is beside it on the device, the optimizer step, budget,
        protocol, patterns, limits, cost model, device, the versions of torch and of this library. It has no
        addresses in it and no hash of Python's own, so it is the same in every process.
    (2) A file is *stale* if it cannot be read, if it is for another fingerprint, or if the program that its
        plan stands for, written out anew, is not the one that was stored: the same tensors saved and
        repeated, the same peak, within the budget.

A step must be captured to be known, so capture is not saved; nor is writing out the program, which is also
the check. Saved are the eager trace, the search for the least peak and the solver. A stale file is reported
and replaced. Files are written under another name and then moved, so that readers and other writers see
whole files only.

Not kept: plans with dynamic sizes that run the model as it is; that a budget is infeasible.
"""

import hashlib
import json
import os
import uuid
import warnings
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import sympy
import torch

from remat.ir import Block, Instant, Phase, Role, Trace, VerifyError
from remat.ir.domain import Domain
from remat.passes import (
    Emitted,
    Index,
    Plan,
    Prepared,
    overwriting_ops,
    profile,
    repeated_tensors,
    saved_tensors,
)
from remat.solvers import Problem

from .outstanding import left_bytes
from .planned import Clock, Details, Planned, Step, as_it_is, runnable, step_of
from .replay import replayed
from .request import Request, prepare, surroundings

FORMAT = 2
"""Of the files; another one has other fingerprints."""


def fingerprint(step: Step) -> str:
    """What a step's plan depends on, hashed."""
    request, prepared = step.asked, step.prepared
    captured = prepared.capture
    gpu = prepared.device.type == "cuda" and torch.cuda.is_available()
    parts = (
        FORMAT,
        version("remat"),
        torch.__version__,
        str(prepared.device),
        torch.cuda.get_device_name(prepared.device) if gpu else "",
        (request.budget, request.protocol, request.cost_model, request.limits, request.patterns),
        sorted((name, *sorted(dims.items())) for name, dims in (request.dynamic or {}).items()),
        (request.optimizer.how, request.loss_fn is not None),
        (captured.parameters, captured.buffers, captured.arguments, str(captured.route)),
        (captured.requires_grad, captured.gradient_outputs, sorted(prepared.sizes.items())),
        (prepared.graph, prepared.loss, prepared.unmeasured),
        (step.around, step.beside),
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def cached_plan(step: Step, folder: Path, clock: Clock) -> Planned | None:
    """The plan that is kept for a step, checked; None if there is none, or a stale one."""
    path = _path(step, folder)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["fingerprint"] != fingerprint(step):
            raise VerifyError("it is for another step")
        plan = Plan.from_json(json.dumps(data["plan"]))
        if plan.is_eager:
            return _eager_again(step, plan, trace_of(data["trace"]), clock)
        return _again(step, plan, clock)
    except (
        OSError
    ):  # none yet; that a folder is out of reach is reported when the plan is to be kept
        return None
    except Exception as error:  # whatever a file may hold that is not what was written
        report_stale(path, error)
        return None


def keep_plan(step: Step, folder: Path, planned: Planned) -> bool:
    """Keep a plan; that this fails is reported, and no more."""
    plan = planned.plan
    if plan.is_eager and step.asked.dynamic:
        return True
    data = {
        "fingerprint": fingerprint(step),
        "plan": json.loads(plan.to_json()),
        "trace": trace_data(planned.trace) if plan.is_eager else None,
    }
    return keep_file(_path(step, folder), json.dumps(data))


def keep_file(path: Path, text: str) -> bool:
    """Write a file, so that others see all of it or nothing; that this fails is reported."""
    draft = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            draft.write_text(text, encoding="utf-8")
            os.replace(draft, path)
        finally:
            draft.unlink(missing_ok=True)
        return True
    except OSError as error:
        where = f"the plan could not be kept in {path.parent}"
        warnings.warn(f"remat: {where}: {error}", stacklevel=3)
        return False


def _path(step: Step, folder: Path) -> Path:
    return folder / f"{fingerprint(step)[:32]}.json"


def report_stale(path: Path, error: Exception) -> None:
    """Say that a file is not what was written, and will be replaced."""
    why = f"{type(error).__name__}: {error}".splitlines()[0]
    warnings.warn(
        f"remat: the plan in {path} is stale, so the step is planned anew and the file replaced: {why}",
        stacklevel=2,
    )


def _again(step: Step, plan: Plan, clock: Clock) -> Planned:
    """Write the program of a plan out, and check that it is the one that was planned.

    Raises:
        VerifyError: it is not.
    """
    clock.begin("rewrite")

    def formulated(prepared: Prepared) -> tuple[Problem, Index]:
        return step.formulate(prepared, {}, step.request.patterns)  # nothing is solved

    found = replayed(plan, step.prepared, formulated)
    if found is None:
        raise VerifyError("it is no plan of this step")
    emitted = step.emit(found.prepared, found.index, found.least.schedule, step.others)
    stored = _as_stored(step, plan, emitted)
    if _placeless(stored) != _placeless(plan) or plan.peak_bytes > step.request.budget:
        raise VerifyError("its program is not the one that was planned")
    planned = runnable(step, plan, emitted, clock.seconds)
    if planned.domain.text() != plan.domain:
        raise VerifyError("it can run at other sizes than planned")
    clock.begin("")
    return replace(planned, from_file=True)


def details_of(request: Request, plan: Plan) -> Details:
    """What explains a plan whose step has not been captured yet.

    Raises:
        VerifyError: the model is another one by now.
    """
    prepared = prepare(request)
    step = step_of(request, prepared, surroundings(request, prepared))
    if plan.is_eager:
        return Details(prepared, None, step.beside)
    return _again(step, plan, Clock(lambda part: None)).details()


def _as_stored(step: Step, plan: Plan, emitted: Emitted) -> Plan:
    """The plan with all that follows from its program found anew."""
    return replace(
        plan,
        steps=emitted.steps,
        stage_ends=emitted.stage_ends,
        budget_bytes=step.request.budget,
        peak_bytes=profile(emitted.trace).peak,
        resident_bytes=step.resident,
        saved=saved_tensors(emitted),
        recomputed=repeated_tensors(emitted),
        reused=overwriting_ops(emitted),
        unmeasured=step.prepared.unmeasured,
    )


def _placeless(plan: Plan) -> Plan:
    """The plan without source lines, which change with comments above them."""
    saved, recomputed = (
        tuple(replace(tensor, source="") for tensor in tensors)
        for tensors in (plan.saved, plan.recomputed)
    )
    return replace(plan, saved=saved, recomputed=recomputed)


def _eager_again(step: Step, plan: Plan, trace: Trace, clock: Clock) -> Planned:
    """The plan that runs the model as it is; the trace is checked against its figures.

    Raises:
        VerifyError: they differ.
    """
    found = profile(trace)
    peak = found.peak + step.others * left_bytes(trace)
    budget = step.request.budget
    if (peak, found.resident) != (plan.peak_bytes, plan.resident_bytes) or peak > budget:
        raise VerifyError("its figures are not those of its trace")
    clock.begin("")
    sizes = step.asked.sizes
    made = as_it_is(step, plan, trace, Domain(sizes, sizes, ()), clock.seconds)
    return replace(made, from_file=True)


def trace_data(trace: Trace) -> dict[str, Any]:
    """A trace of numbers as plain data."""
    return {
        "instants": [
            (i.name, i.target, i.phase, int(i.scratch), i.source, i.module) for i in trace.instants
        ],
        "blocks": [(b.name, b.role, int(b.size), b.birth, b.death, b.text) for b in trace.blocks],
    }


def trace_of(data: dict[str, Any]) -> Trace:
    """The trace of `trace_data`."""
    return Trace(
        tuple(
            Instant(name, target, Phase(phase), sympy.Integer(scratch), source, module)
            for name, target, phase, scratch, source, module in data["instants"]
        ),
        tuple(
            Block(name, Role(role), sympy.Integer(size), birth, death, text)
            for name, role, size, birth, death, text in data["blocks"]
        ),
    )
