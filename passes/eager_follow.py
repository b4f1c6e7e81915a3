"""Follow the storages of a program that runs on fake tensors, and record its event trace.

Definition. Every op that reaches the dispatcher below autograd is one instant. A storage that an op
returns and that is not followed yet is a block born at that instant; a weak reference tells when the
last Python, autograd or C++ owner has let go of it, and it then dies at the instant executed last.

A Python number that an op takes as a tensor is a tensor of its own, made before the op reaches the
dispatcher. It is scratch of the op, unless autograd saves it: then it is a block, born with the op.

Storages that exist before the program are told by `resident`. What kernels allocate and free inside
is not seen on fake tensors: every op is kept as a `Call`, for `passes.scratch`.

Not handled: storages that are resized after their birth, and ops whose output size depends on
unknown values.

For a CUDA device, numbers and the step counts of optimizers stay on the host and are not recorded.
"""

import contextlib
import functools
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from remat import ir
from remat.ir import Block, Instant, Phase, Role, Trace, UnsupportedGraphError
from remat.ir._torch import (
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    saved_tensors_hooks,
)
from remat.ir.symbols import Names, expression, tensor_text

from .eager_values import KnownValues
from .realize import Call, described, flat_tensors, leaves, renamed

_TORCH = str(Path(torch.__file__).parent)
_OURS = str(Path(__file__).parent)
_KERNELS = str(Path(ir.__file__).parent)
"""Where kernels stand that run in the place of torch's."""
LATE_STEP = 1000
"""A step count of an optimizer well after its warm-up."""


@dataclass(slots=True)
class _Storage:
    """A block that is being made."""

    name: str
    role: Role
    size: int | torch.SymInt
    birth: int
    death: int | None = None
    dtype: torch.dtype = torch.uint8
    shape: Sequence[int | torch.SymInt] = ()


