"""Fine-tune a small GPT-2 on the text of Python's own documentation with transformers' Trainer."""

import argparse
import tempfile
from pydoc_data.topics import topics
from typing import Any

import torch
import transformers
from torch.utils.data import Dataset

LENGTH = 48


class Characters(Dataset[dict[str, Any]]):
    """Pieces of the text, a number for every character."""

    def __init__(self, count: int) -> None:
        text = "\n".join(topics[name] for name in sorted(topics))[: count * LENGTH]
        self.ids = torch.tensor([min(ord(character), 127) for character in text])

    def __len__(self) -> int:
        return len(self.ids) // LENGTH

    def __getitem__(self, number: int) -> dict[str, Any]:
        piece = self.ids[number * LENGTH : (number + 1) * LENGTH]
        return {"input_ids": piece, "labels": piece}


class PrintLosses(transformers.TrainerCallback):  # type: ignore[misc]
    """Print every loss as the Trainer logs it."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Called by the Trainer."""
        for key in ("loss", "eval_loss"):
            if key in logs:
                print(f"step {state.global_step} {key} {logs[key]!r}")


def main() -> None:
    """Train, evaluate in between, save, and generate."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--accumulate", type=int, default=1)
    options = parser.parse_args()
    transformers.set_seed(0)
    config = transformers.GPT2Config(
        vocab_size=128,
        n_positions=LENGTH,
        n_embd=64,
        n_layer=2,
        n_head=4,
        bos_token_id=10,
        eos_token_id=10,
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = transformers.Trainer(
            model=transformers.GPT2LMHeadModel(config),
            args=transformers.TrainingArguments(
                folder,
                max_steps=options.steps,
                per_device_train_batch_size=8,
                gradient_accumulation_steps=options.accumulate,
                learning_rate=1e-3,
                logging_steps=1,
                eval_strategy="steps",
                eval_steps=4,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
            ),
            train_dataset=Characters(64),
            eval_dataset=Characters(8),
            callbacks=[PrintLosses()],
        )
        trainer.remove_callback(transformers.PrinterCallback)  # prints times
        trainer.train()
        trainer.save_model(folder)
        model = transformers.GPT2LMHeadModel.from_pretrained(folder).eval()
        written = model.generate(torch.tensor([[10]]), max_new_tokens=8, do_sample=False)
        print(written.tolist())


if __name__ == "__main__":
    main()
