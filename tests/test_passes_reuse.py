"""Results that are written over an operand: where they are, where they must not be, what they give."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_passes_schedules import prepared_step, problem_of
from torch import Tensor, nn
from torch.nn import functional
from twins import Step, make, optimized, same
from zoo import Case

from remat.passes import StepProtocol, emit_schedule, overwriting_ops
from remat.solvers import evaluate

LOOSE = StepProtocol(outputs_held=False)


class Classifier(nn.Module):
    """A few layers and a loss over many classes, where the logits take the most."""

    def __init__(self) -> None:
        super().__init__()
        widths = (8, 16, 16, 16, 200)
        self.layers = nn.ModuleList(map(nn.Linear, widths, widths[1:]))

    def forward(self, x: Tensor, target: Tensor) -> Any:
        for layer in self.layers[:-1]:
            x = functional.silu(layer(x)) * 0.5
        return functional.cross_entropy(self.layers[-1](x), target)


class Returned(Classifier):
    """Hands out what it could have overwritten: the logits, and a view of the first hidden layer."""

    def forward(self, x: Tensor, target: Tensor) -> Any:
        first = self.layers[0](x)
        x = functional.silu(first)
        for layer in self.layers[1:-1]:
            x = functional.silu(layer(x))
        logits = self.layers[-1](x)
        return functional.cross_entropy(logits, target), logits, first.view(-1)


STEP = Step((torch.randn(64, 8), torch.arange(64) % 200), loss=lambda output: output)


def in_place(build: Callable[[], nn.Module]) -> dict[str, str]:
    """Ops of the program as captured, that write over an operand, and the operand."""
    prepared = prepared_step(Case("", make(build), STEP.args, {}, None))
    problem, index = problem_of(prepared, LOOSE)
    emitted = emit_schedule(prepared, index, range(len(problem.ops)), LOOSE)
    nodes = {node.name: node for node in emitted.rewritten.joint.graph.nodes}
    found = {}
    for name in overwriting_ops(emitted):
        place = nodes[name].kwargs or {"self": nodes[name].args[0]}
        (over,) = (v for k, v in place.items() if k in ("out", "grad_input", "self"))
        found[name] = str(over)
    return found


def test_the_logits_region_takes_two_logits_instead_of_three() -> None:
    assert (
        in_place(Classifier).items()
        >= {
            "_log_softmax": "addmm_3",
            "_log_softmax_backward_data": "nll_loss_backward",
        }.items()
    )
    prepared = prepared_step(Case("", make(Classifier), STEP.args, {}, None))
    problem, _ = problem_of(prepared, LOOSE)
    without = replace(problem, ops=tuple(replace(op, reuse=()) for op in problem.ops))
    more, less = (evaluate(p, range(len(p.ops))).peak for p in (without, problem))
    assert more - less > 0.99 * 64 * 200 * 4


def test_nothing_that_the_caller_sees_or_backward_saves_is_overwritten() -> None:
    seen = in_place(Returned)
    assert "_log_softmax" not in seen  # would overwrite the logits, an output
    assert "silu" not in seen  # the first hidden layer is an output, by its view
    assert not any(
        name.startswith("silu") and "backward" not in name for name in in_place(Classifier)
    )
    assert "_log_softmax_backward_data" in seen


@pytest.mark.parametrize("build", [Classifier, Returned])
def test_backward_may_run_again_and_hooks_see_what_they_see_in_eager(
    build: Callable[[], nn.Module],
) -> None:
    def seen(model: nn.Module) -> list[Any]:
        found: list[Any] = []
        hooked: list[list[Tensor]] = [[] for _ in model.parameters()]
        handles = [
            p.register_hook(lambda gradient, own=own: own.append(gradient.clone()))  # type: ignore[no-untyped-call]
            for p, own in zip(model.parameters(), hooked, strict=True)
        ]
        output = model(*STEP.args)
        loss, *others = output if isinstance(output, tuple) else (output,)
        for keep in (True, True, False):
            loss.backward(retain_graph=keep)
            found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
            model.zero_grad()
        for handle in handles:
            handle.remove()
        return [loss.detach(), *others, *found, *hooked]

    step = Step(STEP.args, loss=lambda output: output[0] if isinstance(output, tuple) else output)
    dropin = optimized(make(build), step)
    assert dropin.remat.plan.reused
    assert same(seen(dropin), seen(make(build)))
    assert dropin.remat.stats.planned == 1


TABLE = torch.linspace(0.5, 1.5, 64 * 16).view(64, 16)


@torch.library.custom_op("remat_test_reuse::table", mutates_args=())
def table(x: Tensor) -> Tensor:
    """Returns what it keeps."""
    return TABLE


@table.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


table.register_autograd(
    lambda context, gradient: None, setup_context=lambda context, inputs, output: None
)


class Tabled(Classifier):
    """Uses what a custom op returns, which dies in the graph but not in the op's own memory."""

    def forward(self, x: Tensor, target: Tensor) -> Any:
        hidden = functional.silu(self.layers[0](x))
        hidden = table(hidden.detach()).sin() * hidden
        for layer in self.layers[1:-1]:
            hidden = functional.silu(layer(hidden))
        return functional.cross_entropy(self.layers[-1](hidden), target)


def test_what_a_custom_op_returns_is_not_overwritten() -> None:
    found = in_place(Tabled)
    assert found
    assert not any("table" in over for over in found.values())


class Transposed(Classifier):
    """The gradient that comes into the log-softmax is laid out unlike its result."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(200, 64))

    def forward(self, x: Tensor, target: Tensor) -> Any:
        for layer in self.layers:
            x = layer(functional.silu(x))
        return (functional.log_softmax(x, -1).t() * self.weight).mean()


def test_gradients_are_eagers_where_layouts_are_mixed() -> None:
    eager, planned = make(Transposed), optimized(make(Transposed), STEP)
    assert planned.remat.plan.reused
    for model in (eager, planned):
        model(*STEP.args).backward()
    pairs = zip(eager.parameters(), planned.parameters(), strict=True)
    assert all(same(a.grad, b.grad) for a, b in pairs)
