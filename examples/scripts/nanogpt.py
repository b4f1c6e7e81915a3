"""A small GPT on the text of Python's own documentation, in a loop of its own."""

import argparse
import math
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn import functional

TEXT = "\n".join(topics[name] for name in sorted(topics))
VOCABULARY = sorted(set(TEXT))
CONTEXT = 64


class Block(nn.Module):
    """Attention, then an MLP, each added to its input."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention = nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.before_mlp = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
            nn.Dropout(dropout),
        )
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        """Batch x time x width, unchanged in shape."""
        batch, time, width = x.shape
        parts = self.attention(self.before_attention(x)).split(width, dim=2)
        query, key, value = (
            part.view(batch, time, self.heads, width // self.heads).transpose(1, 2)
            for part in parts
        )
        weights = (query @ key.transpose(-2, -1)) / math.sqrt(key.size(-1))
        future = torch.ones(time, time, dtype=torch.bool, device=x.device).triu(1)
        weights = weights.masked_fill(future, float("-inf")).softmax(dim=-1)
        weights = functional.dropout(weights, self.dropout, self.training)
        mixed = (weights @ value).transpose(1, 2).reshape(batch, time, width)
        x = x + functional.dropout(self.projection(mixed), self.dropout, self.training)
        output: Tensor = x + self.mlp(self.before_mlp(x))
        return output


class GPT(nn.Module):
    """Characters in; logits and, with targets, the loss out."""

    def __init__(self, layers: int = 2, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.token = nn.Embedding(len(VOCABULARY), width)
        self.position = nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width, heads, 0.1) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, len(VOCABULARY), bias=False)
        self.head.weight = self.token.weight
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Logits for every position, and the loss if there are targets."""
        x = self.token(ids) + self.position(torch.arange(ids.size(1), device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits, None
        return logits, functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main() -> None:
    """Train, print the loss of every step, validate in between, and write a little."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--accumulate", type=int, default=1)
    options = parser.parse_args()
    torch.manual_seed(1337)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    numbers = {character: number for number, character in enumerate(VOCABULARY)}
    data = torch.tensor([numbers[character] for character in TEXT])
    validation, train = data[:20_000], data[20_000:]

    def batch(source: Tensor) -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(source) - CONTEXT - 1, (options.batch,)).tolist()
        ids = torch.stack([source[i : i + CONTEXT] for i in starts])
        targets = torch.stack([source[i + 1 : i + CONTEXT + 1] for i in starts])
        return ids.to(device), targets.to(device)

    model = GPT().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    for step in range(options.steps):
        for _ in range(options.accumulate):
            ids, targets = batch(train)
            _, loss = model(ids, targets)
            (loss / options.accumulate).backward()
            print(f"step {step} loss {loss.item()!r}")
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 5 == 4:
            model.eval()
            with torch.no_grad():
                print(f"validation {model(*batch(validation))[1].item()!r}")
            model.train()
    model.eval()
    ids = torch.tensor([[numbers["\n"]]], device=device)
    with torch.no_grad():
        for _ in range(10):
            logits, _ = model(ids[:, -CONTEXT:])
            ids = torch.cat([ids, logits[:, -1].argmax(-1, keepdim=True)], dim=1)
    print(repr("".join(VOCABULARY[i] for i in ids[0].tolist())))


if __name__ == "__main__":
    main()
