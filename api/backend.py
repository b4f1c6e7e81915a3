"""The `torch.compile` backend: ``torch.compile(model, backend="remat", options={"budget_gb": 20})``.

Dynamo hands over a graph whose inputs are the parameters, buffers and arguments of the user's code. The
graph is planned like a model, and what Dynamo calls from then on runs the plan on the inputs that it
gets, so one compiled graph may serve several modules. A graph whose outputs need no gradient runs as it is.

A plan is made when a graph is first called, not while it is compiled: that is where real tensors, their
gradients and the optimizer are, and an error reaches the user as it is, even where Dynamo is told to
suppress those of compilers. It is made again when gradients are resident though it assumed none, when
another optimizer than the assumed one steps, and at each size that a graph with symbolic sizes meets.

Not handled: tensor subclasses, one plan for several sizes.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx
from torch.optim import Optimizer

from remat.passes import StepProtocol
from remat.solvers import Limits

from .compiled_graph import Compiled, compiled
from .compiling import options_inside
from .dynamo_graph import give_origins, is_symbolic, needs_gradient
from .options import Options, patterns_of
from .settings import is_disabled, outside_settings

__all__ = ["Compiled", "backend", "compiled"]


def backend(
    graph: fx.GraphModule,
    example_inputs: Sequence[object],
    *,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """What `torch.compile(..., backend="remat")` calls with each graph.

    Args:
        graph: as Dynamo captured it.
        example_inputs: say which sizes are symbols; the plan is made for the inputs of the first call.
        options: ``budget_gb``, and what else `optimize_checkpoints` takes by these names: ``optimizer``,
            ``protocol``, ``cost_model``, ``time_limit_s``, ``gap``, ``save``, ``recompute``. Beside them
            ``inductor=True``: Inductor compiles the planned graphs; the peak is then not exactly the plan's.
            What is left out is taken from the environment and pyproject.toml.

    Returns:
        What runs in place of the graph. Its first call, and not this one, raises what planning raises.

    Raises:
        TypeError: an option that there is not, or no budget.
    """
    if not needs_gradient(graph) or is_disabled():
        return graph.forward
    given = dict(options or {})
    inductor = bool(given.pop("inductor", False))
    outside = outside_settings(_options)
    asked = None if given else options_inside(graph.graph)
    if asked is None and "budget_gb" in {**outside, **given}:
        asked = _options(**{**outside, **given})
    if asked is None:
        raise TypeError(
            "backend='remat' needs a budget: torch.compile(..., options={'budget_gb': 20})"
        )
    give_origins(graph)
    return Compiled(graph, is_symbolic(graph, example_inputs), asked, inductor)


def _options(
    budget_gb: float | str,
    optimizer: Optimizer | str | None = "auto",
    protocol: StepProtocol | None = None,
    cost_model: str = "roofline",
    time_limit_s: float = 60.0,
    gap: float = 0.01,
    save: Sequence[str] = (),
    recompute: Sequence[str] = (),
) -> Options:
    return Options(
        budget=budget_gb,
        loss_fn=None,
        optimizer=optimizer,
        protocol=protocol or StepProtocol(),
        cost_model=cost_model,
        limits=Limits(time_limit_s, gap),
        patterns=patterns_of(save, recompute),
    )
