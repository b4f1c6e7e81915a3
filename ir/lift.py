"""Lift: a joint `torch.fx` graph with fake values to a `Graph`.

Storages are told apart by the identity of the fakes' storages, so every node must carry a fake value
that was computed in this graph: see `propagate`. The border op is put between the last forward node
and the first backward node; it allocates the tangents.

Sizes are sympy expressions where the fakes' sizes are symbols. Symbols are named by the user's names. At a
binding, sizes are numbers. Nodes that compute sizes (see `sizes`) are inputs of the graph without storage.
"""

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from .canonical import dense_clone, is_random
from .errors import UnsupportedGraphError
from .graph import BORDER, LOSS, ROOT_GRADIENT, Graph, Op, Output, OutputKind, Storage, Value
from .in_place import overwritable, overwritten
from .origin import origin_of
from .sizes import is_number
from .symbols import Names, tensor_text
from .trace import Phase, Role, Trace

SELECTS = frozenset(
    "aminmax argmax argmin argsort bucketize cummax cummin kthvalue max median min mode multinomial "
    "nanmedian nonzero searchsorted sort topk _unique _unique2 unique_consecutive unique_dim".split()
)
"""Ops that choose indices from data; never repeated, so that ties cannot fall differently."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What a kernel does with memory that fakes do not show."""

    scratch: sympy.Expr = sympy.S.Zero
    """Bytes held only while it runs."""
    outputs: tuple[int, ...] = ()
    """Bytes of the real storage of each leaf of its result, 0 for None; empty: as the fakes say."""


@dataclass(frozen=True, slots=True)
class Signature:
    """What the inputs and outputs of a joint graph are."""

    inputs: tuple[tuple[str, Role], ...]
    """Name and role of each placeholder; tangents last, with role TANGENT."""
    outputs: tuple[tuple[OutputKind, str], ...]
    """Kind and target of each output."""
    gradient_results: tuple[int, ...]
    """Positions among the outputs of the results that the tangents belong to."""


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss outside the model: what happens between its outputs and their gradients."""

    bytes: int
    """Size of the loss, and of the gradient that its backward starts from."""
    scratch: int
    """Bytes held only in between, at their peak, beyond loss, root gradient, tangents and outputs; an
    upper bound, as if all of these were held throughout."""
    trace: Trace
    """The loss alone, forward and backward; its blocks are those that are held only in between."""
    dropped: tuple[int, ...]
    """Per output of the model: last instant of the trace at which the loss or its caller holds it."""
    tangents: tuple[int, ...]
    """Per tangent: instant at which it is allocated."""
    computed: int
    """Instant at which the loss is allocated."""
    root: int
    """Instant at which the gradient that its backward starts from is allocated."""


@dataclass(slots=True)
class _Builder:
    names: Names
    binding: Mapping[sympy.Symbol, int]
    storages: list[Storage] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)
    storage_of: dict[int, int] = field(default_factory=dict)
    value_of: dict[fx.Node, int] = field(default_factory=dict)
    hints: dict[sympy.Symbol, int] = field(default_factory=dict)
    bound: dict[sympy.Expr, sympy.Integer] = field(default_factory=dict)
    """Size -> its bytes at the binding."""
    updated: dict[int, str] = field(default_factory=dict)
    """Storage of an input that the step updates -> name of the input."""

    def size(self, storage: torch.UntypedStorage) -> sympy.Expr:
        """Bytes of a fake storage, in the user's symbols."""
        count = storage.nbytes()
        if not isinstance(count, torch.SymInt):
            return sympy.Integer(int(count))
        size = self.names.plain(count.node.expr)
        if self.binding and size not in self.bound:
            self.bound[size] = sympy.Integer(int(size.subs(self.binding)))
        if self.binding:
            return self.bound[size]
        hints = count.node.shape_env.backed_var_to_val
        for symbol in count.node.expr.free_symbols:
            self.hints[self.names.plain(symbol)] = int(hints[symbol])
        return size

    def value(
        self, node: fx.Node, role: Role, real: tuple[int, ...] = ()
    ) -> tuple[int, list[int]]:
        """Add the value of `node`; returns its index and the storages that are new in it."""
        leaves = tree_leaves(node.meta.get("val"))
        indices: list[int] = []
        new: list[int] = []
        for i, fake in enumerate(leaves):
            if not isinstance(fake, torch.Tensor):  # None for a gradient that nobody asked for
                continue
            key = fake.untyped_storage()._cdata
            if key not in self.storage_of:
                self.storage_of[key] = len(self.storages)
                size = self.size(fake.untyped_storage())
                if i < len(real) and size.is_Integer:
                    size = sympy.Integer(real[i])
                suffix = f".{i}" if len(leaves) > 1 else ""
                self.storages.append(Storage(node.name + suffix, role, size))
                new.append(self.storage_of[key])
            if self.storage_of[key] not in indices:
                indices.append(self.storage_of[key])
        self.value_of[node] = len(self.values)
        self.values.append(
            Value(node.name, tuple(indices), describe(node.meta.get("val"), self.names))
        )
        return self.value_of[node], new


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Tensors in what a node yields."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def describe(value: Any, names: Names) -> str:
    """Types and shapes of what a node yields."""
    if isinstance(value, torch.Tensor):
        return tensor_text(value.dtype, value.shape, names)
    if isinstance(value, (tuple, list)):
        return f"({', '.join(describe(v, names) for v in value)})"
    return type(value).__name__


