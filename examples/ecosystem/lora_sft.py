"""TRL's SFTTrainer with LoRA of PEFT: the plugin of Accelerate goes to the trainer's accelerator.

SFTTrainer trains in bfloat16 and checkpoints activations unless it is told not to.

python -m examples.ecosystem.lora_sft
"""

import tempfile
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import ampcompile
from ampcompile.integrations.accelerate import AmpPlugin
from examples.ecosystem.transformers_trainer import LENGTH, Passages, small_gpt2


def tokenizer() -> PreTrainedTokenizerFast:
    """One token for each byte."""
    names = [f"<{byte}>" for byte in range(256)]
    words = models.WordLevel(vocab={name: byte for byte, name in enumerate(names)}, unk_token=names[0])
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), eos_token=names[0], pad_token=names[0])


def train(way: str, folder: str, steps: int = 12, arguments: Any = None, **plugin: Any) -> tuple[SFTTrainer, float]:
    """The trainer of a small GPT-2's adapters after some steps, and the mean loss of these."""
    settings = SFTConfig(
        output_dir=folder,
        max_steps=steps,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        learning_rate=1e-1,
        max_length=LENGTH,
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
        save_strategy="no",
        dataloader_pin_memory=False,
        **{"use_cpu": True, "bf16": way != "float32", **(arguments or {})},
    )
    data = [{"input_ids": tokens.tolist()} for tokens in Passages(16 * steps).tokens]
    optim: Any = ampcompile.optim if way == "amp" else torch.optim
    trainer = SFTTrainer(
        model=small_gpt2(),
        args=settings,
        train_dataset=Dataset.from_list(data),
        processing_class=tokenizer(),
        optimizer_cls_and_kwargs=(optim.AdamW, {"lr": settings.learning_rate}),
        peft_config=LoraConfig(r=4, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True, task_type="CAUSAL_LM"),
    )
    if way == "amp":
        trainer.accelerator.state.dynamo_plugin = AmpPlugin(**plugin)
    return trainer, trainer.train().training_loss


if __name__ == "__main__":
    for way in ("autocast", "amp"):
        with tempfile.TemporaryDirectory() as folder:
            print(f"{way:8}  mean loss of 12 steps {train(way, folder)[1]:.4f}")
