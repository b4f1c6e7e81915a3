"""Print the peak of a training step as a formula in batch and sequence, and check it by measuring.

    python examples/peak_formula.py

A small GPT-2 and a small ResNet, random weights, AdamW, on the CPU.
"""

import torch
import transformers as hf
from torch import Tensor, nn

import remat


def gpt2() -> tuple[nn.Module, dict[str, Tensor], dict[str, dict[int, str]]]:
    """Model, batch, and the sizes that become symbols."""
    config = hf.GPT2Config(
        n_layer=2, n_embd=64, n_head=4, vocab_size=256, bos_token_id=0, eos_token_id=1
    )
    ids = torch.randint(0, 256, (2, 32))
    names = {0: "batch", 1: "seq"}
    model = hf.GPT2LMHeadModel(config)
    return model, {"input_ids": ids, "labels": ids.clone()}, {"input_ids": names, "labels": names}


def resnet() -> tuple[nn.Module, dict[str, Tensor], dict[str, dict[int, str]]]:
    """Likewise, with a symbolic batch."""
    config = hf.ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], num_labels=10
    )
    model = hf.ResNetForImageClassification(config)
    batch = {"pixel_values": torch.randn(4, 3, 32, 32), "labels": torch.arange(4)}
    return model, batch, {"pixel_values": {0: "batch"}, "labels": {0: "batch"}}


def resized(
    batch: dict[str, Tensor], dynamic: dict[str, dict[int, str]], sizes: dict[str, int]
) -> dict[str, Tensor]:
    """The batch at other sizes: its elements repeated in turn."""
    result = {}
    for key, tensor in batch.items():
        for dim, name in dynamic[key].items():
            tensor = tensor.index_select(dim, torch.arange(sizes[name]) % tensor.shape[dim])
        result[key] = tensor
    return result


def measured(model: nn.Module, batch: dict[str, Tensor]) -> int:
    """Peak of a real AdamW step above what is there before it, bytes."""
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        output = model(**batch)
        loss = output.loss
        del output
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return remat.measure_peak(step, warmup=2)


def main() -> None:
    """Print formulas, and predicted beside measured peaks."""
    for make in (gpt2, resnet):
        torch.manual_seed(0)
        model, batch, dynamic = make()
        model.train()
        report = remat.analyze(model, (), batch, optimizer="AdamW", dynamic=dynamic)
        print(f"{report}\n\n{report.formulas()}\n")
        print(f"{'sizes':<24} {'predicted':>12} {'measured':>12}")
        for more in (0, 1, 3):
            sizes = {name: size + more for name, size in report.sizes.items()}
            predicted = report.peak_at(step="steady", **sizes)
            found = report.resident_at(**sizes) + measured(model, resized(batch, dynamic, sizes))
            print(
                f"{', '.join(f'{n}={v}' for n, v in sizes.items()):<24} {predicted:>12} {found:>12}"
            )
        print()


if __name__ == "__main__":
    main()
