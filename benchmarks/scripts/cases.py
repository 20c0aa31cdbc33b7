"""Which scripts, at which commits, with which arguments."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from . import inputs

WAYS = ("autocast", "inductor", "amp")
"""Eagerly under the script's own bfloat16 autocast; compiled by Inductor under it; with our two lines."""


@dataclass(frozen=True)
class Case:
    """One script. `NAME.short.diff` shortens it, for every way; `NAME.WAY.diff` changes it for one way."""

    name: str
    repository: str
    commit: str
    script: str
    """Its path in the repository. The folder it is in is taken whole."""
    prepare: Callable[[Path], None]
    """Writes what it reads, into the folder that it runs in."""
    arguments: str = ""
    inductor: str = ""
    """Further arguments that compile it with Inductor."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables that do."""

    def diffs(self, way: str) -> list[Path]:
        """The changes to the script for a way, in order."""
        here = Path(__file__).parent
        return [path for kind in ("short", way) if (path := here / f"{self.name}.{kind}.diff").exists()]


CASES = (
    Case(
        "accelerate",
        "huggingface/accelerate",
        "16cb6eb80dd9aa8b4df1a63ef57863e455d53b83",
        "examples/nlp_example.py",
        inputs.for_accelerate,
        "--cpu --mixed_precision bf16",
        environment={"ACCELERATE_DYNAMO_BACKEND": "inductor"},
    ),
    Case(
        "lightning",
        "Lightning-AI/pytorch-lightning",
        "7f0c3436cd3f6ad3753125672024fc415cbcb414",
        "examples/pytorch/basics/transformer.py",
        inputs.for_lightning,
    ),
    Case(
        "peft",
        "huggingface/peft",
        "5d602fdbff04c33c1c4de55cda9d4ae1d7cb7e40",
        "examples/sft/train.py",
        inputs.for_peft,
        "--model_name_or_path llama --dataset_name texts --use_peft_lora True --output_dir out --use_cpu True"
        " --bf16 True --max_steps 60 --per_device_train_batch_size 8 --max_length 128 --learning_rate 2e-3"
        " --report_to none",
        inductor="--torch_compile True",
    ),
)
