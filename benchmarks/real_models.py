"""Public models at real sizes, as training steps without data: shapes and types, no memory.

Every model computes its loss itself. Weights would be random; there are none. Batches are those with
which such models are trained on one large GPU, where the activations exceed the parameters.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import diffusers
import torch
import transformers as hf
from torch import Tensor, nn

HALF = torch.bfloat16
SINGLE = torch.float32


@dataclass(frozen=True)
class Case:
    """One training step."""

    name: str
    text: str
    """Type and batch, for people."""
    blocks: str
    """Regular expression for the module paths of its repeated blocks: what a user would checkpoint."""
    build: Callable[[], tuple[nn.Module, dict[str, Any]]]
    """Module and keyword arguments; called under the meta device."""


def make(case: Case) -> tuple[nn.Module, dict[str, Any]]:
    """The module in training mode and its arguments, without memory."""
    with torch.device("meta"):
        module, kwargs = case.build()
    return module.train(), kwargs


def _ids(batch: int, length: int) -> Tensor:
    return torch.zeros(batch, length, dtype=torch.long)


def gpt2(batch: int, **sizes: int) -> tuple[nn.Module, dict[str, Any]]:
    """GPT-2 with 1024 tokens a sequence; `sizes` go to its configuration."""
    module = hf.GPT2LMHeadModel._from_config(hf.GPT2Config(**sizes), dtype=HALF)
    ids = _ids(batch, 1024)
    return module, {"input_ids": ids, "labels": ids, "use_cache": False}


def _bert() -> tuple[nn.Module, dict[str, Any]]:
    config = hf.BertConfig(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
    )
    module = hf.BertForMaskedLM._from_config(config, dtype=SINGLE)
    ids = _ids(8, 512)
    return module, {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def _llama(layers: int) -> tuple[nn.Module, dict[str, Any]]:
    config = hf.LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        use_cache=False,
    )
    ids = _ids(1, 4096)
    return hf.LlamaForCausalLM._from_config(config, dtype=HALF), {"input_ids": ids, "labels": ids}


def _mixtral(layers: int) -> tuple[nn.Module, dict[str, Any]]:
    config = hf.MixtralConfig(num_hidden_layers=layers, use_cache=False)
    module = hf.MixtralForCausalLM._from_config(config, dtype=HALF)
    ids = _ids(4, 4096)
    return module, {"input_ids": ids, "labels": ids}


def _t5() -> tuple[nn.Module, dict[str, Any]]:
    config = hf.T5Config(
        d_model=768, d_kv=64, d_ff=3072, num_layers=12, num_heads=12, decoder_start_token_id=0
    )
    module = hf.T5ForConditionalGeneration._from_config(config, dtype=SINGLE)
    return module, {"input_ids": _ids(8, 512), "labels": _ids(8, 512), "use_cache": False}


def _vit() -> tuple[nn.Module, dict[str, Any]]:
    config = hf.ViTConfig(
        hidden_size=1024,
        num_hidden_layers=24,
        num_attention_heads=16,
        intermediate_size=4096,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
        num_labels=1000,
    )
    module = hf.ViTForImageClassification._from_config(config, dtype=HALF)
    pixels = torch.empty(64, 3, 224, 224, dtype=HALF)
    return module, {"pixel_values": pixels, "labels": torch.zeros(64, dtype=torch.long)}


def _resnet(depths: list[int]) -> tuple[nn.Module, dict[str, Any]]:
    module = hf.ResNetForImageClassification(hf.ResNetConfig(depths=depths, num_labels=1000))
    pixels = torch.empty(64, 3, 224, 224)
    return module, {"pixel_values": pixels, "labels": torch.zeros(64, dtype=torch.long)}


class _Denoiser(nn.Module):
    """A diffusion model with its loss: the mean square of predicted less true noise."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, sample: Tensor, timestep: Tensor, noise: Tensor) -> Tensor:
        """The loss."""
        return nn.functional.mse_loss(self.model(sample, timestep).sample, noise)


def _unet() -> tuple[nn.Module, dict[str, Any]]:
    model = diffusers.UNet2DModel(
        sample_size=256,
        block_out_channels=(128, 128, 256, 256, 512, 512),
        layers_per_block=2,
        down_block_types=(*("DownBlock2D",) * 4, "AttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "AttnUpBlock2D", *("UpBlock2D",) * 4),
    )
    sample = torch.empty(4, 3, 256, 256)
    timestep = torch.zeros(4, dtype=torch.long)
    return _Denoiser(model), {"sample": sample, "timestep": timestep, "noise": sample.clone()}


def _whisper() -> tuple[nn.Module, dict[str, Any]]:
    config = hf.WhisperConfig(
        vocab_size=51865,
        d_model=768,
        encoder_layers=12,
        decoder_layers=12,
        encoder_attention_heads=12,
        decoder_attention_heads=12,
        encoder_ffn_dim=3072,
        decoder_ffn_dim=3072,
        dropout=0.1,
    )
    module = hf.WhisperForConditionalGeneration._from_config(config, dtype=HALF)
    features = torch.empty(8, 80, 3000, dtype=HALF)
    return module, {"input_features": features, "labels": _ids(8, 448), "use_cache": False}


_RESNET = r"encoder\.stages\.\d+\.layers\.\d+"

CASES = (
    Case("gpt2", "bf16, 8 x 1024", r"transformer\.h\.\d+", lambda: gpt2(8)),
    Case(
        "gpt2_xl",
        "bf16, 4 x 1024",
        r"transformer\.h\.\d+",
        lambda: gpt2(4, n_layer=48, n_embd=1600, n_head=25),
    ),
    Case("bert_large", "fp32, 8 x 512", r"bert\.encoder\.layer\.\d+", _bert),
    Case("llama3_8b", "bf16, 1 x 4096", r"model\.layers\.\d+", lambda: _llama(32)),
    Case("llama3_8b_4", "4 layers, bf16, 1 x 4096", r"model\.layers\.\d+", lambda: _llama(4)),
    Case("mixtral_2", "2 layers, bf16, 4 x 4096", r"model\.layers\.\d+", lambda: _mixtral(2)),
    Case("t5_base", "fp32, 8 x 512", r"(en|de)coder\.block\.\d+", _t5),
    Case("vit_l16", "bf16, 64 x 224²", r"vit\.(encoder\.)?layers?\.\d+", _vit),
    Case("resnet50", "fp32, 64 x 224²", _RESNET, lambda: _resnet([3, 4, 6, 3])),
    Case("resnet152", "fp32, 64 x 224²", _RESNET, lambda: _resnet([3, 8, 36, 3])),
    Case(
        "unet2d",
        "fp32, 4 x 256²",
        r"(down_blocks|up_blocks)\.\d+\.(resnets|attentions)\.\d+|mid_block",
        _unet,
    ),
    Case("whisper_small", "bf16, 8 x 30 s", r"model\.(en|de)coder\.layers\.\d+", _whisper),
)
