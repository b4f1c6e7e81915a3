"""GPT-2 on real text, eager and under three memory budgets.

The text is the source code of Python's standard library, one token a byte. The weights are random,
dropout is on. Prints one table, and fails unless every loss equals eager's and every budget is kept.

    python examples/train_gpt.py [--steps N] [--quick]
"""

import sys
import sysconfig
from pathlib import Path

import torch
from common import Batch, compare, options
from transformers import GPT2Config, GPT2LMHeadModel


def read_text() -> torch.Tensor:
    """Bytes of the standard library's top-level modules, in order of name."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8)


def make_batches(count: int, batch: int, length: int) -> list[Batch]:
    """Cut random windows out of the text; the model shifts the labels itself."""
    text = read_text()
    generator = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(count):
        starts = torch.randint(len(text) - length, (batch,), generator=generator)
        ids = torch.stack([text[start : start + length] for start in starts]).long()
        batches.append({"input_ids": ids, "labels": ids})
    return batches


def main() -> int:
    """Run the comparison; return the exit status."""
    arguments = options("GPT-2 on real text, eager and under three budgets", steps=24)
    layers, width, batch, length = (2, 64, 4, 64) if arguments.quick else (12, 256, 2, 128)

    def make_model() -> torch.nn.Module:
        config = GPT2Config(
            vocab_size=256,
            n_layer=layers,
            n_embd=width,
            n_head=width // 32,
            n_positions=length,
            bos_token_id=0,
            eos_token_id=0,
            use_cache=False,
        )
        model: torch.nn.Module = GPT2LMHeadModel(config)
        return model

    print(
        f"GPT-2, {layers} layers x {width} wide, batch {batch} x {length} bytes of text, AdamW\n"
    )
    return compare(make_model, make_batches(arguments.steps, batch, length), arguments.steps)


if __name__ == "__main__":
    sys.exit(main())
