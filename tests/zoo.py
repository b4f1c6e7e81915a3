"""Public model families as small training steps: random weights from a config, random inputs.

Nothing is downloaded. Dropout is on wherever the architecture has it. Each model comes at two sizes
of *input*: small, for quick checks, and large, where the activations exceed the parameters tenfold,
as they do in the training runs that run out of memory. The same name and size give the same bits.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import diffusers
import torch
import transformers as hf
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 128


@dataclass(frozen=True)
class Case:
    """A model and one batch for it."""

    name: str
    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss_fn: Callable[[Any], Tensor] | None
    """Output to loss; None if the model computes the loss itself, as ``output.loss``."""

    def loss(self) -> Tensor:
        """Run the forward; draws from the global random stream."""
        output = self.model(*self.args, **self.kwargs)
        loss: Tensor = output.loss if self.loss_fn is None else self.loss_fn(output)
        return loss


def build(name: str, *, large: bool = False) -> Case:
    """Make one of `NAMES`, in training mode; leaves the global random stream as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, args, kwargs, loss_fn = _BUILDERS[name](large)
    return Case(name, model.train(), args, kwargs, loss_fn)


_Parts = tuple[nn.Module, tuple[Any, ...], dict[str, Any], Callable[[Any], Tensor] | None]


def _mean_square(output: Any) -> Tensor:
    tensor: Tensor = output.sample if hasattr(output, "sample") else output
    return tensor.pow(2).mean()


def _ids(batch: int, length: int) -> Tensor:
    return torch.randint(2, VOCABULARY, (batch, length))


def _gpt2(large: bool) -> _Parts:
    config = hf.GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=64,
        n_head=4,
        n_layer=2,
        n_positions=128,
        bos_token_id=0,
        eos_token_id=1,
    )
    ids = _ids(3, 128) if large else _ids(2, 16)
    kwargs = {"input_ids": ids, "labels": ids, "use_cache": False}
    return hf.GPT2LMHeadModel(config), (), kwargs, None


def _bert(large: bool) -> _Parts:
    config = hf.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_attention_heads=4,
        num_hidden_layers=2,
        intermediate_size=128,
        max_position_embeddings=128,
    )
    ids = _ids(3, 128) if large else _ids(2, 16)
    mask = torch.ones_like(ids)
    mask[0, ids.shape[1] // 2 :] = 0  # one sequence is padded, so the mask matters
    kwargs = {"input_ids": ids, "attention_mask": mask, "labels": ids.flip(0)}
    return hf.BertForMaskedLM(config), (), kwargs, None


def _llama(large: bool) -> _Parts:
    config = hf.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=2,
        intermediate_size=128,
        max_position_embeddings=128,
        attention_dropout=0.1,
    )
    ids = _ids(3, 128) if large else _ids(2, 16)
    kwargs = {"input_ids": ids, "labels": ids, "use_cache": False}
    return hf.LlamaForCausalLM(config), (), kwargs, None


def _mixtral(large: bool) -> _Parts:
    config = hf.MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=2,
        intermediate_size=128,
        max_position_embeddings=128,
        num_local_experts=4,
        attention_dropout=0.1,
        output_router_logits=True,  # adds the load-balancing loss
    )
    ids = _ids(5, 128) if large else _ids(2, 16)
    kwargs = {"input_ids": ids, "labels": ids, "use_cache": False}
    return hf.MixtralForCausalLM(config), (), kwargs, None


def _t5(large: bool) -> _Parts:
    config = hf.T5Config(
        vocab_size=VOCABULARY,
        d_model=64,
        d_kv=16,
        d_ff=128,
        num_layers=2,
        num_decoder_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
    )
    ids, labels = (_ids(3, 128), _ids(3, 96)) if large else (_ids(2, 16), _ids(2, 12))
    kwargs = {"input_ids": ids, "labels": labels, "use_cache": False}
    return hf.T5ForConditionalGeneration(config), (), kwargs, None


def _vit(large: bool) -> _Parts:
    config = hf.ViTConfig(
        hidden_size=64,
        num_attention_heads=4,
        num_hidden_layers=2,
        intermediate_size=128,
        image_size=32,
        patch_size=8,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
        num_labels=10,
    )
    batch = 40 if large else 2
    kwargs = {"pixel_values": torch.randn(batch, 3, 32, 32), "labels": torch.arange(batch) % 10}
    return hf.ViTForImageClassification(config), (), kwargs, None


def _resnet(large: bool) -> _Parts:
    config = hf.ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 32], depths=[1, 2], num_labels=10
    )
    batch = 5 if large else 2
    kwargs = {"pixel_values": torch.randn(batch, 3, 64, 64), "labels": torch.arange(batch) % 10}
    return hf.ResNetForImageClassification(config), (), kwargs, None


