"""Verification: a planned step is run in eager, too, and all that it computes is compared bit for bit.

Both start from the same state: the eager forward runs right after the planned one, from the generator state
that the planned one found, on the same parameters, and on copies of the buffers and arguments as they were.
Outputs, buffers and generator states are compared then. The eager graph is kept until backward comes; it gets
the gradients of the outputs that the planned backward gets, and each stage's gradients are compared before
they are delivered. `.grad` is not touched, and hooks of parameters do not see the eager run.

A difference is a `VerifyError` with the first tensor that differs, its module and source line. Buffers,
`.grad` and generators are put back to where the forward (or the backward) that differs began.

The step holds what both hold. Where that does not fit a GPU, the eager activations are kept on the host;
where it does not fit even so, the step is not verified, and a warning says so.

Not compared: Python state; gradients of parameters that a partial backward (`inputs=`) does not reach. Hooks
of submodules run in the eager run.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils import _pytree as pytree

from remat.ir import OutputKind, VerifyError
from remat.ir.structure import Hole, take_tensors

from .compare import differs
from .eager_run import eager_forward
from .generators import generators, generators_at, set_generators
from .guards import Call
from .out_of_memory import is_out_of_memory
from .planned import Planned

Tensors = Sequence[torch.Tensor | None]


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a step reads: parameters, buffers and arguments, as the graph's primals."""

    model: nn.Module
    forward: Callable[..., Any]
    """The original one, bound."""
    call: Call
    names: tuple[str, ...]
    """Of parameters, then buffers."""
    primals: Sequence[torch.Tensor]
    parameters: int
    """How many of them are parameters."""

    def name(self, primal: int) -> str:
        """Of a primal, for people."""
        count = len(self.names)
        return self.names[primal] if primal < count else f"tensor argument {primal - count}"


@dataclass(frozen=True, slots=True)
class Before:
    """The state that a step found."""

    buffers: tuple[torch.Tensor, ...]
    arguments: tuple[torch.Tensor, ...]
    generators: tuple[torch.Tensor, ...]


def state_before(inputs: Inputs) -> Before:
    """Copies of what a step may change."""
    count, first = len(inputs.names), inputs.parameters
    return Before(
        tuple(t.detach().clone() for t in inputs.primals[first:count]),
        tuple(t.detach().clone() for t in inputs.primals[count:]),
        generators(inputs.primals),
    )


