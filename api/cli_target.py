"""What the command line names: a model, one training call of it, and how it trains.

A model is ``module:factory`` (see `doctor`; modules are looked for in the current folder first), or the
configuration of a `transformers` model: a config.json, a folder with one, or a name that is in the local
cache. A model for a GPU is built without data (on fake tensors), so one of any size can be described, and the
GPU need not be at hand; so is one of which ``--fake`` says so.
"""

import argparse
import contextlib
import inspect
import os
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from remat.ir import RematError

if TYPE_CHECKING:
    import torch

    from .doctor import Example

TYPES = {
    "fp32": "float32",
    "f32": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "f16": "float16",
    "long": "int64",
    "int": "int64",
    "float": "float32",
}
"""Short names of types."""


MODEL = (
    "MODEL is module:factory, a function without arguments that returns a model, (model, args), (model, "
    "args, kwargs) or (model, args, kwargs, loss_fn), looked for in the current folder first; or the "
    "config.json of a transformers model, its folder, or its name in the local cache. For a GPU "
    "the model is built without data, so it may be of any size, and the GPU need not be here."
)


class UsageError(ValueError):
    """The command line cannot be meant; exit status 2."""


def add_command(
    commands: Any, name: str, help: str, description: str, examples: Sequence[str]
) -> argparse.ArgumentParser:
    """Add a command whose help teaches by example."""
    lines = "\n".join(f"  remat {example}" for example in examples)
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=help,
        description=textwrap.fill(description, width=min(width(), 100)),
        epilog=f"examples:\n{lines}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    return parser


def width() -> int:
    """Columns of the terminal; 100 without one."""
    return shutil.get_terminal_size((100, 24)).columns


def is_ours(error: Exception) -> bool:
    """We have raised it, not the user's code, nor torch."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    package = os.path.dirname(os.path.abspath(__file__))
    return trace is not None and trace.tb_frame.f_code.co_filename.startswith(package)


@contextlib.contextmanager
def explaining() -> Iterator[None]:
    """What the user's model raises inside is explained, with its line."""
    try:
        yield
    except Exception as error:
        if isinstance(error, RematError) or is_ours(error):
            raise
        from remat.ir.capture import explained

        raise explained(error) from error


def add_target(parser: argparse.ArgumentParser) -> None:
    """Add what names a model and its training call."""
    parser.add_argument("target", metavar="MODEL", help="module:factory, or a transformers config")
    parser.add_argument(
        "--input",
        action="append",
        default=[],
        metavar="NAME=SHAPE:DTYPE",
        help="an argument of forward, such as input_ids=4x256:int64; repeatable",
    )
    parser.add_argument(
        "--dynamic",
        action="append",
        default=[],
        metavar="NAME=DIM,DIM",
        help="names for an input's sizes, such as input_ids=batch,seq (_ leaves one out); repeatable",
    )
    parser.add_argument("--device", metavar="NAME", help="such as cpu or cuda:A100-80GB")
    parser.add_argument(
        "--precision", choices=("fp32", "bf16", "fp16"), help="type of parameters and inputs"
    )
    parser.add_argument(
        "--fake",
        action="store_true",
        help="build the model without data (always for an absent GPU)",
    )
    parser.add_argument(
        "--optimizer", default="AdamW", metavar="NAME", help='default AdamW; "none"'
    )
    parser.add_argument(
        "--hold-outputs",
        action="store_true",
        help="the loop keeps the output to the end of the step",
    )
    parser.add_argument("--accumulation-steps", type=int, default=1, metavar="N", help="default 1")
    parser.add_argument("--json", action="store_true", help="print JSON, and nothing else")


def example_of(arguments: argparse.Namespace) -> "Example":
    """The model and the training call that are named.

    Raises:
        UsageError: they cannot be read.
    """
    inputs = [_input(text) for text in arguments.input]
    if arguments.accumulation_steps < 1:
        raise UsageError("--accumulation-steps must be at least 1")
    import torch

    with _building(arguments):
        example = _model(arguments.target)
        given = {name: torch.zeros(shape, dtype=dtype) for name, shape, dtype in inputs}
        if given:
            example = replace(example, kwargs={**(example.kwargs or {}), **given})
        if arguments.precision:
            example = _cast(example, getattr(torch, TYPES[arguments.precision]))
    example.model.train()
    if not example.has_call:
        names = list(inspect.signature(example.model.forward).parameters)
        raise UsageError(
            f"{arguments.target} gives no example arguments: name them, such as --input "
            f"{names[0] if names else 'x'}=1x512:int64. Its forward takes {', '.join(names[:8])}."
        )
    _check_names(example, [name for name, _, _ in inputs])
    return example


