"""A loop with Accelerate: bf16 autocast, gradients of two batches accumulated, clipping."""

import argparse
from pydoc_data.topics import topics

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

CONTEXT = 32


class NextCharacter(nn.Module):
    """An MLP over the last characters that guesses the next one."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.embedding = nn.Embedding(128, 24)
        self.layers = nn.Sequential(
            nn.Linear(CONTEXT * 24, width), nn.GELU(), nn.Dropout(0.1),
            nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width), nn.Dropout(0.1),
            nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width), nn.Dropout(0.1),
        )  # fmt: skip
        self.head = nn.Linear(width, 128)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits of the next character."""
        output: Tensor = self.head(self.layers(self.embedding(ids).flatten(1)))
        return output


def main() -> None:
    """Train for one pass over some text."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--examples", type=int, default=3200)
    parser.add_argument("--precision", default="bf16")
    options = parser.parse_args()
    set_seed(0)
    accelerator = Accelerator(
        gradient_accumulation_steps=2,
        mixed_precision=options.precision,
        cpu=not torch.cuda.is_available(),
    )
    text = "\n".join(topics[name] for name in sorted(topics))
    numbers = torch.tensor([min(ord(c), 127) for c in text[: options.examples + CONTEXT]])
    data = TensorDataset(numbers.unfold(0, CONTEXT, 1)[: options.examples], numbers[CONTEXT:])
    model = NextCharacter()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=20)
    model, optimizer, loader, schedule = accelerator.prepare(
        model, optimizer, DataLoader(data, batch_size=256, shuffle=True), schedule
    )
    for step, (ids, targets) in enumerate(loader):
        with accelerator.accumulate(model):
            loss = functional.cross_entropy(model(ids), targets)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if accelerator.is_main_process:
            print(f"step {step} loss {loss.item()!r}")
    state = accelerator.unwrap_model(model).state_dict()
    print(f"norm {sum(float(t.double().norm()) for t in state.values())!r}")


if __name__ == "__main__":
    main()
