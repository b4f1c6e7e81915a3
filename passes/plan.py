"""The plan: the program that a step will run, and the figures that follow from it.

A plan is the sequence of op executions, first ones and repetitions, forward then backward. What is
saved, what is freed when and the peak follow from it by liveness. The figures beside it were derived
when it was made, by liveness of the rewritten graph, and are stored for reading only.
"""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import sympy

from remat.ir import positive
from remat.solvers import BoundClass, Status

from .formula import maximum
from .patterns import Patterns
from .protocol import StepProtocol


@dataclass(frozen=True, slots=True)
class Tensor:
    """A storage that the plan keeps or makes again, for people."""

    name: str
    text: str
    """Type and shape."""
    bytes: int
    op: str
    source: str
    module: str


@dataclass(frozen=True, slots=True)
class Ledger:
    """Peaks of the whole step, bytes, each with one more means than the one before."""

    captured: int
    """The captured program as it is."""
    ordered: int
    """In the plan's order of first executions."""
    in_place: int
    """With results written in place of inputs that die."""
    planned: int
    """With the plan's recomputation."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A program for one training step, under a budget."""

    steps: tuple[str, ...]
    """Names of ops of the joint graph in order of execution; empty if the model runs as it is (eager)."""
    stage_ends: tuple[str, ...]
    """Ops after whose first execution a stage of backward ends and its gradients are delivered."""
    protocol: StepProtocol
    device: str
    """Target device, or the name of a GPU that is not at hand; the plan is not valid for another."""
    cost_model: str
    """Device whose speed the predicted times are for, or "timed"."""
    optimizer: str
    """The optimizer whose state is counted, and where it is known from."""
    loss: str
    """Where the loss is: "inside the model", "traced with the model", "outside, not counted"."""
    route: str
    """How the graph was captured; "" if it was not."""
    budget_bytes: int
    peak_bytes: int
    """Peak of the whole step, resident bytes included."""
    resident_bytes: int
    """On the device before the step begins: parameters, buffers, inputs, optimizer state (and gradients, if
    the protocol says so)."""
    baseline_peak_bytes: int
    """Peak of the whole step as eager runs it today."""
    least_peak_bytes: int
    """Smallest peak for which a plan was found."""
    least_peak_bound_bytes: int
    """No plan, in any of the orders that were looked at, has a smaller peak."""
    step_time_ns: int
    """Predicted time of forward and backward, without repetitions."""
    overhead: float
    """Predicted time of the repetitions, as a fraction of `step_time_ns`."""
    lower_bound: float
    """No plan of the class has a smaller overhead."""
    bound_class: BoundClass
    status: Status
    saved: tuple[Tensor, ...]
    """Activations kept from forward to backward."""
    recomputed: tuple[Tensor, ...]
    """Storages made again, once for each repetition."""
    reused: tuple[str, ...]
    """Ops whose first execution writes its result over an operand that dies there."""
    unmeasured: tuple[str, ...]
    """Ops whose scratch could not be measured here and is taken as 0."""
    patterns: Patterns
    """What the user demanded."""
    reordered: bool
    """First executions are not in the order in which the step was captured."""
    ledger: Ledger | None
    """What brought the peak down; None if the model runs as it is."""
    sizes: Mapping[str, int] = field(default_factory=dict[str, int])
    """The sizes that were named, with the numbers that the plan was made at; empty if none was."""
    fixed: Mapping[str, int] = field(default_factory=dict[str, int])
    """Those of them that the graph needs as these numbers; the others are symbols."""
    domain: tuple[str, ...] = ()
    """Conditions on the sizes under which the plan can run."""
    terms: tuple[str, ...] = ()
    """Bytes that can be the peak, as formulas of the sizes; empty if none is a symbol."""

    @property
    def peak(self) -> sympy.Expr:
        """Peak of the whole step, bytes, in the names of the sizes; holds within `domain`."""
        names = {name: positive(name) for name in self.sizes}
        terms = [sympy.sympify(term, locals=names) for term in self.terms]
        return maximum(terms or [sympy.Integer(self.peak_bytes)])

    @property
    def gap(self) -> float:
        """Overhead - lower_bound: 0.01 is one point of step time."""
        return max(0.0, self.overhead - self.lower_bound)

    @property
    def is_eager(self) -> bool:
        """The original forward runs, and nothing is repeated."""
        return not self.steps

    @property
    def repetitions(self) -> Mapping[str, int]:
        """How often each op is repeated."""
        return {name: count - 1 for name, count in Counter(self.steps).items() if count > 1}

    def to_json(self) -> str:
        """The plan as JSON text."""
        return json.dumps(asdict(self), indent=1)

    @staticmethod
    def from_json(text: str) -> "Plan":
        """The plan that `to_json` wrote."""
        data: dict[str, Any] = json.loads(text)
        protocol = data.pop("protocol")
        if isinstance(protocol["gradient_outputs"], list):
            protocol["gradient_outputs"] = tuple(protocol["gradient_outputs"])
        for key in ("saved", "recomputed"):
            data[key] = tuple(Tensor(**entry) for entry in data[key])
        for key in ("steps", "stage_ends", "reused", "unmeasured", "domain", "terms"):
            data[key] = tuple(data[key])
        patterns = data.pop("patterns")
        data["patterns"] = Patterns(tuple(patterns["save"]), tuple(patterns["recompute"]))
        data["ledger"] = Ledger(**data["ledger"]) if data["ledger"] else None
        data["status"] = Status(data["status"])
        data["bound_class"] = BoundClass(data["bound_class"])
        return Plan(**data, protocol=StepProtocol(**protocol))
