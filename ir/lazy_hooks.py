"""Hooks that transformers installs on the first forward that needs them, installed before it.

Models whose configuration asks for router logits, hidden states or attentions collect them by hooks on
their layers, which the first such forward installs. A trace must not change the model, so the hooks are
put there first, by transformers' own function, once.
"""

import sys

from torch import nn

_ASKS = ("output_router_logits", "output_hidden_states", "output_attentions")


def install_lazy_hooks(module: nn.Module) -> None:
    """Install what the first forward of a transformers model would install."""
    capturing = sys.modules.get("transformers.utils.output_capturing")
    install = getattr(capturing, "maybe_install_capturing_hooks", None)
    if install is None:
        return
    for child in module.modules():
        config = getattr(child, "config", None)
        collects = getattr(child, "_can_record_outputs", None)
        if collects and any(getattr(config, name, False) for name in _ASKS):
            install(child)
