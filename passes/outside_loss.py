"""A loss outside the model: what it holds between the model's outputs and their gradients.

The loss is traced alone, as eager runs it: a module yields copies of the outputs, the loss is computed,
and its backward ends where the gradients of the outputs are there. In the graph all this is one op, the
border, during which everything is held at once. In the trace of a planned step the loss's own instants
take the border's place (see `with_loss`), so the bytes are exact there.

Not handled: outputs that share memory with each other; a gradient that is expanded from fewer elements
(it is taken to be dense); a loss that keeps anything beside what its backward needs.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import sympy
import torch
from torch import nn

from remat.ir import Block, Graph, OutputKind, Role, Trace
from remat.ir.capture import Capture
from remat.ir.lift import Loss
from remat.ir.structure import put_tensors
from remat.ir.symbols import Names

from .eager import ScratchOf, eager_trace
from .memory import profile
from .realize import Call, at, described, realized, renamed

Binding = Mapping[sympy.Symbol, int]


class _Outputs(nn.Module):
    """Yields copies of its parameters as the model yields its outputs."""

    def __init__(
        self,
        captured: Capture,
        binding: Binding,
        received: Callable[[int], object] = lambda index: None,
    ) -> None:
        super().__init__()
        self.received = received  # told of every output that receives a gradient
        self.pattern = captured.output_pattern
        found = described(Call(torch.empty_like, tuple(captured.results())))
        named = renamed(found, Names(captured.symbols).plain)
        outputs = realized(at(named, binding), torch.device("meta")).args
        self.outputs = nn.ParameterList(
            nn.Parameter(output, requires_grad=i in captured.gradient_outputs)
            for i, output in enumerate(outputs)
        )

    def forward(self) -> object:
        copies = [output.clone() for output in self.outputs]
        for i, copy in enumerate(copies):
            if copy.requires_grad:
                copy.register_hook(partial(self._receive, i))
        return put_tensors(self.pattern, copies)

    def _receive(self, index: int, gradient: torch.Tensor | None) -> None:
        if gradient is not None:
            self.received(index)


def used_outputs(
    captured: Capture, loss_fn: Callable[[Any], torch.Tensor], binding: Binding
) -> tuple[int, ...]:
    """Output tensors to which a loss gives a gradient, of those that were captured for one."""
    used: set[int] = set()
    eager_trace(_Outputs(captured, binding, used.add), (), {}, loss_fn=loss_fn)
    return tuple(sorted(used))


def trace_loss(
    captured: Capture,
    loss_fn: Callable[[Any], torch.Tensor],
    scratch: ScratchOf,
    binding: Binding,
) -> tuple[Loss | None, tuple[Block, ...]]:
    """Trace a loss on the outputs of a captured model.

    Args:
        captured: the model.
        loss_fn: output to a scalar.
        scratch: bytes that kernels take inside.
        binding: the integer of every symbol in the outputs' sizes.

    Returns:
        The loss, None if it is itself an output of the model; and the tensors that it uses beside the
        outputs, such as targets, which are on the device throughout the step.
    """
    module = _Outputs(captured, binding)
    whole = eager_trace(module, (), {}, loss_fn=loss_fn, scratch=scratch)
    first = len(module.outputs)
    last = len(whole.instants) - first - 1
    later = [replace(b, birth=b.birth - first, death=b.death - first) for b in whole.blocks]
    copies = [b for b in later if -first <= b.birth < 0][:first]
    constants = [b for b in whole.blocks if b.birth < 0 and b.role is Role.BUFFER]
    targets = tuple(replace(b, name=f"{b.name} of the loss") for b in constants)
    gradients = {b.name: b for b in later if b.role is Role.GRADIENT}
    found = [gradients.get(f"outputs.{i}.grad") for i in captured.gradient_outputs]
    tangents = [b for b in found if b is not None]
    own = [b for b in later if b.birth >= 0 and b not in tangents]
    root = next(b for b in own if b.role is Role.TANGENT)
    loss = next((b for b in own if b.death > last and b is not root), None)
    if loss is None:
        return None, targets
    trace = Trace(whole.instants[first:], tuple(b for b in own if b is not root and b is not loss))
    everything = replace(trace, blocks=(*trace.blocks, *tangents, root, loss))
    size = int(loss.size)
    beyond = profile(everything).peak - sum(int(b.size) for b in (*tangents, root, loss))
    made = Loss(
        bytes=size,
        scratch=max(0, beyond),
        trace=trace,
        dropped=tuple(max(0, b.death) for b in copies),
        tangents=tuple(last if b is None else b.birth for b in found),  # last: zeros, for backward
        computed=loss.birth,
        root=root.birth,
    )
    return made, targets


def with_loss(trace: Trace, graph: Graph, loss: Loss) -> Trace:
    """Put the loss's own instants in the place of the border.

    Args:
        trace: of the graph's ops, one instant an op and one block a storage.
        graph: the graph, original or rewritten.
        loss: its loss.
    """
    at, more = graph.border, len(loss.trace.instants) - 1
    made = dict(
        zip(graph.ops[at].allocates, (*loss.tangents, loss.computed, loss.root), strict=True)
    )
    results = [o.value for o in graph.outputs if o.kind is OutputKind.RESULT]
    dropped: dict[int, int] = {}
    for value, end in zip(results, loss.dropped, strict=True):
        for storage in graph.values[value].storages:
            dropped[storage] = max(end, dropped.get(storage, 0))

    def placed(storage: int, block: Block) -> Block:
        birth, death = block.birth, block.death
        return replace(
            block,
            birth=at + made[storage] if birth == at else birth + more * (birth > at),
            death=at + dropped.get(storage, more) if death == at else death + more * (death > at),
        )

    blocks = [placed(storage, block) for storage, block in enumerate(trace.blocks)]
    blocks += [replace(b, birth=at + b.birth, death=at + b.death) for b in loss.trace.blocks]
    instants = (*trace.instants[:at], *loss.trace.instants, *trace.instants[at + 1 :])
    return Trace(instants, tuple(blocks))
