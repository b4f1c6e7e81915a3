"""Data-parallel training on the CPU; start it with torchrun."""

import argparse

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main() -> None:
    """Train a net on scikit-learn's digits; rank 0 prints the losses of all ranks."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=128)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    width = options.width
    net = nn.Sequential(
        nn.Linear(64, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Dropout(0.1),
        nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width), nn.Linear(width, 10),
    )  # fmt: skip
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    digits = load_digits()
    data = TensorDataset(
        torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    )
    sampler: DistributedSampler[object] = DistributedSampler(data, shuffle=True, drop_last=True)
    torch.manual_seed(1 + dist.get_rank())  # ranks draw other dropout masks
    for step, (inputs, labels) in enumerate(
        DataLoader(data, batch_size=128, sampler=sampler, drop_last=True)
    ):
        loss = functional.cross_entropy(model(inputs), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses = [torch.zeros(()) for _ in range(dist.get_world_size())]
        dist.all_gather(losses, loss.detach())
        if dist.get_rank() == 0:
            print(f"step {step} loss {[each.item() for each in losses]!r}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
