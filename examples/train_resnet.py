"""ResNet with batch norm on real images, eager and under three memory budgets.

The images are scikit-learn's handwritten digits, enlarged from 8 x 8 to 32 x 32 pixels. Batch norm
updates its running statistics in every step: recomputing must not update them twice. Prints one
table, and fails unless every loss equals eager's and every budget is kept.

    python examples/train_resnet.py [--steps N] [--quick]
"""

import sys

import torch
from common import Batch, compare, options
from sklearn.datasets import load_digits
from torch.nn.functional import interpolate
from transformers import ResNetConfig, ResNetForImageClassification


def make_batches(count: int, batch: int) -> list[Batch]:
    """Draw random batches of digits, with pixels from 0 to 1."""
    digits = load_digits()
    pixels = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    generator = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(count):
        chosen = torch.randint(len(labels), (batch,), generator=generator)
        images = interpolate(pixels[chosen], size=(32, 32), mode="bilinear")
        batches.append({"pixel_values": images, "labels": labels[chosen]})
    return batches


def main() -> int:
    """Run the comparison; return the exit status."""
    arguments = options("ResNet on real digits, eager and under three budgets", steps=20)
    depths, batch = ([1, 1], 16) if arguments.quick else ([3, 4, 6, 3], 256)

    def make_model() -> torch.nn.Module:
        widths = [16, 32, 64, 128][: len(depths)]
        config = ResNetConfig(
            num_channels=1,
            embedding_size=16,
            hidden_sizes=widths,
            depths=depths,
            layer_type="basic",
            num_labels=10,
        )
        model: torch.nn.Module = ResNetForImageClassification(config)
        return model

    print(f"ResNet, {sum(depths)} blocks, batch {batch} x 32 x 32 pixels, AdamW\n")
    return compare(make_model, make_batches(arguments.steps, batch), arguments.steps)


if __name__ == "__main__":
    sys.exit(main())
