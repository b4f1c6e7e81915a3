"""What a captured graph must not contain, because a planned step would be wrong without a word.

Each function raises `UnsupportedGraphError`, which says what to do instead.

Not found: a hidden trainable tensor that only a custom `torch.autograd.Function` reads.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_leaves

from .errors import UnsupportedGraphError
from .fake import is_fake
from .structure import held_tensor

if TYPE_CHECKING:
    from .capture import Capture


def refuse_hidden_tensors(pattern: object, where: str) -> None:
    """Refuse tensors that `take_tensors` has not found.

    Args:
        pattern: what it gave.
        where: "output" or "arguments".
    """
    holder = held_tensor(pattern, traced=where == "output")
    if holder:
        raise UnsupportedGraphError(
            f"a plan cannot put another tensor into a {holder}, which the {where} of the model has. "
            "Use a plain tuple, list, dict or dataclass without slots, or register the class with "
            "torch.utils._pytree.register_pytree_node."
        )


def refuse_hidden_leaves(arguments: object, result: object, line: str) -> None:
    """Refuse a torch call that needs the gradient of a tensor that is no input of the graph.

    Args:
        arguments: of the call, while the model is traced; traced tensors are of torch's subclasses.
        result: of the call.
        line: the user's.
    """
    hidden = [
        leaf
        for leaf in tree_leaves(arguments)
        if type(leaf) in (torch.Tensor, torch.nn.Parameter) and leaf.requires_grad
    ]
    if not hidden:
        return
    outcome = arguments if result is None else result  # `x[i] = w` returns nothing
    if any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in tree_leaves(outcome)):
        raise UnsupportedGraphError(
            f"the forward trains a tensor of shape {list(hidden[0].shape)} that is neither a parameter "
            f"nor an argument ({line}), so a plan would give it no gradient. Register it: "
            "nn.Parameter, nn.ParameterList, nn.ModuleList."
        )


def refuse_shared_updates(
    updated: Sequence[int], names: Sequence[str], tensors: Sequence[torch.Tensor]
) -> None:
    """Refuse a step that updates an input whose memory is another input's too.

    Args:
        updated: indices of the inputs that the step updates.
        names: of the parameters, buffers and tensor arguments.
        tensors: the user's own; those without data share nothing.
    """
    spans = [_span(tensor) for tensor in tensors]
    for i in updated:
        for j, (start, end) in enumerate(spans):
            same_device = tensors[i].device == tensors[j].device
            if j != i and same_device and start < spans[i][1] and spans[i][0] < end:
                raise UnsupportedGraphError(
                    f"the forward updates {names[i]} in place, which shares memory with {names[j]}; "
                    "the graph holds them for two tensors. Give one of them its own memory (clone)."
                )


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Addresses of the first byte, and after the last; nothing if there is no data."""
    fake = tensor.is_meta or isinstance(tensor.data, torch._subclasses.FakeTensor)
    if fake or tensor.numel() == 0 or tensor.layout is not torch.strided:
        return 0, 0
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in sizes)
    start = tensor.data_ptr()
    return start, start + (last + 1) * tensor.element_size()


def refuse_returned_inputs(
    joint: fx.GraphModule, names: Sequence[str], trained: Sequence[bool], results: Any
) -> None:
    """Refuse results that are memory of an input that requires a gradient.

    Args:
        joint: the joint graph.
        names: of the parameters, buffers and tensor arguments.
        trained: whether each of them requires a gradient.
        results: fake tensors of the module's output.
    """
    placeholders = [node for node in joint.graph.nodes if node.op == "placeholder"]
    owners = {
        node.meta["val"].untyped_storage()._cdata: name
        for node, name, train in zip(placeholders, names, trained, strict=False)
        if train
    }
    for index, result in enumerate(results):
        owner = owners.get(result.untyped_storage()._cdata)
        if owner is not None:
            raise UnsupportedGraphError(
                f"result {index} of the model is {owner} itself, or a view of it, which requires a "
                "gradient; a plan would return another tensor. Return a copy (clone), or read it from "
                "the model."
            )


def refuse_module(module: nn.Module) -> None:
    """Refuse modules whose capture is known to be wrong or impossible."""
    for name, child in module.named_modules():
        if isinstance(child, nn.RNNBase):
            raise UnsupportedGraphError(
                f"{name or 'the model'} is an nn.{type(child).__name__}. torch loses the dropout between "
                "its layers when it captures recurrent layers, so a plan would train another model. "
                "Leave the model as it is, or optimise its other parts one by one."
            )
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if type(tensor) not in (nn.Parameter, torch.Tensor) and not is_fake(tensor):
            raise UnsupportedGraphError(
                f"{name} is a {type(tensor).__name__}, a tensor subclass; plans hold plain tensors only. "
                "Call optimize_checkpoints before sharding or quantising the model."
            )


def refuse_unknown_sizes(joint: fx.GraphModule) -> None:
    """Refuse tensors whose size depends on data."""
    for node in joint.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and any(
            isinstance(n, torch.SymInt) and n.node.hint is None for n in value.shape
        ):
            raise UnsupportedGraphError(
                f"the size of {node.name} depends on data ({list(value.shape)}), so its memory is not "
                "known beforehand. Leave that part of the model out of the plan."
            )


def refuse_late_updates(captured: "Capture") -> None:
    """Refuse what backward changes in place: an input that it updates is no output of the graph."""
    inputs = [node for node in captured.joint.graph.nodes if node.op == "placeholder"]
    names = [*captured.parameters, *captured.buffers]
    names += [f"tensor argument {i}" for i in range(captured.arguments)]
    for node, name in zip(inputs, names, strict=False):
        for user in node.users:
            target = user.target
            if isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable:
                raise UnsupportedGraphError(
                    f"backward changes {name} in place ({target}), which a planned step would not do at "
                    "the same time. Change it in forward, or in a hook."
                )


def refuse_repeated_casts(captured: "Capture", trained: list[bool]) -> None:
    """Refuse parameters that autocast casts more than once.

    Eager caches the first cast, so gradients are summed before they are cast back; the trace has no
    cache, sums them after, and rounds differently.
    """
    if not torch.is_autocast_cache_enabled():
        return
    inputs = [node for node in captured.joint.graph.nodes if node.op == "placeholder"]
    for node, name, train in zip(inputs, captured.parameters, trained, strict=False):
        casts = [
            user
            for user in node.users
            if user.target is torch.ops.aten._to_copy.default
            and user.meta["val"].dtype in (torch.bfloat16, torch.float16)
            and user.meta.get("partitioner_tag") not in ("is_backward", "must_be_in_backward")
        ]
        if len(casts) > 1 and train:
            raise UnsupportedGraphError(
                f"autocast casts {name} {len(casts)} times. Eager keeps the first cast and sums the "
                "gradients before it casts them back, which a plan does not. Use "
                "torch.autocast(..., cache_enabled=False), with or without remat."
            )