@dataclass(slots=True)
class Verification:
    """One step that is verified: made after its planned forward, asked in its backward."""

    planned: Planned
    inputs: Inputs
    before: Before
    where: str = ""
    """Where the eager run was kept."""
    copies: list[torch.Tensor] = field(default_factory=list)
    """Primals of the eager run."""
    outputs: list[torch.Tensor] = field(default_factory=list)
    """Of the eager forward, until backward begins."""
    expected: dict[int, torch.Tensor] | None = None
    """Primal -> gradient by eager, until a stage has delivered it."""
    gradients: list[tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]] = field(
        default_factory=list
    )
    """Leaves, their `.grad` before backward, and a copy of it."""
    compared: int = 0
    done: bool = False
    """All has been compared, and is equal."""
    skipped: bool = False
    """Eager does not fit."""

    def forward(self, output: Any) -> None:
        """Run the eager forward and compare it with the planned one.

        Raises:
            VerifyError: they differ; the state is as before the planned forward.
        """
        made, pattern = take_tensors(output)
        after = generators(self.inputs.primals)
        try:
            with generators_at(self.before.generators, self.inputs.primals):
                buffers, outputs = self._eager()
                theirs = generators(self.inputs.primals)
            names = _paths(pattern, len(made))
            for i, (mine, eager) in enumerate(zip(made, outputs, strict=True)):
                self._compare(names[i], mine, eager, OutputKind.RESULT, str(i))
            targets = self._program().parts.primals
            for i, eager in enumerate(buffers, self.inputs.parameters):
                name, mine = f"buffer {self.inputs.names[i]}", self.inputs.primals[i]
                self._compare(name, mine, eager, OutputKind.MUTATION, targets[i])
            for mine, eager in zip(after, theirs, strict=True):
                self._compare("the state of the random generator", mine, eager, None, "")
        except VerifyError:
            self._put_back()
            raise
        self.outputs = [
            tensor
            for tensor, tracked in zip(outputs, self._program().results, strict=True)
            if tracked
        ]

    def given(self, gradients: Tensors) -> None:
        """Backward begins: run the eager one, with the same gradients of the outputs."""
        if not self.outputs:  # a second backward
            return
        pairs = [(o, g) for o, g in zip(self.outputs, gradients, strict=True) if g is not None]
        self.outputs = []
        leaves = [i for i, tensor in enumerate(self.copies) if tensor.requires_grad]
        self.gradients = [
            (t, t.grad, None if t.grad is None else t.grad.clone())
            for i in leaves
            if (t := self.inputs.primals[i]).is_leaf
        ]
        try:
            with generators_at(generators(self.inputs.primals), self.inputs.primals):
                found = torch.autograd.grad(
                    [output for output, _ in pairs],
                    [self.copies[i] for i in leaves],
                    [gradient for _, gradient in pairs],
                    allow_unused=True,
                )
        except RuntimeError:  # eager's own trouble is none of the training's
            self.skip()
            raise
        self.copies = []
        self.expected = {i: g for i, g in zip(leaves, found, strict=True) if g is not None}

    def made(self, stage: int, gradients: Tensors) -> None:
        """Compare what a stage is about to deliver.

        Raises:
            VerifyError: it differs; `.grad` is as before the backward.
        """
        if self.expected is None:
            return
        program = self._program()
        targets = program.parts.stages[stage].gradients
        try:
            for i, target, mine in zip(program.parameters[stage], targets, gradients, strict=True):
                name = f"gradient of {self.inputs.name(i)}"
                eager = self.expected.pop(i, None)
                self._compare(name, mine, eager, OutputKind.GRADIENT, target)
            if stage == len(program.parts.stages) - 1:
                for i, eager in self.expected.items():
                    name = f"gradient of {self.inputs.name(i)}"
                    self._compare(name, None, eager, None, "")
                self.done, self.expected = True, None
        except VerifyError:
            self.expected = None
            for leaf, gradient, copy in self.gradients:
                leaf.grad = gradient
                if gradient is not None and copy is not None:
                    gradient.detach().copy_(copy)
            raise

    def skip(self) -> None:
        """Compare nothing."""
        self.skipped, self.copies, self.outputs = True, [], []

    def summary(self) -> str:
        """What has been shown."""
        return f"{self.compared} tensors of a step equal eager's, bit for bit{self.where}"

    def _program(self) -> Any:
        assert self.planned.program is not None
        return self.planned.program

    def _eager(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Buffers after, and outputs of, an eager forward on copies."""
        try:
            return self._run()
        except RuntimeError as error:
            if not is_out_of_memory(error) or not _has_a_host(self.planned.prepared.device):
                raise
        self.copies = []
        torch.cuda.empty_cache()
        self.where = "; eager's activations were kept on the host, for lack of memory"
        with generators_at(self.before.generators, self.inputs.primals), save_on_cpu():
            return self._run()

    def _run(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        inputs, first = self.inputs, self.inputs.parameters
        parameters = [
            nn.Parameter(p.detach(), requires_grad=p.requires_grad) for p in inputs.primals[:first]
        ]
        buffers = [buffer.clone() for buffer in self.before.buffers]
        count = len(inputs.names)
        arguments = [
            copy.clone().requires_grad_(original.requires_grad)
            for copy, original in zip(self.before.arguments, inputs.primals[count:], strict=True)
        ]
        self.copies = [*parameters, *buffers, *arguments]
        after, outputs = eager_forward(
            inputs.model,
            inputs.forward,
            take_tensors(inputs.call)[1],
            inputs.names,
            inputs.primals,
            self.copies,
        )
        return after[first:], outputs

    def _put_back(self) -> None:
        self.copies = []
        first, count = self.inputs.parameters, len(self.inputs.names)
        with torch.no_grad():
            for now, was in zip(
                self.inputs.primals[first:count], self.before.buffers, strict=True
            ):
                now.copy_(was)
            for now, was in zip(self.inputs.primals[count:], self.before.arguments, strict=True):
                if not now.is_inference() and not torch.equal(now, was):
                    now.copy_(was)
        set_generators(self.before.generators, self.inputs.primals)

    def _compare(
        self,
        name: str,
        mine: torch.Tensor | None,
        eager: torch.Tensor | None,
        kind: OutputKind | None,
        target: str,
    ) -> None:
        difference = differs(mine, eager)
        self.compared += 1
        if difference:
            raise VerifyError(
                f"the planned step differs from eager in {name}: {difference}"
                f"{self._source(kind, target)}. The original model runs from now on, and what this part "
                "of the step had changed has been put back. This is a defect of remat; please report it "
                "with the model."
            )

    def _source(self, kind: OutputKind | None, target: str) -> str:
        """Where a value of the plan is computed, for people."""
        assert self.planned.emitted is not None
        graph = self.planned.emitted.graph
        value = next((o.value for o in graph.outputs if (o.kind, o.target) == (kind, target)), -1)
        op = next((op for op in reversed(graph.ops) if op.result == value), None)
        if op is None:
            return ""
        where = " ".join(part for part in (op.module, op.source) if part)
        return f", computed by {op.target}" + (f" ({where})" if where else "")


def _has_a_host(device: torch.device) -> bool:
    """There is other memory than the device's to keep tensors in."""
    return device.type != "cpu"


def _paths(pattern: object, count: int) -> list[str]:
    """Where each tensor is in an output, for people."""
    names = [f"output tensor {i}" for i in range(count)]
    for path, leaf in pytree.tree_flatten_with_path(pattern)[0]:
        if isinstance(leaf, Hole) and path:
            names[leaf.index] = f"output{pytree.keystr(path)}"
    return names


def not_verified(error: RuntimeError) -> str:
    """The warning for a step that could not be verified."""
    return (
        "remat: verify=True, but the step could not be verified: eager does not fit beside the plan, not "
        f"even with its activations on the host ({str(error).splitlines()[0]}). Verify with a smaller batch."
    )
