"""What capture refuses because the planned step would be silently wrong."""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from remat.ir import UnsupportedGraphError
from remat.ir.capture import Capture, capture
from remat.ir.structure import put_tensors, take_tensors

X = torch.ones(2, 4)
Forward = Callable[..., Any]


class Net(nn.Module):
    """A linear layer; `forward(net, h, *args)` says what happens to its result `h`."""

    base: Tensor
    row: Tensor

    def __init__(self, then: Forward) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.hidden = [torch.ones(4, 4, requires_grad=True)]
        self.frozen = [torch.ones(4)]
        self.register_buffer("base", torch.ones(4, 4))
        self.register_buffer("row", self.base[0])
        self.then = then

    def forward(self, x: Tensor, *args: Any) -> Any:
        return self.then(self, self.lin(x), *args)


class Box(dict[str, Any]):
    pass


@dataclass(slots=True)
class Slots:
    h: Any


def refused(then: Forward, *args: Any) -> str:
    with pytest.raises(UnsupportedGraphError) as caught:
        capture(Net(then), args or (X,))
    return str(caught.value)


def captured(then: Forward, *args: Any) -> Capture:
    return capture(Net(then), args or (X,))


def twice(net: Net, h: Tensor, *args: Any) -> Any:
    return net.lin(h).float().sum()


def test_a_parameter_that_autocast_casts_twice() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert "autocast casts lin.weight 2 times" in refused(twice)
        captured(lambda net, h: h.float().sum())
        frozen = Net(twice)
        frozen.lin.weight.requires_grad_(False)
        frozen.lin.bias.requires_grad_(False)
        capture(frozen, (X.clone().requires_grad_(),))
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        captured(twice)


def set_item(net: Net, h: Tensor) -> Tensor:
    out = h.detach().clone()
    out[0] = net.hidden[0][0]
    return h.sum() + out.sum()


@pytest.mark.parametrize(
    "then",
    [
        lambda net, h: (h @ net.hidden[0]).sum(),
        lambda net, h: torch.cat([h, net.hidden[0]]).sum(),
        set_item,
    ],
    ids=["operand", "in_a_list", "set_item"],
)
def test_a_trainable_tensor_that_is_not_registered(then: Forward) -> None:
    assert "nn.ParameterList" in refused(then)


def test_unregistered_tensors_without_gradient_are_constants() -> None:
    captured(lambda net, h: (h * net.frozen[0]).sum())
    captured(lambda net, h: (h @ net.hidden[0].detach()).sum())


def update_row(net: Net, h: Tensor, *args: Tensor) -> Tensor:
    net.row.add_(1)
    return h.sum()


def test_updates_of_memory_that_inputs_share() -> None:
    assert "updates row in place, which shares memory with base" in refused(update_row)
    net = Net(update_row)
    net.row = torch.ones(4)
    capture(net, (X,))
    with pytest.raises(UnsupportedGraphError, match="with tensor argument 1"):
        capture(net, (X, net.row[2:]))
    flat = torch.ones(8)
    net.row, net.base = flat[:4], flat[4:]  # one storage, but no byte in common
    capture(net, (X,))


def test_updates_of_an_attribute_that_is_not_registered() -> None:
    def update(net: Net, h: Tensor) -> Tensor:
        net.frozen[0].add_(1)
        return h.sum()

    assert "register_buffer" in refused(update)


@pytest.mark.parametrize(
    "result",
    [
        lambda net, x: net.lin.weight,
        lambda net, x: net.lin.weight.detach(),
        lambda net, x: net.lin.weight[0].detach(),
        lambda net, x: x,
        lambda net, x: x.detach(),
    ],
    ids=["weight", "detached_weight", "row", "input", "detached_input"],
)
def test_results_that_are_trained_inputs(result: Forward) -> None:
    x = X.clone().requires_grad_()
    message = refused(lambda net, h, x: (h.sum(), result(net, x)), x, x)
    assert "(clone)" in message


def test_results_that_are_other_inputs() -> None:
    captured(lambda net, h: (h.sum(), X.to(h), net.base))


@pytest.mark.parametrize(
    ("wrap", "name"),
    [
        (lambda h: Box(h=h), "Box"),
        (lambda h: Box(h=[h.detach()]), "Box"),
        (Slots, "Slots"),
        (lambda h: SimpleNamespace(inner=Slots({"h": h})), "Slots"),
        (lambda h: lambda: h, "function"),
    ],
    ids=["dict", "nested", "slots", "attribute", "closure"],
)
def test_results_in_containers_of_unknown_classes(wrap: Forward, name: str) -> None:
    assert f" {name}," in refused(lambda net, h: (h.sum(), wrap(h)))


def test_arguments_in_containers_of_unknown_classes() -> None:
    assert " Box," in refused(lambda net, h, box: h.sum(), X, Box(h=X))
    captured(lambda net, h, box: h.sum(), X, Box(h=1))


@pytest.mark.parametrize(
    ("value", "change"),
    [
        (SimpleNamespace(a=1.0), lambda v: setattr(v, "a", 2.0)),
        (SimpleNamespace(a=1), lambda v: setattr(v, "a", True)),
        (SimpleNamespace(a=SimpleNamespace(b=[1])), lambda v: v.a.b.append(2)),
        (SimpleNamespace(a=1, t=X), lambda v: setattr(v, "a", 1.0)),
        ({"a": {1}}, lambda v: v["a"].add(2)),
        (Box(a=1), lambda v: v.update(a=2)),
    ],
    ids=["number", "type", "nested", "beside_a_tensor", "set", "dict"],
)
def test_a_pattern_remembers_what_was_in_objects(value: Any, change: Forward) -> None:
    _, before = take_tensors(value)
    assert take_tensors(value)[1] == before
    change(value)
    assert take_tensors(value)[1] != before


def test_objects_without_tensors_are_passed_on_as_they_are() -> None:
    value = SimpleNamespace(a=1)
    assert put_tensors(take_tensors([value])[1], []) == [value]
    assert put_tensors(take_tensors([value])[1], [])[0] is value


def test_the_advice_fits_the_error() -> None:
    message = refused(lambda net, h: h.sum(), torch.ones(2, 5))
    assert "example arguments failed" in message
    assert "Values of tensors" not in message
    assert "Values of tensors" in refused(lambda net, h: h.sum() if h.sum() > 0 else h)
    assert "Values of tensors" in refused(lambda net, h: h[: int(h.sum().item())].sum())
