"""Hugging Face Trainer: `model.compile(backend="amp")` before the model is handed over.

`TrainingArguments(torch_compile=True, torch_compile_backend="amp")` is taken, but Accelerate then refuses the name: it
has a fixed list of backends.

python -m examples.ecosystem.transformers_trainer
"""

import tempfile
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from examples import stdlib_text

LENGTH = 32


class Passages(torch.utils.data.Dataset):
    """Passages of the standard library's source, the same each time."""

    def __init__(self, count: int) -> None:
        text, random = stdlib_text.read(limit=200_000)[0], torch.Generator().manual_seed(0)
        self.tokens, _ = stdlib_text.batch(text, count, LENGTH, random)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def train(compiled: bool, lower: str = "inductor", steps: int = 12, **arguments: Any) -> tuple[GPT2LMHeadModel, float]:
    """A small GPT-2 after some steps, and the mean loss of these; eagerly under the Trainer's own bf16 autocast."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=256, n_embd=32, n_layer=2, n_head=4, n_positions=LENGTH, use_cache=False)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    model = GPT2LMHeadModel(config)
    if compiled:
        model.compile(backend="amp", options={"lower": lower})
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=8,
            learning_rate=1e-3,
            use_cpu=True,
            bf16=not compiled,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            logging_strategy="no",
            dataloader_pin_memory=False,
            **arguments,
        )
        outcome = Trainer(model=model, args=settings, train_dataset=Passages(8 * steps)).train()
    return model, outcome.training_loss


if __name__ == "__main__":
    for compiled in (False, True):
        print(f"{'amp' if compiled else 'eager autocast':14}  mean loss of 12 steps {train(compiled)[1]:.4f}")