def lift(
    joint: fx.GraphModule,
    signature: Signature,
    *,
    border: str | None,
    measured: Mapping[str, Measured] | None = None,
    loss: Loss | None = None,
    symbols: Mapping[str, str] | None = None,
    binding: Mapping[sympy.Symbol, int] | None = None,
) -> Graph:
    """Lift a canonical joint graph.

    Args:
        joint: see `ir.canonical`; every node carries a fake value.
        signature: what its placeholders and outputs are.
        border: name of the first backward node.
        measured: by node name; nodes that are absent are taken to allocate what the fakes say.
        loss: the loss, if it is outside the model and known.
        symbols: name of each symbol in the graph -> the user's name.
        binding: the integer of every symbol, in the user's names; None to keep sizes symbolic.
    """
    build = _Builder(Names(symbols or {}), binding or {})
    tangents: list[fx.Node] = []
    placeholders = [node for node in joint.graph.nodes if node.op == "placeholder"]
    for node, (_, role) in zip(placeholders, signature.inputs, strict=True):
        if role is Role.TANGENT:
            tangents.append(node)
        else:
            build.inputs.append(build.value(node, role)[0])
    results: Any = joint.graph.output_node().args[0]
    updated = {target for kind, target in signature.outputs if kind is OutputKind.MUTATION}
    for node in placeholders:
        if node.name in updated:
            build.updated |= dict.fromkeys(build.values[build.value_of[node]].storages, node.name)
    phase = Phase.FORWARD
    for node in joint.graph.nodes:
        if node.name == border:
            _add_border(build, tangents, [results[i] for i in signature.gradient_results], loss)
            phase = Phase.BACKWARD
        if node.op == "get_attr":
            node.meta.setdefault("val", getattr(joint, str(node.target)))
            build.inputs.append(build.value(node, Role.BUFFER)[0])
        elif is_number(node):
            build.inputs.append(build.value(node, Role.INPUT)[0])
        elif node.op == "call_function":
            _add_op(build, node, phase, (measured or {}).get(node.name, Measured()))
    outputs = tuple(
        Output(build.value_of[node], kind, target)
        for node, (kind, target) in zip(results, signature.outputs, strict=True)
        if isinstance(node, fx.Node)
    )
    storages = _final_roles(build, outputs)
    return Graph(
        storages, tuple(build.values), tuple(build.inputs), tuple(build.ops), outputs, build.hints
    )


def _add_border(
    build: _Builder, tangents: list[fx.Node], results: list[fx.Node], loss: Loss | None
) -> None:
    new: list[int] = []
    for node in tangents:
        new += build.value(node, Role.TANGENT)[1]
    if loss is not None:
        for name, role in ((LOSS, Role.OUTPUT), (ROOT_GRADIENT, Role.TANGENT)):
            new.append(len(build.storages))
            build.storages.append(Storage(name, role, sympy.Integer(loss.bytes)))
    build.values.append(Value("border", tuple(new)))
    operands = tuple(dict.fromkeys(build.value_of[node] for node in results))
    build.ops.append(
        Op(
            name="border",
            target=BORDER,
            phase=Phase.FORWARD,
            operands=operands,
            result=len(build.values) - 1,
            allocates=tuple(new),
            scratch=sympy.Integer(loss.scratch if loss else 0),
            pinned="runs once, between forward and backward",
        )
    )


