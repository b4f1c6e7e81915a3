"""The phases of an eager step, run on fakes: forwards and backwards, then the optimizer.

See `eager` for the step that is described.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from remat.ir import Phase, Role, UnsupportedGraphError
from remat.ir._torch import DisableAutocast
from remat.ir.structure import loss_of, take_tensors

from .eager_follow import LATE_STEP, Follow
from .loop import Loop

LossFn = Callable[[Any], torch.Tensor]
Arguments = tuple[tuple[Any, ...], Mapping[str, Any]]


def make_gradients(follow: Follow, parameters: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Gradients that are there before the step."""
    for name, parameter in parameters:
        with follow.mode:
            parameter.grad = torch.empty_like(parameter)
        follow.resident(parameter.grad, f"{name}.grad", Role.GRADIENT)


def forward_backward(
    follow: Follow, model: nn.Module, arguments: Arguments, loss_fn: LossFn | None, loop: Loop
) -> object:
    """Forwards and backwards of one step.

    Of several only two are run: all after the second, which finds gradients, are like it.

    Returns:
        What the caller keeps: the loss, and the output if it is held.
    """
    kept: object = None
    for _ in range(min(loop.accumulation_steps, 2)):
        del kept
        kept = _once(follow, model, arguments, loss_fn, loop)
    return kept


def _once(
    follow: Follow, model: nn.Module, arguments: Arguments, loss_fn: LossFn | None, loop: Loop
) -> object:
    args, kwargs = arguments
    follow.phase = Phase.FORWARD
    with follow.paths(model), follow.autocast():
        output = model.forward(*args, **kwargs)
        for tensor in _tensors(output):
            follow.label(tensor, Role.OUTPUT)
        roots = _roots(output) if loss_fn is None else [_scalar(loss_fn(output))]
        held = output if loop.outputs_held else None
        del output, tensor
    losses = [root for root in roots if root.dim() == 0]
    if loop.accumulation_steps > 1:
        roots = [root / loop.accumulation_steps for root in roots]
    if loop.scales_loss:
        roots = [root * _scale(follow) for root in roots]
    follow.phase = Phase.BACKWARD
    tangents = [torch.ones_like(root) for root in roots]
    for tangent in tangents:
        follow.label(tangent, Role.TANGENT)
    with DisableAutocast():
        torch.autograd.backward(roots, tangents)
    return held, losses


def _scale(follow: Follow) -> torch.Tensor:
    """The scale of a `GradScaler`, which is there before the step."""
    with follow.preparing():
        return torch.ones((), dtype=torch.float32)


def _tensors(value: object) -> tuple[torch.Tensor, ...]:
    found, _ = take_tensors(value)
    tensors = tuple(found)
    found.clear()  # it is in a reference cycle, which would hold the tensors
    return tensors


def _roots(output: object) -> list[torch.Tensor]:
    """Tensors of the output from which backward starts."""
    candidates = [t for t in _tensors(output) if t.requires_grad]
    if not candidates:
        raise UnsupportedGraphError(
            "No tensor of the model's output requires a gradient, so there is no backward. "
            "Give a loss function, or train at least one parameter."
        )
    loss = loss_of(output)
    scalars = [t for t in candidates if t.dim() == 0 and t.is_floating_point()]
    return [loss] if loss is not None else scalars or candidates


def _scalar(loss: object) -> torch.Tensor:
    """What a loss function has returned, if backward can start from it."""
    if not isinstance(loss, torch.Tensor):
        raise ValueError(f"loss_fn must return one scalar, got {type(loss).__name__}")
    if loss.dim() > 0:
        raise ValueError(f"loss_fn must return one scalar, got shape {list(loss.shape)}")
    if not loss.requires_grad:
        raise ValueError(
            "loss_fn must return a scalar that requires a gradient; it uses no output that does"
        )
    return loss


class OptimizerPhase:
    """What comes after the last backward, up to and with the optimizer's step."""

    def __init__(self, follow: Follow, twin: torch.optim.Optimizer, loop: Loop) -> None:
        """Prepare it.

        Args:
            follow: records.
            twin: the optimizer over the fakes.
            loop: what is done before its step.
        """
        self._follow = follow
        self._twin = twin
        self._loop = loop
        self._trained = [p for group in twin.param_groups for p in group["params"]]
        self._masters: list[torch.Tensor] = []
        if loop.master_weights:
            with follow.preparing():
                self._masters = self._make_masters()

    def run(self, *, first: bool = False) -> None:
        """One phase: the first, whose step makes the optimizer's state, or a late one."""
        self._follow.phase = Phase.OPTIMIZER
        trained = [p for p in self._trained if p.grad is not None]
        if self._loop.scales_loss:
            _unscale(self._follow, trained)
        if self._loop.clips_gradients and trained:
            nn.utils.clip_grad_norm_(trained, 1.0, foreach=True)
        pairs = list(zip(self._trained, self._masters, strict=False))
        for parameter, master in pairs:
            if parameter.grad is not None:
                master.grad = parameter.grad.float()
        _step(self._follow, self._twin, first)
        for parameter, master in pairs:
            parameter.detach().copy_(master.detach())
            master.grad = None

    def _make_masters(self) -> list[torch.Tensor]:
        """Let the twin step on float32 copies."""
        masters: list[torch.Tensor] = []
        for group in self._twin.param_groups:
            copies = [nn.Parameter(p.detach().float(), p.requires_grad) for p in group["params"]]
            for parameter, master in zip(group["params"], copies, strict=True):
                self._follow.label(master, Role.PARAMETER, f"master_{len(masters)}")
                if parameter in self._twin.state:
                    self._twin.state[master] = self._twin.state.pop(parameter)
                masters.append(master)
            group["params"] = copies
        return masters


def _unscale(follow: Follow, parameters: Sequence[torch.Tensor]) -> None:
    inverse = _scale(follow).double().reciprocal().float()
    found = torch.zeros((), dtype=torch.float32)
    gradients = [p.grad for p in parameters if p.grad is not None]
    torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, inverse)


def _step(follow: Follow, twin: torch.optim.Optimizer, first: bool) -> None:
    step: Any = type(twin).step
    parameters = [p for group in twin.param_groups for p in group["params"]]
    if not first:
        with follow.preparing(), torch.no_grad():
            if any(p.grad is not None and not twin.state.get(p) for p in parameters):
                step(twin)
            for state in twin.state.values():
                if isinstance(count := state.get("step"), torch.Tensor):
                    count.fill_(LATE_STEP)  # some optimizers do otherwise in their first steps
        label_state(follow, twin, parameters)
    step(twin)
    label_state(follow, twin, parameters)


def label_state(
    follow: Follow, twin: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]
) -> None:
    """Say of the optimizer's tensors that they are its state."""
    numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
    device_steps = {
        id(parameter): bool(group.get("fused") or group.get("capturable"))
        for group in twin.param_groups
        for parameter in group["params"]
    }
    for parameter, state in twin.state.items():
        for key, value in state.items():
            if not isinstance(value, torch.Tensor):
                continue
            follow.label(value, Role.OPTIMIZER_STATE, f"state.{numbers[id(parameter)]}.{key}")
            if follow.cuda and key == "step" and not device_steps[id(parameter)]:
                follow.on_host(value)
