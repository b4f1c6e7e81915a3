"""Classify scikit-learn's digits with a small convolutional net and Lightning's Trainer."""

import argparse
import logging
import warnings
from typing import Any

import lightning
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset


class Digits(lightning.LightningModule):  # type: ignore[misc]
    """The usual LightningModule around a net."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(0.2),
            nn.Linear(2 * width * 16, 10),
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The loss of one batch."""
        images, labels = batch
        loss = functional.cross_entropy(self.net(images), labels)
        print(f"step {self.global_step} loss {loss.item()!r}")
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Count what is right."""
        images, labels = batch
        right = (self.net(images).argmax(1) == labels).float().mean()
        print(f"validation {right.item()!r}")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def main() -> None:
    """Train for an epoch with a short last batch, and validate."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--images", type=int, default=600)
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--devices", type=int, default=1)
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # Lightning's advice on workers and loggers
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    lightning.seed_everything(0, verbose=False)
    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(found.target)
    train = TensorDataset(images[: options.images], labels[: options.images])
    validation = TensorDataset(images[-64:], labels[-64:])
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        strategy=options.strategy,
        devices=options.devices,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(
        Digits(),
        DataLoader(train, batch_size=64, shuffle=True),
        DataLoader(validation, batch_size=64),
    )


if __name__ == "__main__":
    main()
