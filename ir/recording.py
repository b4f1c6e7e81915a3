"""What a training step computes, recorded by one run of its forward on fakes: enough to know it again.

A captured step is known by its graph. To capture takes seconds; to run the forward on fake tensors once
takes tenths of one. The *recording* of a step is the text of all that determines what would be captured:
    (1) every op that reaches the dispatcher below autograd, in order: its arguments, and which earlier
        tensors they are; sizes, strides, types and devices of its results; whether gradients were on;
    (2) the autograd graph of the outputs that receive a gradient: its nodes in the order in which they
        were made, and their edges. With (1) it determines every op of backward, whose formulas are torch's;
        If part of backward is Python's (a custom `autograd.Function`, a hook on a tensor), backward runs
        on fakes, too, and its ops are recorded;
    (3) names, classes and tensors of all modules, and the source files of these classes;
    (4) the content of tensors that are no input (constants are part of a graph), and what is on or off in
        torch that kernels depend on.
The ops of a forward are found by running it, so settings, branches and patched functions need no watching.

None, so that the step has to be captured, if it does not run on fakes, or a tensor that is no input is large.

Not noticed: a hook on a node of autograd (`grad_fn.register_hook`) that is there in one process only, and
is not put there by a file of (3).
"""

import contextlib
import hashlib
import inspect
import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction

from ._torch import (
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    compiling_state,
)
from .checkpoints import run_once
from .fake import fake_tensors
from .functional import FakeState, Functional, fake_state, untouched
from .lazy_hooks import install_lazy_hooks
from .refusals import refuse_hidden_tensors, refuse_module
from .structure import put_tensors, take_tensors

LARGE = 2**20
"""Elements of a tensor that is no input, from which on a step is not recorded."""


_DEVICE = torch.ops.prim.device.default


class _UnrecordedError(Exception):
    """Something that a recording does not determine."""


@dataclass(frozen=True, slots=True)
class Recording:
    """A step that was recorded."""

    digest: str
    """Equal for two steps if they would be captured alike."""
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    output_pattern: object
    checkpointed: bool
    """The model checkpoints parts of itself."""


def record_step(
    module: nn.Module,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    gradient_outputs: str | tuple[int, ...] = "auto",
    loss_fn: Callable[[Any], torch.Tensor] | None = None,
) -> Recording | None:
    """Record a step; None if that does not determine it.

    Model, buffers and random states are left as they were.

    Args:
        module: see `capture.capture`, likewise the others.
        forward: what to run.
        args: positional arguments.
        kwargs: keyword arguments.
        gradient_outputs: see `functional.choose_gradient_outputs`.
        loss_fn: output to a scalar, if the loss is outside the module.
    """
    try:
        refuse_module(module)
        install_lazy_hooks(module)
        with untouched(module):
            return _recorded(module, forward, (args, dict(kwargs)), gradient_outputs, loss_fn)
    except Exception:  # the capture that follows says what it is
        return None


def _recorded(
    module: nn.Module,
    forward: Callable[..., Any],
    call: tuple[tuple[Any, ...], dict[str, Any]],
    gradient_outputs: str | tuple[int, ...],
    loss_fn: Callable[[Any], torch.Tensor] | None,
) -> Recording:
    tensors, pattern = take_tensors(call)
    refuse_hidden_tensors(pattern, "arguments")
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    state = fake_state(module, mode)
    arguments, _ = fake_tensors(mode, tensors, [""] * len(tensors))
    functional = Functional(module, forward, state, pattern)
    functional.gradient_outputs = gradient_outputs
    record = _Record()
    inputs = [*state.parameters, *state.buffers, *arguments]
    record.lines += [f"{record.new(tensor)} {tensor.requires_grad}" for tensor in inputs]
    with (
        run_once() as checkpoints,
        compiling_state(),
        torch.enable_grad(),
        _noted_hooks() as hooks,
        mode,
        record,
    ):
        outputs = functional(*arguments)
        assert functional.output is not None
        output_pattern, *which = functional.output
        record.lines.append(f"outputs {[record.token(tensor) for tensor in outputs]} {which}")
        if loss_fn is not None:
            outputs = [loss_fn(put_tensors(output_pattern, outputs))]
        outputs = [tensor for tensor in outputs if tensor.requires_grad]
        nodes = _nodes_behind(outputs)
        if hooks or any(isinstance(node, BackwardCFunction) for node in nodes.values()):
            sources = [tensor for tensor in inputs if tensor.requires_grad]
            ones = [torch.ones_like(tensor) for tensor in outputs]
            torch.autograd.grad(outputs, sources, ones, retain_graph=True, allow_unused=True)
    refuse_hidden_tensors(output_pattern, "output")
    record.lines += _autograd_graph(outputs, nodes, inputs)
    lines = [*_of_torch(), *_of_modules(module, forward, state), *record.lines]
    lines += [_content(tensor) for tensor in record.constants]
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    return Recording(
        digest, state.parameter_names, state.buffer_names, output_pattern, bool(checkpoints)
    )


