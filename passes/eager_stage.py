"""Fake stand-ins for a model, its arguments and its optimizer, so that a step can run on them.

Every tensor gets a fake of the same sizes, strides, type and device (the CPU for one without data);
tensors that share a storage share the fake one, and one parameter under two names stays one. No
memory is allocated for any of them.

The model itself runs, with fakes in the place of its tensors. Afterwards the attributes of every
module are as before: the same objects, and the same contents of lists, dicts and sets among them. The
optimizer is not run: a shallow copy of it is.

Not handled: sparse and nested tensors, tensor subclasses. Hooks of parameters, of the model itself and
of the optimizer are not called. What a forward changes in objects that are not modules stays changed.
"""

import contextlib
import operator
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from remat.ir import Role, UnsupportedGraphError
from remat.ir._torch import FakeTensorMode
from remat.ir.containers import containers, contents

from .eager_follow import Follow


class Stage:
    """The fakes of one run, by the tensor that each stands for."""

    def __init__(
        self, mode: FakeTensorMode, follow: Follow, dtype: torch.dtype | None = None
    ) -> None:
        """Start without fakes.

        Args:
            mode: the mode that owns the fakes.
            follow: is told of every fake that it is resident.
            dtype: of the fakes of floating-point tensors; None: that of each.
        """
        self._dtype = dtype
        self._mode = mode
        self._follow = follow
        self._fakes: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._storages: dict[int, torch.UntypedStorage] = {}

    def fake(self, real: torch.Tensor, name: str, role: Role) -> torch.Tensor:
        """The stand-in of `real`, made and named when it is first asked for."""
        if id(real) not in self._fakes:
            fake = self._empty(real)
            self._follow.resident(fake, name, role)
            self._follow.values.know(fake, real)
            if isinstance(real, nn.Parameter):
                fake = nn.Parameter(fake, requires_grad=real.requires_grad)
            elif real.requires_grad:
                fake.requires_grad_()
            self._fakes[id(real)] = real, fake  # holding the real one keeps its id from reuse
        return self._fakes[id(real)][1]

    def place(self, real: torch.Tensor, fake: torch.Tensor, name: str, role: Role) -> None:
        """Let `fake` stand in for `real`."""
        self._follow.resident(fake, name, role)
        self._follow.values.know(fake, real)
        self._fakes[id(real)] = real, fake

    @contextlib.contextmanager
    def model(self, model: nn.Module) -> Iterator[list[tuple[str, nn.Parameter]]]:
        """Put fakes in the place of the model's tensors; yields the trainable ones of these."""
        for name, parameter in model.named_parameters():
            self.fake(parameter, name, Role.PARAMETER)
        for name, buffer in model.named_buffers():
            self.fake(buffer, name, Role.BUFFER)
        attributes = [module.__dict__ for module in model.modules()]
        saved = [contents(each) for each in attributes]
        try:
            for each in attributes:
                self._replace(each)
            yield [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        finally:
            for held in saved:
                held.put_back()

    def optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """A copy of `optimizer` over the stand-ins of its parameters, with its present state."""
        inner = next(
            (n for n, v in vars(optimizer).items() if isinstance(v, torch.optim.Optimizer)), ""
        )
        if inner:  # a copy of the outer one would step the real inner one
            raise UnsupportedGraphError(
                f"the {type(optimizer).__name__} steps another optimizer, its attribute {inner!r}. Give "
                "that one instead."
            )
        twin = object.__new__(type(optimizer))
        twin.__dict__.update(optimizer.__dict__)
        twin.__dict__.pop("step", None)  # learning rate schedulers wrap it, bound to the original
        for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
            setattr(twin, hooks, OrderedDict())
        twin.param_groups = [self._group(group) for group in optimizer.param_groups]
        if self._follow.cuda:
            step_as_on_a_gpu(twin)
        twin.state = defaultdict(dict)
        for number, (parameter, state) in enumerate(optimizer.state.items()):
            twin.state[self.fake(parameter, f"parameter_{number}", Role.PARAMETER)] = (
                pytree.tree_map_only(torch.Tensor, self._state, state)
            )
        return twin

    def _group(self, group: dict[str, Any]) -> dict[str, Any]:
        names = group.get("param_names") or [f"parameter_{i}" for i in range(len(group["params"]))]
        parameters = [
            self.fake(p, name, Role.PARAMETER)
            for p, name in zip(group["params"], names, strict=True)
        ]
        return {
            name: self._state(value) if isinstance(value, torch.Tensor) else value
            for name, value in group.items()
        } | {"params": parameters}

    def _state(self, real: torch.Tensor) -> torch.Tensor:
        return self.fake(real, f"optimizer_state_{len(self._fakes)}", Role.OPTIMIZER_STATE)

    def converted(self, real: torch.Tensor) -> torch.Tensor:
        """`real`, or a tensor like it of the type that was asked for, without data."""
        dtype = self._type(real)
        return real if dtype == real.dtype else torch.empty_like(real, dtype=dtype, device="meta")

    def _type(self, real: torch.Tensor) -> torch.dtype:
        return self._dtype if self._dtype and real.is_floating_point() else real.dtype

    def _empty(self, real: torch.Tensor) -> torch.Tensor:
        storage = real.untyped_storage()
        device = torch.device("cpu") if real.is_meta else real.device
        dtype = self._type(real)
        with self._mode, torch.no_grad():
            if storage._cdata not in self._storages:
                size = storage.nbytes() // real.dtype.itemsize * dtype.itemsize
                flat = torch.empty(size, dtype=torch.uint8, device=device)
                self._storages[storage._cdata] = flat.untyped_storage()
            empty = torch.empty(0, dtype=dtype, device=device)
            return empty.set_(
                self._storages[storage._cdata], real.storage_offset(), real.size(), real.stride()
            )

    def _replace(self, attributes: dict[str, Any]) -> None:
        """Replace tensors among the attributes of a module and in their containers."""

        def stand_in(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return self.fake(value, f"constant_{len(self._fakes)}", Role.BUFFER)
            if type(value) is not tuple:
                return value
            new = tuple(map(stand_in, value))
            return value if all(map(operator.is_, new, value)) else new

        for each in list(containers(attributes)):
            items = each.items() if isinstance(each, dict) else enumerate(each)
            changed = {key: new for key, item in items if (new := stand_in(item)) is not item}
            if isinstance(each, dict | list):
                for key, new in changed.items():
                    each[key] = new


def step_as_on_a_gpu(optimizer: torch.optim.Optimizer) -> None:
    """Take the form that is the default for tensors on a GPU, where the user has asked for none."""
    for group in optimizer.param_groups:
        if group.get("foreach", False) is None and not group.get("fused"):
            group["foreach"] = True
