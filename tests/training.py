"""Training loops as users write them, run twice: eager and planned."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import zoo
from torch import Tensor, nn
from torch.optim import Optimizer

from remat import Plan, StepProtocol, optimize_checkpoints

MakeOptimizer = Callable[[list[nn.Parameter]], Optimizer] | None
HUGE = 10**15
"""A budget that every model fits, bytes."""


@dataclass
class Loop:
    """One model in one training loop."""

    case: zoo.Case
    model: nn.Module
    """The case's model or a drop-in for it."""
    optimizer: Optimizer | None
    protocol: StepProtocol

    def step(self) -> Tensor:
        """One training step; the loss lives to its end, and so do the outputs if they are held."""
        output, loss = self.forward()
        loss.backward()  # type: ignore[no-untyped-call]
        self.finish()
        del output
        return loss

    def forward(self) -> tuple[object, Tensor]:
        """The outputs (None if nothing holds them) and the loss."""
        case = self.case
        if not self.protocol.outputs_held:
            if case.loss_fn is None:
                return None, self.model(*case.args, **case.kwargs).loss
            return None, case.loss_fn(self.model(*case.args, **case.kwargs))
        output = self.model(*case.args, **case.kwargs)
        return output, output.loss if case.loss_fn is None else case.loss_fn(output)

    def finish(self) -> None:
        """Update the parameters and clear the gradients, which stay allocated if they are resident."""
        if self.optimizer is not None:
            self.optimizer.step()
        self.model.zero_grad(set_to_none=not self.protocol.gradients_resident)

    def record(self, steps: int) -> list[Tensor]:
        """Train some steps from a fixed seed; returns copies of all that they computed."""
        seen: list[Tensor] = []
        torch.manual_seed(7)
        for _ in range(steps):
            output, loss = self.forward()
            loss.backward()  # type: ignore[no-untyped-call]
            del output
            gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
            kept = [loss.detach(), *gradients, *self.model.buffers(), torch.get_rng_state()]
            seen += [tensor.clone() for tensor in kept]
            self.finish()
        return [*seen, *(p.detach().clone() for p in self.model.parameters())]

    @property
    def plan(self) -> Plan:
        """The drop-in's plan."""
        plan = vars(self.model)["remat"].plan
        assert isinstance(plan, Plan)
        return plan


def eager(case: zoo.Case, make: MakeOptimizer, protocol: StepProtocol) -> Loop:
    """The loop around the model as it is."""
    optimizer = make(list(case.model.parameters())) if make else None
    return Loop(case, case.model, optimizer, protocol)


def planned(
    case: zoo.Case,
    make: MakeOptimizer,
    protocol: StepProtocol,
    budget: int = HUGE,
    gap: float = 0.01,
) -> Loop:
    """The loop around a drop-in; `budget` in bytes."""
    loop = eager(case, make, protocol)
    loop.model = optimize_checkpoints(
        case.model,
        f"{budget}B",
        case.args,
        case.kwargs,
        loss_fn=case.loss_fn,
        optimizer=loop.optimizer,
        protocol=protocol,
        gap=gap,
        time_limit_s=20.0,
    )
    return loop


def equal(these: Sequence[Tensor], those: Sequence[Tensor]) -> bool:
    """As many, and bit for bit the same."""
    return len(these) == len(those) and all(map(torch.equal, these, those))
