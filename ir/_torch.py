"""Every private torch name that the library uses, in one place.

Tested on torch 2.13. They exist from 2.11 to 2.14, as far as their sources tell.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C import _current_graph_task_id as graph_task_id  # -1 outside a backward
from torch._C import _DisableAutocast as DisableAutocast
from torch._C import _dispatch_get_registrations_for_dispatch_key as ops_with_kernel
from torch._C._autograd import _get_current_graph_task_keep_graph as keeps_graph
from torch._C._autograd import _profiler_enabled as profiler_enabled
from torch._C._autograd import (
    _top_saved_tensors_default_hooks as saved_tensors_hooks,  # hooks in force, or None
)
from torch._C._dynamo.guards import TensorGuards, dict_version
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.comptime import comptime  # runs a function while Dynamo captures its caller
from torch._dynamo.eval_frame import innermost_backend
from torch._dynamo.source import ConstantSource
from torch._export.utils import _compiling_state_context as compiling_state
from torch._functorch import config as functorch_config
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._guards import TracingContext, tracing
from torch._inductor import config as inductor_config
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.autograd import Variable
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)
from torch.fx.graph import _BoxedCodeGen as BoxedCodeGen
from torch.library import _scoped_library as scoped_library
from torch.nn.utils.stateless import _reparametrize_module as reparametrize
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode


def inductor_parts() -> tuple[Any, Any]:
    """Inductor's compiler of one graph, and its decompositions. Importing them is slow, and warns."""
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        from torch._inductor.compile_fx import compile_fx_inner
        from torch._inductor.decomposition import select_decomp_table

    return compile_fx_inner, select_decomp_table()


queue_callback = Variable._execution_engine.queue_callback

__all__ = [
    "BoxedCodeGen",
    "ConstantSource",
    "DataDependentOutputException",
    "DimDynamic",
    "DisableAutocast",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "ShapeEnv",
    "StatelessSymbolicContext",
    "TorchDispatchMode",
    "TracingContext",
    "aot_export_joint_with_descriptors",
    "compiling_state",
    "comptime",
    "dict_version",
    "enable_python_dispatcher",
    "functorch_config",
    "graph_task_id",
    "in_transform",
    "inductor_config",
    "inductor_parts",
    "innermost_backend",
    "keeps_graph",
    "no_dispatch",
    "ops_with_kernel",
    "profiler_enabled",
    "queue_callback",
    "reparametrize",
    "saved_tensors_hooks",
    "scoped_library",
    "tensor_check",
    "tracing",
]


def in_transform() -> bool:
    """Whether a transform of torch.func (grad, vmap, ...) is going on."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def tensor_check(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """A check in C++ that other tensors are like these.

    It compares class, dispatch keys (autocast, modes), type, device, need of a gradient, sizes and strides.
    """
    sizes: Any = [list(tensor.shape) for tensor in tensors]  # torch's stub has lists of numbers
    strides: Any = [list(tensor.stride()) for tensor in tensors]
    return TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