class Follow(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records instants and blocks of what runs under it, in order."""

    def __init__(
        self,
        mode: FakeTensorMode,
        cuda: bool = False,
        autocast: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Start an empty record.

        Args:
            mode: the fake mode, entered before this one.
            cuda: the fakes stand for tensors on a CUDA device.
            autocast: context of forward and loss.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.cuda = cuda
        self.autocast = autocast
        self.names = Names({})
        self.phase = Phase.FORWARD
        self.find_phase: Callable[[Phase], Phase] = lambda now: now
        self.values = KnownValues()
        self.mode = mode
        self._paths = [""]
        self._preparing = False
        self._instants: list[Instant] = []
        self._calls: list[Call] = []
        self._storages: list[_Storage] = []
        self._alive: dict[int, _Storage] = {}
        self._counts: Counter[str] = Counter()
        self._unsettled: tuple[tuple[torch.Tensor, ...], int] = ((), -1)
        self._foreign: list[torch.Tensor] = []

    def resident(self, tensor: torch.Tensor, name: str, role: Role) -> None:
        """The storage of `tensor` is there before the step."""
        if tensor.untyped_storage()._cdata not in self._alive:
            self._follow(tensor, _Storage(name, role, tensor.untyped_storage().nbytes(), -1))

    def label(self, tensor: torch.Tensor, role: Role, name: str | None = None) -> None:
        """Say what a storage is for that nothing has been said about."""
        storage = self._alive.get(tensor.untyped_storage()._cdata)
        if storage is not None and storage.role is Role.TEMPORARY:
            storage.role = role
            storage.name = name or storage.name

    def on_host(self, tensor: torch.Tensor) -> None:
        """The storage of `tensor` is not on the device."""
        storage = self._alive.get(tensor.untyped_storage()._cdata)
        if storage is not None:
            storage.size = 0

    @contextlib.contextmanager
    def preparing(self) -> Iterator[None]:
        """What runs inside belongs to an earlier step: what survives of it is resident."""
        before = len(self._storages)
        self._preparing = True
        try:
            yield
        finally:
            self._preparing = False
            survivors = [s for s in self._storages[before:] if s.death is None]
            self._storages[before:] = survivors

    @contextlib.contextmanager
    def paths(self, model: nn.Module) -> Iterator[None]:
        """Note which module of `model` calls an op."""
        handles = []
        for path, module in model.named_modules():
            if path:
                handles += [
                    module.register_forward_pre_hook(self._entering(path)),
                    module.register_forward_hook(self._leaving),
                ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def trace(self) -> Trace:
        """What has been recorded so far, without scratch; what is alive now outlives the step."""
        self._settle()
        end = len(self._instants)
        blocks = [
            Block(
                s.name,
                self._role(s),
                self.names.plain(expression(s.size)),
                s.birth,
                min(death, end),
                tensor_text(s.dtype, s.shape, self.names),
            )
            for s in self._storages
            if (death := end if s.death is None else s.death) >= max(s.birth, 0)
        ]
        return Trace(tuple(self._instants), tuple(sorted(blocks, key=lambda block: block.birth)))

    @property
    def count(self) -> int:
        """Number of instants so far."""
        return len(self._instants)

    @property
    def calls(self) -> tuple[Call, ...]:
        """The op of every instant, without its tensors, in the users' symbols."""
        return tuple(renamed(call, self.names.plain) for call in self._calls)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Execute one op on fakes, and record it."""
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:  # a question, also asked while an op returns
            return func(*args, **kwargs)
        self._settle()
        if func is torch.ops.aten._local_scalar_dense.default:
            answer = self._answer(args[0])
            if answer is not None:
                return answer
        if func is not torch.ops.aten.lift_fresh.default:
            args, kwargs = self._faked(args), self._faked(kwargs)
        name = func.__name__.partition(".")[0]
        if not self._preparing:
            self._record(func, name, args, kwargs)
        out = _execute(func, args, kwargs)
        self.values.execute(func, args, kwargs, out)
        birth = -1 if self._preparing else len(self._instants) - 1
        fresh = [
            t
            for t in flat_tensors(out)
            if t is not None and t.untyped_storage()._cdata not in self._alive
        ]
        for number, tensor in enumerate(fresh):
            base = name if self._preparing else self._instants[-1].name
            label = f"{base}.{number}" if number else base
            size = tensor.untyped_storage().nbytes()
            self._follow(tensor, _Storage(label, Role.TEMPORARY, size, birth))
        if not self._preparing and not self.cuda and _may_save_number(func, args):
            results = tuple(t for t in flat_tensors(out) if t is not None)
            self._unsettled = results, birth
        return out

    def _settle(self) -> None:
        """Follow the numbers that autograd has saved for the last op, now that its node exists."""
        results, birth = self._unsettled
        self._unsettled = (), -1
        for number in _saved_numbers(results):
            name = f"{self._instants[birth].name}.number"
            size = number.untyped_storage().nbytes()
            self._follow(number, _Storage(name, Role.TEMPORARY, size, birth))

    def _record(self, func: Any, name: str, args: Any, kwargs: Mapping[str, Any]) -> None:
        self.phase = self.find_phase(self.phase)
        number = self._counts[name]
        self._counts[name] += 1
        self._instants.append(
            Instant(
                name=f"{name}_{number}" if number else name,
                target=str(func),
                phase=self.phase,
                source=_user_line(),
                module=self._paths[-1],
            )
        )
        self._calls.append(described(Call(func, args, kwargs)))

    def _follow(self, tensor: torch.Tensor, storage: _Storage) -> None:
        owner = tensor.untyped_storage()
        key = owner._cdata
        if key in self._alive:
            return
        storage.dtype, storage.shape = tensor.dtype, tuple(tensor.shape)
        self._alive[key] = storage
        self._storages.append(storage)
        weakref.finalize(owner, self._died, key, storage).atexit = False

    def _died(self, key: int, storage: _Storage) -> None:
        if storage.death is None and self._alive.get(key) is storage:
            storage.death = len(self._instants) - 1
            del self._alive[key]
            self.values.forget(key)

    def _role(self, storage: _Storage) -> Role:
        """An activation is a block of the forward that is still held during backward."""
        if storage.role is not Role.TEMPORARY:
            return storage.role
        if storage.birth < 0:
            return Role.INPUT
        if self._instants[storage.birth].phase is not Phase.FORWARD:
            return Role.TEMPORARY
        end = storage.death
        held = end is None or self._instants[end].phase is not Phase.FORWARD
        return Role.ACTIVATION if held else Role.TEMPORARY

    def _answer(self, tensor: torch.Tensor) -> bool | int | float | complex | None:
        """Value of a tensor with one element; None if it is not known."""
        if not isinstance(tensor, FakeTensor):
            return None
        value = self.values.item(tensor)
        # Optimizers ask for step counts only, and no size depends on the answer.
        return LATE_STEP if value is None and self.phase is Phase.OPTIMIZER else value

    def _faked(self, value: Any) -> Any:
        """`value` with fakes for its real tensors, which are resident: constants of the model."""
        if isinstance(value, list | tuple):
            return type(value)(map(self._faked, value))
        if isinstance(value, Mapping):
            return {name: self._faked(item) for name, item in value.items()}
        if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor):
            return value
        if value.requires_grad:
            raise UnsupportedGraphError(
                "The step uses a tensor that requires a gradient and is neither a parameter nor an "
                "argument of the model. Register it as a parameter, or pass it to the model."
            )
        fake = self.mode.from_tensor(value, static_shapes=True)  # its sizes are no symbols
        self._foreign.append(fake)
        self.resident(fake, f"constant_{len(self._foreign)}", Role.BUFFER)
        self.values.know(fake, value)
        return fake

    def _entering(self, path: str) -> Any:
        def enter(module: nn.Module, args: object) -> None:
            self._paths.append(path)

        return enter

    def _leaving(self, module: nn.Module, args: object, output: object) -> None:
        self._paths.pop()


def _may_save_number(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether autograd may save a number among `args` as a tensor on the CPU."""
    tensors = [t for t in leaves(args) if isinstance(t, torch.Tensor)]
    return (
        torch.is_grad_enabled()
        and any(t.requires_grad for t in tensors)
        and all(t.device.type == "cpu" for t in tensors)
        and any(
            isinstance(argument.type, torch.TensorType)
            and isinstance(value, int | float | complex)
            for argument, value in zip(func._schema.arguments, args, strict=False)
        )
        and saved_tensors_hooks(True) is None  # hooks keep something else in its place
    )


def _saved_numbers(results: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """Tensors without a fake that the nodes which made `results` have saved."""
    nodes = {result.grad_fn for result in results if result.grad_fn is not None}
    saved = [getattr(node, name) for node in nodes for name in _saved_names(type(node))]
    return [t for t in saved if isinstance(t, torch.Tensor) and not isinstance(t, FakeTensor)]


@functools.cache
def _saved_names(node: type) -> tuple[str, ...]:
    return tuple(name for name in dir(node) if name.startswith("_saved_"))


def _execute(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Run an op on fakes.

    The fake kernel of `_grouped_mm` takes bfloat16 only; the CPU's takes others. That of
    `constant_pad_nd` asks for sizes as numbers, so its decomposition runs in its place.
    """
    if func is torch.ops.aten.constant_pad_nd.default and _is_symbolic(args[0]):
        return _pad(*args, **kwargs)
    if "generator" in kwargs and func._overloadname == "generator":  # takes no symbols
        kwargs = {name: value for name, value in kwargs.items() if name != "generator"}
        return func.overloadpacket.default(*args, **kwargs)
    if func is not torch.ops.aten._grouped_mm.default or args[0].dtype == torch.bfloat16:
        return func(*args, **kwargs)
    narrow = [a.to(torch.bfloat16) if _is_floating(a) else a for a in args]
    return func(*narrow, **kwargs).to(args[0].dtype)


def _pad(input: torch.Tensor, pad: Any, value: float = 0) -> torch.Tensor:
    """`constant_pad_nd`: one new tensor, filled and then written to."""
    before, after = pad[::2][::-1], pad[1::2][::-1]
    kept = input.dim() - len(before)
    grown = [n + a + b for n, a, b in zip(input.shape[kept:], before, after, strict=True)]
    return torch.full((*input.shape[:kept], *grown), value, dtype=input.dtype, device=input.device)


def _is_symbolic(tensor: torch.Tensor) -> bool:
    return any(isinstance(size, torch.SymInt) for size in tensor.shape)


def _is_floating(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _user_line() -> str:
    """Innermost source line outside torch; empty below this library's own frames."""
    frame = sys._getframe(3)
    while frame is not None:
        filename = frame.f_code.co_filename
        if filename.startswith(_OURS):
            return ""
        if not filename.startswith((_TORCH, _KERNELS, "<")):
            return f"{Path(filename).name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""
