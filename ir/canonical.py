"""Canonical form of a joint graph, which lifting and rewriting rely on.

(1) No `detach`: it is an alias that changes nothing in a functional graph.
(2) No mutated input is read by backward: what backward needs of its old value is cloned in forward.
The update happens between the two, so a saved reference would show the new value.
(3) Every gradient owns its storage and has the layout that autograd wants for its parameter, so that
autograd takes it instead of copying it. Where eager would copy, the copy is an op of the graph.
(4) `getitem` follows directly upon the op that yields the tuple.
(5) No op without a use, except random ones: they advance the user's random stream.
(6) Sizes that are symbols are computed before the first op; see `sizes`.
"""

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ._torch import FakeTensor
from .sizes import hoist_sizes

Node = fx.Node
_ALIASES = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


def canonicalize(
    joint: fx.GraphModule, mutated: Sequence[Node], gradients: Sequence[tuple[int, Node]]
) -> None:
    """Bring `joint` into canonical form, in place.

    Args:
        joint: a joint graph with fake values in ``meta["val"]``.
        mutated: placeholders that the step updates.
        gradients: position among the outputs of each gradient, and the placeholder it belongs to.
    """
    for node in list(joint.graph.nodes):
        if node.target in _ALIASES:
            node.replace_all_uses_with(node.args[0])
            joint.graph.erase_node(node)
    _own_gradients(joint, gradients)
    for placeholder in mutated:
        _clone_for_backward(joint.graph, placeholder)
    _raise_getitems(joint.graph)
    hoist_sizes(joint)
    joint.graph.eliminate_dead_code(is_impure_node=_must_stay)
    joint.graph.lint()


def is_backward(node: Node) -> bool:
    """The node belongs to the backward part of the joint graph."""
    return node.meta.get("partitioner_tag") in ("is_backward", "must_be_in_backward")


def is_random(node: Node) -> bool:
    """The node draws from a random generator (an attention op without dropout does not)."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    if torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    arguments = {
        argument.name: node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
        for i, argument in enumerate(target._schema.arguments)
    }
    if arguments.get("train", True) is False or arguments.get("training", True) is False:
        return False
    return arguments.get("dropout_p", 1.0) not in (0, 0.0, None)


def _must_stay(node: Node) -> bool:
    return node.op in ("placeholder", "output") or is_random(node) or node.is_impure()


def dense_clone(tensor: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    """A copy with the given strides; what autograd makes of a gradient in another layout."""
    return torch.empty_strided(
        tensor.size(), stride, dtype=tensor.dtype, device=tensor.device
    ).copy_(tensor)


def _own_gradients(joint: fx.GraphModule, gradients: Sequence[tuple[int, Node]]) -> None:
    """Clone gradients that autograd would copy: wrong layout, or a storage that something else owns."""
    output = joint.graph.output_node()
    taken = {_storage(n) for n in joint.graph.nodes if n.op == "placeholder"}
    outputs: Any = output.args[0]
    results = list(outputs)
    for position, target in gradients:
        node = results[position]
        value, want = node.meta["val"], target.meta["val"]
        fits = value.stride() == want.stride() or value.numel() == 0
        if fits and _storage(node) not in taken:
            taken.add(_storage(node))
            continue
        with joint.graph.inserting_after(node):
            clone = joint.graph.call_function(dense_clone, (node, tuple(want.stride())))
        clone.meta = {k: v for k, v in node.meta.items() if k in ("custom", "partitioner_tag")}
        with value.fake_mode if isinstance(value, FakeTensor) else torch.no_grad():
            clone.meta["val"] = dense_clone(value, want.stride())
        results[position] = clone
    output.args = (tuple(results),)


def _storage(node: Node) -> int:
    value = node.meta.get("val")
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else id(node)


def _clone_for_backward(graph: fx.Graph, placeholder: Node) -> None:
    """Let backward read clones of `placeholder` and of its views, made in forward."""
    aliases = [
        node
        for node in graph.nodes
        if not is_backward(node)
        and node.op != "output"
        and _storage(node) == _storage(placeholder)
    ]
    for alias in aliases:
        readers = [user for user in alias.users if is_backward(user)]
        if not readers:
            continue
        after = alias if alias.op != "placeholder" else _last_placeholder(graph)
        with graph.inserting_after(after):
            clone = graph.call_function(torch.ops.aten.clone.default, (alias,))
        value = alias.meta["val"]
        with value.fake_mode:
            clone.meta["val"] = value.clone()
        clone.meta["partitioner_tag"] = "is_forward"
        alias.replace_all_uses_with(clone, delete_user_cb=lambda user: is_backward(user))


def _last_placeholder(graph: fx.Graph) -> Node:
    placeholders: list[Node] = [node for node in graph.nodes if node.op == "placeholder"]
    return placeholders[-1]


def _raise_getitems(graph: fx.Graph) -> None:
    for node in list(graph.nodes):
        if node.target is operator.getitem:
            source = node.args[0]
            last = source
            while last.next.target is operator.getitem and last.next.args[0] is source:
                last = last.next
            if node is not last:
                last.append(node)