def _whisper(large: bool) -> _Parts:
    length = 128 if large else 32
    config = hf.WhisperConfig(
        vocab_size=VOCABULARY,
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        num_mel_bins=16,
        max_source_positions=length,
        max_target_positions=length,
        dropout=0.1,
        attention_dropout=0.1,
        activation_dropout=0.1,
        decoder_start_token_id=1,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=1,
    )
    batch, labels = (3, _ids(3, 96)) if large else (2, _ids(2, 12))
    features = torch.randn(batch, 16, 2 * length)
    kwargs = {"input_features": features, "labels": labels, "use_cache": False}
    return hf.WhisperForConditionalGeneration(config), (), kwargs, None


def _unet2d(large: bool) -> _Parts:
    model = diffusers.UNet2DModel(
        sample_size=32,
        layers_per_block=1,
        block_out_channels=(16, 32),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=4,
        attention_head_dim=8,
        dropout=0.1,
    )
    batch = 4 if large else 2
    kwargs = {"sample": torch.randn(batch, 3, 32, 32), "timestep": torch.arange(1, batch + 1)}
    return model, (), kwargs, _mean_square


def _vae(large: bool) -> _Parts:
    model = diffusers.AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(16, 32),
        layers_per_block=1,
        norm_num_groups=4,
        sample_size=32,
    )
    sample = torch.randn(4 if large else 2, 3, 32, 32)
    # The latent is drawn from the posterior, so the step is random although there is no dropout.
    return model, (), {"sample": sample, "sample_posterior": True}, _mean_square


class DLRM(nn.Module):
    """Deep learning recommendation model: embedding bags, pairwise products, two small MLPs."""

    upper: Tensor

    def __init__(self, tables: int = 4, rows: int = 100, width: int = 16, dense: int = 13) -> None:
        super().__init__()
        bags = (nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables))
        self.bags = nn.ModuleList(bags)
        self.bottom = self._mlp(dense, 64, width)
        self.register_buffer("upper", torch.triu_indices(tables + 1, tables + 1, 1))
        self.top = self._mlp(width + self.upper.shape[1], 64, 32)
        self.head = nn.Linear(32, 1)

    @staticmethod
    def _mlp(*widths: int) -> nn.Sequential:
        layers: list[nn.Module] = []
        for before, after in pairwise(widths):
            layers += [nn.Linear(before, after), nn.ReLU(), nn.Dropout(0.1)]
        return nn.Sequential(*layers)

    def forward(self, dense: Tensor, indices: Tensor, offsets: Tensor) -> Tensor:
        """One logit a row of `dense`; `indices` and `offsets` hold one row per table."""
        bottom = self.bottom(dense)
        looked_up = [bag(indices[i], offsets[i]) for i, bag in enumerate(self.bags)]
        features = torch.stack([bottom, *looked_up], dim=1)
        products = features @ features.transpose(1, 2)
        pairs = products[:, self.upper[0], self.upper[1]]
        logit: Tensor = self.head(self.top(torch.cat([bottom, pairs], dim=1)))
        return logit


def _click_loss(logit: Tensor) -> Tensor:
    return functional.binary_cross_entropy_with_logits(logit, torch.ones_like(logit))


def _dlrm(large: bool) -> _Parts:
    batch, tables, rows = (300 if large else 8), 4, 100
    kwargs = {
        "dense": torch.randn(batch, 13),
        "indices": torch.randint(rows, (tables, 2 * batch)),
        "offsets": torch.arange(0, 2 * batch, 2).repeat(tables, 1),
    }
    return DLRM(tables, rows), (), kwargs, _click_loss


def _mlp(large: bool) -> _Parts:
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(64, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Dropout(0.1)]
    return nn.Sequential(*layers), (torch.randn(300 if large else 8, 64),), {}, _mean_square


def _class_loss(output: Tensor) -> Tensor:
    # Not the mean square: the output of a layer norm has mean square 1, so its gradient would vanish.
    flat = output.flatten(0, 1)
    return functional.cross_entropy(flat, torch.arange(len(flat)) % flat.shape[1])


def _transformer(large: bool) -> _Parts:
    model = nn.Transformer(64, 4, 2, 2, 128, dropout=0.1, batch_first=True)
    batch, source, target = (3, 128, 96) if large else (2, 10, 12)
    args = torch.randn(batch, source, 64), torch.randn(batch, target, 64)
    return model, args, {}, _class_loss


_BUILDERS: dict[str, Callable[[bool], _Parts]] = {
    "gpt2": _gpt2,
    "bert": _bert,
    "llama": _llama,
    "mixtral": _mixtral,
    "t5": _t5,
    "vit": _vit,
    "resnet": _resnet,
    "whisper": _whisper,
    "unet2d": _unet2d,
    "vae": _vae,
    "dlrm": _dlrm,
    "mlp": _mlp,
    "transformer": _transformer,
}
NAMES: tuple[str, ...] = tuple(_BUILDERS)
