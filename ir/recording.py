"""What a training step computes, recorded by one run of it on fakes: enough to know it again.

A captured step is known by its graph, and to capture takes seconds. To run forward and backward on fake
tensors once takes a fraction. The *recording* of a step is the text of all that determines what would be
captured:
    (1) every op of forward and backward that reaches the dispatcher below autograd, in order: its arguments,
        and which earlier tensors they are; sizes, strides, types and devices of its results; whether
        gradients were on, and whether tensors that autograd saves were given to hooks;
    (2) the autograd graph of the outputs that receive a gradient: its nodes in the order in which they
        were made, and their edges; and which tensor is the gradient of which input;
    (3) names, classes and tensors of all modules, which tensors share memory, and the source files of
        the classes;
    (4) the content of constants that the forward makes (they are part of a graph), and what is on or off
        in torch that kernels depend on.
The ops are found by running them, so settings, branches, hooks, custom functions and patched code need no
watching.

None, so that the step has to be captured, if it does not run on fakes, or reads a tensor with data that it
has not made itself: that may be another one at the next call.
"""

import hashlib
import inspect
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ._torch import (
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    compiling_state,
    saved_tensors_hooks,
)
from .autocast import autocast_dtypes
from .checkpoints import run_once
from .fake import fake_tensors
from .functional import FakeState, Functional, fake_state, named_tensors, untouched
from .lazy_hooks import install_lazy_hooks
from .refusals import refuse_hidden_tensors, refuse_module
from .structure import put_tensors, take_tensors

LARGE = 2**20
"""Elements of a constant, from which on a step is not recorded."""
_DEVICE = torch.ops.prim.device.default
_MADE = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)
"""Ops that take a tensor that has just been made of numbers."""


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
    functional = Functional(module, forward, state, pattern, gradient_outputs)
    record = _Record()
    inputs = [*state.parameters, *state.buffers, *arguments]
    record.lines += [f"{record.new(tensor)} {tensor.requires_grad}" for tensor in inputs]
    with run_once() as checkpoints, compiling_state(), torch.enable_grad(), mode, record:
        outputs = functional(*arguments)
        assert functional.output is not None
        output_pattern, *which = functional.output
        record.lines.append(f"outputs {record.token(outputs)} {which}")
        if loss_fn is not None:
            outputs = [loss_fn(put_tensors(output_pattern, outputs))]
        outputs = [tensor for tensor in outputs if tensor.requires_grad]
        record.lines += _autograd_graph(outputs, inputs)
        sources = [tensor for tensor in inputs if tensor.requires_grad]
        ones = [torch.ones_like(tensor) for tensor in outputs]
        gradients = torch.autograd.grad(outputs, sources, ones, allow_unused=True)
        record.lines.append(f"gradients {record.token(gradients)} {bool(checkpoints)}")
    refuse_hidden_tensors(output_pattern, "output")
    parameters, buffers = named_tensors(module)
    real = [*parameters.values(), *buffers.values(), *tensors]
    lines = [*_of_torch(real), _shared(real), *_of_modules(module, forward, state), *record.lines]
    lines += map(_content, record.constants)
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
        if func in _MADE and not isinstance(args[0], FakeTensor):
            self.constants.append(args[0])
            self.new(args[0])
        before = f"{func} {self.token(args)} {self.token(kwargs or {})}"
        made = func(*args, **(kwargs or {}))
        on = torch.is_grad_enabled(), saved_tensors_hooks(True) is not None
        self.lines.append(f"{before} {self.token(made)} {on}")
        return made

    def new(self, tensor: torch.Tensor) -> str:
        """Number a tensor, and describe it."""
        self._numbers[id(tensor)] = len(self._kept)
        self._kept.append(tensor)
        device = tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device
        shape, stride = tuple(tensor.shape), tensor.stride()
        return f"%{len(self._kept)}:{tensor.dtype}{shape}{stride}{device}"

    def token(self, value: object) -> str:
        """The text of an argument or a result."""
        if isinstance(value, torch.Tensor):
            known = self._numbers.get(id(value))
            if known is None and not isinstance(value, FakeTensor):
                raise _UnrecordedError
            return self.new(value) if known is None else f"%{known}"
        if isinstance(value, list | tuple):
            return f"[{', '.join(map(self.token, value))}]"
        if isinstance(value, dict):
            return f"{{{', '.join(f'{k!r}: {self.token(v)}' for k, v in value.items())}}}"
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


def _nodes_behind(outputs: Sequence[torch.Tensor]) -> list[Any]:
    """Nodes of autograd."""
    found: dict[int, Any] = {}
    waiting: list[Any] = [torch.autograd.graph.get_gradient_edge(t).node for t in outputs]
    while waiting:
        node = waiting.pop()
        if id(node) not in found:
            found[id(node)] = node
            waiting += [following for following, _ in node.next_functions if following is not None]
    return list(found.values())


def _autograd_graph(outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> list[str]:
    """The nodes behind the outputs, in the order in which they were made, with their edges."""
    leaf = {id(tensor): i for i, tensor in enumerate(inputs)}
    nodes = _nodes_behind(outputs)
    made = [node for node in nodes if not hasattr(node, "variable")]
    made.sort(key=lambda node: node._sequence_nr())
    names = {id(node): str(i) for i, node in enumerate(made)}
    for node in nodes:
        if hasattr(node, "variable"):
            names[id(node)] = f"input {leaf[id(node.variable)]}"
    lines = [
        f"{node.name()} {[(names.get(id(to), ''), number) for to, number in node.next_functions]}"
        for node in made
    ]
    edges = [torch.autograd.graph.get_gradient_edge(tensor) for tensor in outputs]
    return [*lines, f"from {[(names[id(edge.node)], edge.output_nr) for edge in edges]}"]


def _of_torch(tensors: Sequence[torch.Tensor]) -> list[str]:
    """What is on or off in torch and decides which kernels run, and what they take."""
    backends, matmul = torch.backends, torch.backends.cuda.matmul
    devices = dict.fromkeys(tensor.device for tensor in tensors if tensor.is_cuda)
    flags = (
        torch.__version__,
        platform.python_version(),
        backends.cpu.get_cpu_capability(),
        torch.get_num_threads(),
        [_of_gpu(device) for device in devices],
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        (backends.cudnn.enabled, backends.cudnn.benchmark, backends.cudnn.deterministic),
        (backends.cudnn.allow_tf32, matmul.allow_tf32, backends.mkldnn.enabled),
        (
            matmul.allow_fp16_reduced_precision_reduction,
            matmul.allow_bf16_reduced_precision_reduction,
        ),
        autocast_dtypes(),
        torch.is_autocast_cache_enabled(),
        [(k, v) for k, v in sorted(os.environ.items()) if k.startswith(_SETTINGS)],
    )
    return [repr(flags)]


def _of_gpu(device: torch.device) -> object:
    found = torch.cuda.get_device_properties(device)
    return found.name, found.major, found.minor, found.total_memory, found.multi_processor_count


def _shared(tensors: Sequence[torch.Tensor]) -> str:
    """Which tensors share memory, and from where on in it."""
    first: dict[int, int] = {}
    places = [
        (first.setdefault(tensor.untyped_storage()._cdata, i), int(tensor.storage_offset()))
        for i, tensor in enumerate(tensors)
    ]
    return f"shared {places}"


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