class _Record(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down every op that runs under it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.lines: list[str] = []
        self.constants: list[torch.Tensor] = []
        """Tensors with data that ops have read."""
        self._numbers: dict[int, int] = {}
        self._kept: list[torch.Tensor] = []
        """All tensors, so that no two have one id."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is _DEVICE and isinstance(args[0], FakeTensor):  # most of all, and no op
            return args[0].fake_device
        before = f"{func} {self.token(args)} {self.token(kwargs or {})}"
        made = func(*args, **(kwargs or {}))
        self.lines.append(f"{before} {self.token(made)} {torch.is_grad_enabled()}")
        return made

    def new(self, tensor: torch.Tensor) -> str:
        """Number a tensor, and describe it."""
        self._numbers[id(tensor)] = len(self._kept)
        self._kept.append(tensor)
        if isinstance(tensor, FakeTensor):
            device = tensor.fake_device
        else:
            device = tensor.device
            self.constants.append(tensor)
        shape, stride = tuple(tensor.shape), tensor.stride()
        return f"{len(self._kept)}:{tensor.dtype}{shape}{stride}{device}"

    def token(self, value: object) -> str:
        """The text of an argument or a result."""
        if isinstance(value, torch.Tensor):
            known = self._numbers.get(id(value))
            return self.new(value) if known is None else str(known)
        if isinstance(value, list | tuple):
            return f"[{' '.join(map(self.token, value))}]"
        if isinstance(value, dict):
            return f"{{{' '.join(f'{k}={self.token(v)}' for k, v in value.items())}}}"
        if value is None or isinstance(value, _PLAIN):
            return repr(value)
        raise _UnrecordedError


_PLAIN = (
    bool,
    int,
    float,
    complex,
    str,
    slice,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)


def _nodes_behind(outputs: Sequence[torch.Tensor]) -> dict[int, Any]:
    """Nodes of autograd, by their ids."""
    found: dict[int, Any] = {}
    waiting: list[Any] = [torch.autograd.graph.get_gradient_edge(t).node for t in outputs]
    while waiting:
        node = waiting.pop()
        if id(node) not in found:
            found[id(node)] = node
            waiting += [following for following, _ in node.next_functions if following is not None]
    return found


def _autograd_graph(
    outputs: Sequence[torch.Tensor], nodes: Mapping[int, Any], inputs: Sequence[torch.Tensor]
) -> list[str]:
    """The nodes behind the outputs, in the order in which they were made, with their edges."""
    leaf = {id(tensor): i for i, tensor in enumerate(inputs)}
    made = [node for node in nodes.values() if not hasattr(node, "variable")]
    made.sort(key=lambda node: node._sequence_nr())
    names = {id(node): str(i) for i, node in enumerate(made)}
    for node in nodes.values():
        if hasattr(node, "variable"):
            names[id(node)] = f"input {leaf[id(node.variable)]}"
    lines = [
        f"{node.name()} {[(names.get(id(to), ''), number) for to, number in node.next_functions]}"
        for node in made
    ]
    edges = [torch.autograd.graph.get_gradient_edge(tensor) for tensor in outputs]
    return [*lines, f"from {[(names[id(edge.node)], edge.output_nr) for edge in edges]}"]


@contextlib.contextmanager
def _noted_hooks() -> Iterator[list[object]]:
    """Yields a list that gets every hook that is put on a tensor."""
    hooks: list[object] = []

    def noting(register: Callable[..., Any]) -> Callable[..., Any]:
        def noted(self: torch.Tensor, hook: object, *args: Any, **kwargs: Any) -> Any:
            hooks.append(hook)
            return register(self, hook, *args, **kwargs)

        return noted

    with contextlib.ExitStack() as stack:
        for name in ("register_hook", "register_post_accumulate_grad_hook"):
            patched = noting(getattr(torch.Tensor, name))
            stack.enter_context(mock.patch.object(torch.Tensor, name, patched))
        yield hooks


def _of_torch() -> list[str]:
    """What is on or off in torch and decides which kernels run, and what they take."""
    devices = range(torch.cuda.device_count())
    flags = (
        torch.__version__,
        platform.python_version(),
        torch.backends.cpu.get_cpu_capability(),
        torch.get_num_threads(),
        [str(torch.cuda.get_device_properties(i)) for i in devices],
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        (torch.backends.cudnn.enabled, torch.backends.cudnn.benchmark),
        (torch.backends.cudnn.deterministic, torch.backends.mkldnn.enabled),
        [(torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")],
        torch.is_autocast_cache_enabled(),
        [(k, v) for k, v in sorted(os.environ.items()) if k.startswith(_SETTINGS)],
    )
    return [repr(flags)]


_SETTINGS = ("PYTORCH_", "CUBLAS_", "CUDNN_", "NVIDIA_TF32", "ONEDNN_", "MKL_", "OMP_", "TORCH_")
"""What the names of environment variables begin with that kernels read."""


def _of_modules(module: nn.Module, forward: Callable[..., Any], state: FakeState) -> list[str]:
    """Names, classes and tensors of all modules, and the files that their classes are in."""
    lines = [f"{state.parameter_names} {state.buffer_names} {state.names}"]
    files: dict[str, None] = {}
    for path, child in module.named_modules():
        lines.append(f"{path} {type(child).__module__}.{type(child).__qualname__}")
        for each in type(child).__mro__:
            files.setdefault(_file_of(each), None)
    files.setdefault(_file_of(forward), None)
    return lines + [hashlib.sha256(Path(f).read_bytes()).hexdigest() for f in files if f]


def _file_of(code: Any) -> str:
    """The source file; empty if there is none, or it is torch's, whose version is known."""
    if str(getattr(code, "__module__", "")).startswith("torch."):
        return ""
    try:
        found = inspect.getsourcefile(code) or ""
    except TypeError:  # built in, or written into a prompt
        return ""
    return found if Path(found).is_file() else ""


def _content(tensor: torch.Tensor) -> str:
    if tensor.numel() > LARGE:
        raise _UnrecordedError
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy().tobytes()).hexdigest()
