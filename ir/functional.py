"""A module's forward as a function of its tensors, on fakes, which leaves the module as it was.

Parameters and buffers are swapped for fakes while the forward runs. Which outputs receive a gradient is
chosen here; see `choose_gradient_outputs`. The replacement of a buffer (``self.mean = ...``) becomes an
update of it.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ._torch import FakeTensorMode, reparametrize
from .errors import UnsupportedGraphError
from .fake import fake_tensors
from .structure import Hole, loss_of, put_tensors, take_tensors
from .untouched import arguments_kept, put_back, python_state


class Functional(nn.Module):
    """The user's module as a function of its tensors; does not own the module, so names stay ours."""

    def __init__(
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        tensors: "FakeState",
        pattern: object,
        gradient_outputs: str | tuple[int, ...],
    ) -> None:
        """Make the function.

        Args:
            module: the user's.
            forward: its forward, bound.
            tensors: fakes of its parameters and buffers.
            pattern: of the arguments; see `structure`.
            gradient_outputs: see `choose_gradient_outputs`.
        """
        super().__init__()
        self.hidden = (module, forward)
        self.p = nn.ParameterList(tensors.parameters)
        for i, buffer in enumerate(tensors.buffers):
            self.register_buffer(f"b{i}", buffer)
        self.names = tensors.names
        self.pattern = pattern
        self.gradient_outputs = gradient_outputs
        self.output: tuple[object, tuple[bool, ...], tuple[int, ...]] | None = None
        """Of the last run: pattern, which tensors require a gradient, and which receive one."""

    def forward(self, *arguments: torch.Tensor) -> list[torch.Tensor]:
        """Tensors of the output; those that receive no gradient are detached."""
        module, forward = self.hidden
        swapped: dict[str, torch.Tensor] = {
            name: self.p[i] if kind == "p" else getattr(self, f"b{i}")
            for name, (kind, i) in self.names.items()
        }
        args, kwargs = put_tensors(self.pattern, arguments)
        with reparametrize(module, swapped), arguments_kept((args, kwargs)):
            output = forward(*args, **kwargs)
            _take_replaced(module, swapped)
        tensors, pattern = take_tensors(output)
        requires_grad = tuple(tensor.requires_grad for tensor in tensors)
        loss = loss_of(output)
        chosen = choose_gradient_outputs(tensors, self.gradient_outputs, loss)
        self.output = (pattern, requires_grad, chosen)
        return [t if i in chosen else t.detach() for i, t in enumerate(tensors)]


def _take_replaced(module: nn.Module, swapped: Mapping[str, torch.Tensor]) -> None:
    """Turn the replacement of a buffer (``self.mean = ...``) into an update of it."""
    for name, tensor in swapped.items():
        path, _, key = name.rpartition(".")
        now = getattr(module.get_submodule(path), key, None)
        if now is tensor or isinstance(tensor, nn.Parameter):
            continue
        fits = isinstance(now, torch.Tensor) and now.shape == tensor.shape
        if not fits or now.dtype != tensor.dtype or now.requires_grad:  # type: ignore[union-attr]
            raise UnsupportedGraphError(
                f"the forward replaces the buffer {name} by something that cannot be copied into it "
                "(another shape or type, or part of the graph of autograd). Update it in place, "
                "detached."
            )
        tensor.copy_(now)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class FakeState:
    """Fakes of a module's parameters and buffers, each once."""

    parameters: list[nn.Parameter]
    buffers: list[torch.Tensor]
    names: dict[str, tuple[str, int]]
    """Name of every place where one is registered -> ("p" or "b", index)."""
    parameter_names: tuple[str, ...]
    buffer_names: tuple[str, ...]


def choose_gradient_outputs(
    tensors: list[torch.Tensor], asked: str | tuple[int, ...], loss: torch.Tensor | None
) -> tuple[int, ...]:
    """Indices of the outputs that receive a gradient.

    Args:
        tensors: tensors of the module's output, in order.
        asked: indices, "all", or "auto": the one called loss; if there is none, the 0-dimensional
            ones; if there are none, all.
        loss: the output that is called loss.
    """
    possible = tuple(i for i, tensor in enumerate(tensors) if tensor.requires_grad)
    if asked == "auto" and loss is not None:
        return tuple(i for i in possible if tensors[i] is loss)
    if asked == "auto":
        return tuple(i for i in possible if tensors[i].dim() == 0) or possible
    return possible if asked == "all" else tuple(i for i in possible if i in asked)


def named_tensors(module: nn.Module) -> tuple[dict[str, nn.Parameter], dict[str, torch.Tensor]]:
    """Parameters and buffers of `module`, each once, under the first of its names."""
    return dict(module.named_parameters()), dict(module.named_buffers())


def registered_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers, by the name of every place where one is registered.

    Each place once: a submodule with two names is one, and to swap its tensors twice would lose what it held.
    """
    return {
        f"{path}.{key}".lstrip("."): tensor
        for path, child in module.named_modules()
        for key, tensor in (*child._parameters.items(), *child._buffers.items())
        if tensor is not None
    }


def fake_state(module: nn.Module, mode: FakeTensorMode) -> FakeState:
    """Fakes of all parameters and buffers; one fake for a tensor that has several names."""
    parameters, buffers = named_tensors(module)
    index = {id(p): ("p", i) for i, p in enumerate(parameters.values())}
    index |= {id(b): ("b", i) for i, b in enumerate(buffers.values())}
    names = {name: index[id(tensor)] for name, tensor in registered_tensors(module).items()}
    fakes, _ = fake_tensors(mode, [*parameters.values(), *buffers.values()])
    count = len(parameters)
    wrapped = [
        nn.Parameter(fake, requires_grad=p.requires_grad)
        for fake, p in zip(fakes[:count], parameters.values(), strict=True)
    ]
    return FakeState(wrapped, fakes[count:], names, tuple(parameters), tuple(buffers))


def argument_names(forward: Callable[..., Any], pattern: Any, count: int) -> list[str]:
    """Name of the argument of `forward` that each tensor belongs to, in order."""
    args, kwargs = pattern
    names = [""] * count
    for name, value in inspect.signature(forward).bind_partial(*args, **kwargs).arguments.items():
        for leaf in tree_leaves(value):
            if isinstance(leaf, Hole):
                names[leaf.index] = names[leaf.index] or name
    return names


@contextlib.contextmanager
def untouched(module: nn.Module) -> Iterator[None]:
    """Leave random streams and Python attributes as they were.

    Raises:
        UnsupportedGraphError: the forward changed some, which a planned step would not repeat.
    """
    state = python_state(module)
    error: Exception | None = None
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        except Exception as raised:
            error = raised
        finally:
            changed = put_back(state)
    if changed:  # the better explanation if the trace failed, since it runs the forward twice
        raise UnsupportedGraphError(
            f"the forward changes {', '.join(changed)}. A planned step does not repeat what the forward "
            "does to Python objects. Register what it sets as a buffer and update that in place, return "
            "what the training loop reads, draw from torch's generator; or, if it is a cache, run one "
            "forward before optimize_checkpoints."
        ) from error
    if error is not None:
        raise error