def _check_names(example: "Example", names: Sequence[str]) -> None:
    """Refuse inputs that forward does not take."""
    parameters = inspect.signature(example.model.forward).parameters
    more = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for name in names:
        if name not in parameters and not more:
            raise UsageError(f"--input {name}: forward takes {', '.join(parameters)}")


def _building(arguments: argparse.Namespace) -> AbstractContextManager[object]:
    """Where the model is built: on fake tensors if it is to be described for a GPU."""
    from remat.ir._torch import FakeTensorMode

    fake = arguments.fake or (arguments.device or "").startswith("cuda")
    return FakeTensorMode() if fake else contextlib.nullcontext()


def optimizer_of(arguments: argparse.Namespace) -> str | None:
    """Name of the optimizer; None for none."""
    name: str = arguments.optimizer
    return None if name.lower() == "none" else name


def dynamic_of(arguments: argparse.Namespace) -> dict[str, dict[int, str]] | None:
    """Names of sizes, by argument and dimension; None if none is given.

    Raises:
        UsageError: they cannot be read.
    """
    found: dict[str, dict[int, str]] = {}
    for text in arguments.dynamic:
        argument, equals, names = text.partition("=")
        dims = [name.strip() for name in names.split(",")]
        if not (argument and equals) or not all(name.isidentifier() or not name for name in dims):
            raise UsageError(f"--dynamic {text}: it should be like input_ids=batch,seq")
        found[argument] = {i: name for i, name in enumerate(dims) if name not in ("", "_")}
    return found or None


def _input(text: str) -> "tuple[str, list[int], torch.dtype]":
    name, equals, rest = text.partition("=")
    shape, _, kind = rest.partition(":")
    dims = shape.lower().split("x") if shape else []
    if not equals or not name.isidentifier():
        raise UsageError(f"--input {text}: it should be like input_ids=4x256:int64")
    if not all(dim.isdigit() and int(dim) for dim in dims):
        raise UsageError(
            f"--input {text}: {shape!r} is no shape; write 4x256, or nothing for a scalar"
        )
    import torch

    dtype = getattr(torch, TYPES.get(kind, kind or "float32"), None)
    if not isinstance(dtype, torch.dtype):
        raise UsageError(f"--input {text}: {kind!r} is no type; write int64, float32, bf16, bool")
    return name, [int(dim) for dim in dims], dtype


def _model(target: str) -> "Example":
    from .doctor import Example, made

    if os.path.exists(target) or ":" not in target:
        return Example(_transformers_model(target))
    try:
        return made(target)
    except ValueError as error:
        raise UsageError(str(error)) from error


def _transformers_model(target: str) -> Any:
    """The model that a configuration describes, with random parameters."""
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise UsageError(
            f"{target} is not module:factory, and configurations need transformers"
        ) from error
    try:
        config = transformers.AutoConfig.from_pretrained(target, local_files_only=True)
    except (OSError, ValueError) as error:
        meant = f"; {target}:factory?" if os.path.exists(f"{target}.py") else ""
        raise UsageError(
            f"{target} is neither module:factory nor a configuration that is here{meant}"
        ) from error
    kind = next((n for n in config.architectures or () if hasattr(transformers, n)), "")
    if kind:
        return getattr(transformers, kind)._from_config(config)
    return transformers.AutoModelForCausalLM.from_config(config)


def _cast(example: "Example", dtype: "torch.dtype") -> "Example":
    """The example with floating-point parameters, buffers and inputs of one type.

    `Module.to` cannot change fake parameters in place; tied ones stay tied.
    """
    from torch import Tensor, nn

    made: dict[int, Tensor] = {}

    def cast(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        if id(value) not in made:
            new = value.detach().to(dtype)
            parameter = isinstance(value, nn.Parameter)
            made[id(value)] = nn.Parameter(new, value.requires_grad) if parameter else new
        return made[id(value)]

    for module in example.model.modules():
        for table in (module._parameters, module._buffers):
            table.update({name: cast(tensor) for name, tensor in table.items()})
    return replace(
        example,
        args=tuple(map(cast, example.args)),
        kwargs={name: cast(value) for name, value in (example.kwargs or {}).items()},
    )
