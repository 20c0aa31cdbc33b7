"""Hugging Face Trainer: the plugin of Accelerate goes to the trainer's accelerator; `bf16=True` says the type.

python -m examples.ecosystem.transformers_trainer
"""

import tempfile
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import ampcompile
from ampcompile.integrations.accelerate import AmpPlugin
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


def small_gpt2() -> GPT2LMHeadModel:
    """Two blocks, 256 tokens, no dropout."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": LENGTH}
    ends = {"bos_token_id": None, "eos_token_id": None, "loss_type": "ForCausalLM"}
    return GPT2LMHeadModel(GPT2Config(**sizes, **ends, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))


def train(way: str, folder: str, steps: int = 12, arguments: Any = None, **plugin: Any) -> tuple[Trainer, float]:
    """The trainer of a small GPT-2 after some steps, and the mean loss of these. Checkpoints go to `folder`."""
    settings = TrainingArguments(
        output_dir=folder,
        max_steps=steps,
        per_device_train_batch_size=8,
        learning_rate=1e-2,
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
        dataloader_pin_memory=False,
        **{"save_strategy": "no", "use_cpu": True, "bf16": way != "float32", **(arguments or {})},
    )
    data = Passages(8 * steps * settings.gradient_accumulation_steps)
    optim: Any = ampcompile.optim if way == "amp" else torch.optim
    optimizer = optim.AdamW, {"lr": settings.learning_rate}
    trainer = Trainer(model=small_gpt2(), args=settings, train_dataset=data, optimizer_cls_and_kwargs=optimizer)
    if way == "amp":
        trainer.accelerator.state.dynamo_plugin = AmpPlugin(**plugin)
    return trainer, trainer.train().training_loss


if __name__ == "__main__":
    for way in ("autocast", "amp"):
        with tempfile.TemporaryDirectory() as folder:
            print(f"{way:8}  mean loss of 12 steps {train(way, folder)[1]:.4f}")
