"""Wrappers that replicate or shard a model: which come after `optimize_checkpoints`, and how.

A plan is made of plain parameters, so `optimize_checkpoints` comes first: ``DDP(optimize_checkpoints(model,
...))``; each block optimised, then ``fully_shard``. The other order is refused, also where sharding comes
after a plan that spans what is sharded.

Wrappers are known by package and class name, so none has to be imported.
"""

from torch import nn

from remat.ir import UnsupportedGraphError

_SHARD = (
    "Optimise each block before it is sharded, then the rest: "
    "`model.layers[i] = optimize_checkpoints(model.layers[i], budget)`, `fully_shard(model.layers[i])`, and "
    "at last `fully_shard(model)`; or `fully_shard(optimize_checkpoints(model, budget))` for the whole model "
    "as one unit."
)
_ORDERS = {
    ("torch", "DistributedDataParallel"): "Wrap the optimised model: "
    "`DistributedDataParallel(optimize_checkpoints(model, budget))`.",
    (
        "torch",
        "DataParallel",
    ): "It copies the model for every call, so a plan would not be used. Run one "
    "process for each device: `DistributedDataParallel(optimize_checkpoints(model, budget))`.",
    ("torch", "FSDPModule"): _SHARD,
    (
        "torch",
        "FullyShardedDataParallel",
    ): f"It flattens parameters, which a plan cannot follow. Use `fully_shard`. {_SHARD}",
    ("deepspeed", "DeepSpeedEngine"): "Hand it the optimised model: "
    "`deepspeed.initialize(model=optimize_checkpoints(model, budget), ...)`, without ZeRO stage 3, which "
    "takes parameters apart.",
    (
        "deepspeed",
        "PipelineModule",
    ): "A plan does not span the stages of a pipeline. Optimise the layers that it is made of.",
}
"""What to do instead, by package and class of a wrapper."""


def refuse_wrapped(model: nn.Module) -> None:
    """Refuse a model that is replicated or sharded already, or holds a module that is.

    Raises:
        UnsupportedGraphError: names the module, and the order that works.
    """
    for name, module in model.named_modules():
        for kind in _kinds(module):
            if kind in _ORDERS:
                raise UnsupportedGraphError(
                    f"{name or 'the model'} is wrapped by {kind[1]} already, and "
                    f"optimize_checkpoints comes first. {_ORDERS[kind]}"
                )
    refuse_sharded(model)


def is_sharded(model: nn.Module) -> bool:
    """`fully_shard` has been called on the model itself: it gathers its parameters for each call."""
    return ("torch", "FSDPModule") in _kinds(model)


def _kinds(module: nn.Module) -> list[tuple[str, str]]:
    """Package and name of the classes that a module is an instance of."""
    return [(kind.__module__.partition(".")[0], kind.__name__) for kind in type(module).__mro__]


def refuse_sharded(model: nn.Module) -> None:
    """Refuse a model some of whose parameters or buffers are DTensors at this moment.

    Raises:
        UnsupportedGraphError: names one, and the order that works.
    """
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if type(tensor).__name__ == "DTensor":
            raise UnsupportedGraphError(
                f"{name} is a DTensor: it is sharded apart from the module that is to run by a plan, so the "
                f"graph of the whole does not hold. {_SHARD} Parameters that are DTensors in forward, too "
                "(tensor parallel), cannot be planned."
            )
