"""Programs kept in a folder for later processes, found by a recording of the step, without capturing it.

A file holds a plan with the program that runs it: the graphs of forward and of each stage of backward, and
the trace of the step. Its name is the hash of all that the program depends on: the recording
(`ir.recording`), budget, protocol, patterns, limits, cost model, the optimizer's class and settings,
versions. What explains the plan (the captured graph, the eager step) is not kept; the step is captured when
somebody asks for it.

The first line of a file has its name and a checksum of the rest. A file that does not agree with it is
*stale*: reported, and replaced.

Not kept: plans with dynamic sizes, for a device that is not at hand, with an optimizer that is not torch's,
or made together with other ranks. Those are found by their captured graphs (`cache`).
"""

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from remat.ir import VerifyError
from remat.ir.autocast import autocast, autocast_dtypes
from remat.ir.domain import Domain
from remat.ir.fake import is_fake
from remat.ir.recording import Recording, record_step
from remat.ir.structure import take_tensors
from remat.passes import Parts, Plan, Stage
from remat.passes.graph_data import graph_data, graph_of

from .cache import details_of, keep_file, report_stale, trace_data, trace_of
from .planned import Clock, Details, Planned, accumulated
from .program import Interface, Program, program_of
from .request import Request

FORMAT = 1
"""Of the files; another one has other names."""


@dataclass(frozen=True, slots=True)
class Start:
    """A step that was recorded, and where its program is kept."""

    request: Request
    recording: Recording
    folder: Path
    name: str
    """Of the file."""


def start_of(request: Request) -> Start | None:
    """Record a step; None if no program is kept for it."""
    if request.cache_dir is None or request.dynamic:
        return None
    tensors, _ = take_tensors((request.args, dict(request.kwargs)))
    absent = any(map(is_fake, (*request.module.parameters(), *tensors)))
    optimizer = _optimizer(request)
    if absent or optimizer is None:
        return None
    wanted = request.protocol.gradient_outputs
    recording = record_step(
        request.module,
        request.forward,
        request.args,
        request.kwargs,
        # Which ones the loss uses is for the capture to find out.
        gradient_outputs="all" if request.loss_fn and wanted == "auto" else wanted,
        loss_fn=request.loss_fn,
    )
    if recording is None:
        return None
    parts = (
        FORMAT,
        version("remat"),
        recording.digest,
        (request.budget, request.protocol, request.cost_model, request.limits, request.patterns),
        (optimizer, request.loss_fn is not None),
    )
    name = f"{hashlib.sha256(repr(parts).encode()).hexdigest()[:32]}.program"
    return Start(request, recording, request.cache_dir, name)


def _optimizer(request: Request) -> object:
    """Class and settings of the optimizer, and the kinds of its state; None if it is not torch's or ours."""
    instance = request.optimizer.instance
    if instance is None:
        return request.optimizer.how
    cls = type(instance)
    if not cls.__module__.startswith(("torch.optim.", "remat.")):
        return None
    numbers = {id(p): i for i, p in enumerate(request.module.parameters())}
    groups = [
        [(key, _kind(value)) for key, value in sorted(group.items()) if key != "params"]
        + [[numbers.get(id(p), -1) for p in group["params"]]]
        for group in instance.param_groups
    ]
    return request.optimizer.how, cls.__qualname__, groups, _state(instance)


def _state(optimizer: Optimizer) -> list[object]:
    return [
        [(key, _kind(value)) for key, value in state.items()] for state in optimizer.state.values()
    ]


def _kind(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape), value.dtype, value.device)
    return value if isinstance(value, bool | int | float | str | tuple | None) else type(value)


def resumed(start: Start, clock: Clock) -> Planned | None:
    """The plan that is kept for a step, with its program; None if there is none, or a stale one."""
    path = start.folder / start.name
    try:
        header, _, body = path.read_text(encoding="utf-8").partition("\n")
        if json.loads(header) != _header(start, body):
            raise VerifyError("it is not as it was written")
        return _planned(start, json.loads(body), clock)
    except OSError:  # none yet
        return None
    except Exception as error:  # whatever a file may hold that is not what was written
        report_stale(path, error)
        return None


def keep_start(start: Start, planned: Planned) -> None:
    """Keep a plan with its program; that this fails is reported, and no more."""
    interface = planned.interface
    try:
        body = json.dumps(
            {
                "plan": json.loads(planned.plan.to_json()),
                "trace": trace_data(planned.trace),
                "updates": [interface.updates_state, interface.updates_arguments],
                "program": _program_data(planned.program) if planned.program else None,
            }
        )
    except Exception:  # whatever a graph may hold that data cannot: the next start captures
        return
    header = json.dumps(_header(start, body))
    keep_file(start.folder / start.name, f"{header}\n{body}")


def _header(start: Start, body: str) -> Mapping[str, str]:
    return {"name": start.name, "checksum": hashlib.sha256(body.encode()).hexdigest()}


def _planned(start: Start, data: Mapping[str, Any], clock: Clock) -> Planned:
    plan = Plan.from_json(json.dumps(data["plan"]))
    request, recording = start.request, start.recording
    state, arguments = data["updates"]
    interface = Interface(
        recording.parameters,
        recording.buffers,
        recording.output_pattern,
        state,
        arguments,
        recording.checkpointed,
    )
    program = _program(data["program"]) if data["program"] else None
    clock.begin("")
    return Planned(
        plan,
        program,
        interface,
        trace_of(data["trace"]),
        clock.seconds,
        accumulated(request),
        Domain({}, {}, ()),
        cache(partial(_details, request, plan, as_now(request.module))),
        from_file=True,
    )


def _details(
    request: Request, plan: Plan, as_then: Callable[[], AbstractContextManager[None]]
) -> Details:
    with as_then():
        return details_of(request, plan)


def as_now(module: nn.Module) -> Callable[[], AbstractContextManager[None]]:
    """A context in which modes and autocast are as they are now."""
    modes = {child: child.training for child in module.modules()}
    dtypes = autocast_dtypes()
    cached = torch.is_autocast_cache_enabled()

    @contextlib.contextmanager
    def as_then() -> Iterator[None]:
        others = {child: child.training for child in modes}
        try:
            for child, training in modes.items():
                child.training = training
            with autocast(dtypes, cached=cached):
                yield
        finally:
            for child, training in others.items():
                child.training = training

    return as_then


def _program_data(program: Program) -> dict[str, Any]:
    parts = program.parts
    stages = [
        _fields(stage, "module") | {"module": graph_data(stage.module)} for stage in parts.stages
    ]
    graphs = {"forward": graph_data(parts.forward), "stages": stages}
    return {
        "parts": _fields(parts, "forward", "stages") | graphs,
        "results": program.results,
        "gradient_results": program.gradient_results,
        "view_of": program.view_of,
        "dropped": program.dropped,
    }


def _fields(value: Parts | Stage, *without: str) -> dict[str, Any]:
    return {f.name: getattr(value, f.name) for f in fields(value) if f.name not in without}


def _program(data: Mapping[str, Any]) -> Program:
    parts = dict(data["parts"])
    forward = graph_of(parts.pop("forward"))
    stages = tuple(
        Stage(module=graph_of(stage.pop("module")), **_tuples(stage))
        for stage in parts.pop("stages")
    )
    return program_of(
        Parts(forward=forward, stages=stages, **_tuples(parts)),
        tuple(data["results"]),
        tuple(data["gradient_results"]),
        data["view_of"],
        tuple(data["dropped"]),
    )


def _tuples(data: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(v) if isinstance(v, list) else v for key, v in data.items()}
