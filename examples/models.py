"""Models for the command line: `remat plan examples.models:gpt2_small --budget-gb 3`.

Every function returns a model and the keyword arguments of one training call. For a GPU that is not here
`remat` builds them without data, so the large ones take no memory.
"""

from typing import Any

import torch
import transformers
from torch import nn

Example = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


def gpt2_small() -> Example:
    """GPT-2, 12 layers, 124 million parameters; 4 sequences of 512 tokens."""
    config = transformers.GPT2Config(use_cache=False)
    return _language(transformers.GPT2LMHeadModel(config), 4, 512)


def gpt2_tiny() -> Example:
    """GPT-2 with 2 layers of 64; 2 sequences of 64 tokens."""
    config = transformers.GPT2Config(
        n_layer=2,
        n_embd=64,
        n_head=2,
        vocab_size=500,
        n_positions=64,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    return _language(transformers.GPT2LMHeadModel(config), 2, 64)


def llama3_8b() -> Example:
    """Llama-3-8B in bfloat16; one sequence of 4096 tokens."""
    config = transformers.LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        use_cache=False,
    )
    model: nn.Module = transformers.LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    return _language(model, 1, 4096)


def _language(model: nn.Module, batch: int, length: int) -> Example:
    """A language model and a batch of tokens with labels."""
    ids = torch.zeros(batch, length, dtype=torch.long)
    return model.train(), (), {"input_ids": ids, "labels": ids}