def _add_op(build: _Builder, node: fx.Node, phase: Phase, measured: Measured) -> None:
    if "val" not in node.meta:
        raise UnsupportedGraphError(f"the size of {node.name} ({node.target}) is not known")
    operands = tuple(build.value_of[operand] for operand in node.all_input_nodes)
    role = Role.TEMPORARY if phase is Phase.BACKWARD else Role.ACTIVATION
    random = is_random(node)
    result, new = build.value(node, role, measured.outputs)
    module, source = origin_of(node)
    build.ops.append(
        Op(
            name=node.name,
            target=target_name(node.target),
            phase=phase,
            operands=operands,
            result=result,
            allocates=tuple(new),
            scratch=measured.scratch,
            random=random,
            pinned=_why_pinned(node, phase) or _reads_updated(build, node),
            source=source,
            module=module,
            overwritable=tuple(build.value_of[operand] for operand in overwritable(node)),
            overwrites=tuple(
                storage
                for operand in overwritten(node)
                for storage in build.values[build.value_of[operand]].storages
            ),
        )
    )


def target_name(target: Any) -> str:
    """Name of an op: ``aten.addmm.default``."""
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    return "getitem" if target is operator.getitem else getattr(target, "__name__", str(target))


def _why_pinned(node: fx.Node, phase: Phase) -> str:
    """Why `node` may not be executed again; empty if it may."""
    target = node.target
    if phase is Phase.BACKWARD:
        return "belongs to backward"
    if target in (operator.getitem, dense_clone):
        return ""
    if not isinstance(target, torch._ops.OpOverload):
        return f"{target_name(target)} is not a plain op"
    if target.namespace not in ("aten", "prims"):
        return f"{target} is a custom op, and may not give the same result twice"
    if target._schema.is_mutable:
        return f"{target} changes its arguments"
    if target._overloadpacket.__name__ in SELECTS:
        return f"{target} chooses indices, which must not change"
    if is_random(node) and node.kwargs.get("generator") is not None:
        return f"{target} draws from a generator of its own"
    return ""


def _reads_updated(build: _Builder, node: fx.Node) -> str:
    """Why `node` may not run after the step's updates: what it reads would have changed."""
    unread = _running_statistics(node)
    for operand in node.all_input_nodes:
        for storage in build.values[build.value_of[operand]].storages:
            if storage in build.updated and operand not in unread:
                return f"it reads {build.updated[storage]}, which the step updates"
    return ""


def _running_statistics(node: fx.Node) -> list[Any]:
    """Arguments of a batch norm in training from which it makes their update, and nothing else."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return []
    names = [argument.name for argument in node.target._schema.arguments]
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    if not given.get("training"):
        return []
    return [given.get("running_mean"), given.get("running_var")]


def _final_roles(build: _Builder, outputs: tuple[Output, ...]) -> tuple[Storage, ...]:
    """Roles that depend on use: outputs, gradients, and what backward does not read of forward."""
    roles: dict[int, Role] = {}
    for op in build.ops:
        if op.phase is Phase.BACKWARD:
            continue
        if op.target != BORDER:
            roles |= dict.fromkeys(op.allocates, Role.TEMPORARY)
    for op in build.ops:
        if op.phase is Phase.BACKWARD:
            for value in op.operands:
                for storage in build.values[value].storages:
                    if storage in roles:
                        roles[storage] = Role.ACTIVATION
    kinds = {OutputKind.GRADIENT: Role.GRADIENT, OutputKind.RESULT: Role.OUTPUT}
    for output in outputs:
        for storage in build.values[output.value].storages:
            held = build.storages[storage].role
            if held in (Role.ACTIVATION, Role.TEMPORARY) and output.kind in kinds:
                roles[storage] = kinds[output.kind]
    return tuple(
        Storage(s.name, roles.get(i, s.role), s.size) for i, s in enumerate(build.storages)
    )
