"""What is measured on each device, stage by stage: models, shapes, and against whom."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from benchmarks.architectures import TINY
from benchmarks.peers import AMP, BASELINE, BY_BLOCK, FUSING, LIMIT, PEERS

ALL = tuple(name for name in PEERS if name not in (*FUSING, *BY_BLOCK))
CORE = ("eager fp32", "eager autocast", "Inductor fp32", BASELINE, LIMIT, AMP)
RIVALS = ("eager autocast", BASELINE, LIMIT, AMP)
MIXED = ("eager autocast", BASELINE, AMP)
ARCHITECTURES = {"BERT": 16, "T5": 16, "ViT": 224, "ResNet-50": 224, "UNet": 64}
"""And the length of the one input that inference is measured on."""


@dataclass(frozen=True)
class Steps:
    """How a training step goes."""

    name: str = "step"
    accumulate: int = 1
    """Forward and backward passes before the update."""
    clip: bool = True
    scaler: bool = False
    """Scale the loss."""


@dataclass(frozen=True)
class Work:
    """One model on one input, run by several peers in turn."""

    model: str
    batch: int
    length: int
    """Tokens, or pixels of an image's side."""
    peers: tuple[str, ...]
    training: tuple[Steps, ...] = ()
    """The steps to measure; none means inference."""
    checkpoint: bool = False
    dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        """What tables call it."""
        shape = f"{self.batch}x{self.length}"
        more = ", checkpointing" * self.checkpoint + ", float16" * (self.dtype == "float16")
        return f"{self.model}, {shape}{more}"

    def cases(self) -> Iterator[tuple[str, Steps | None]]:
        """Name and steps of each thing to time, once the model is compiled."""
        if not self.training:
            yield self.name, None
        for steps in self.training:
            yield f"{self.name}: {steps.name}", steps


PLAIN = Steps("step", clip=False)
CLIPPED = Steps("step with clipping")
SCALED = Steps("step with scaler and clipping", scaler=True)
ACCUMULATED = Steps("8 batches, clipping", accumulate=8)
EVERY = (CLIPPED, PLAIN, SCALED, ACCUMULATED)


def on_cpu() -> dict[str, tuple[Work, ...]]:
    """Works of the racing stages, small enough for two cores."""
    return {
        "inference": (
            Work("GPT 23M", 1, 16, (*ALL, *BY_BLOCK)),
            Work("GPT 23M", 1, 1, CORE),
            Work("GPT 23M", 8, 128, CORE),
        ),
        "training": (
            Work("GPT 23M", 4, 128, CORE, EVERY),
            Work("GPT 23M", 4, 128, (BASELINE, AMP), (CLIPPED,), checkpoint=True),
        ),
        "architectures": (
            Work("GPT 124M", 1, 16, (*RIVALS, *BY_BLOCK)),
            *(Work(model, 1, length, RIVALS) for model, length in ARCHITECTURES.items()),
        ),
        "growth": (
            *(Work(model, 1, 16, (BASELINE, AMP)) for model in ("GPT 1x512", "GPT 3x512", "GPT 9x512", "GPT 1x2048")),
            *(Work(f"{count} weights", 1, 16, (BASELINE, LIMIT, AMP)) for count in (4, 32, 128)),
        ),
    }


def on_cuda() -> dict[str, tuple[Work, ...]]:
    """Works of the racing stages, each stage some minutes on one GPU."""
    modes = tuple(name for name in ALL if name.endswith(("max-autotune", "reduce-overhead")))
    return {
        "inference": (Work("GPT 124M", 1, 16, (*ALL, *BY_BLOCK)),),
        "inference-shapes": (Work("GPT 124M", 1, 1, CORE), Work("GPT 124M", 16, 1024, CORE)),
        "inference-large": tuple(Work("GPT 1.3B", *shape, RIVALS) for shape in ((1, 1), (1, 16), (8, 2048))),
        "inference-float16": (Work("GPT 124M", 1, 16, CORE, dtype="float16"),),
        "training": (Work("GPT 124M", 8, 1024, CORE, EVERY),),
        "training-modes": (Work("GPT 124M", 8, 1024, (BASELINE, LIMIT, AMP, *modes), (CLIPPED,)),),
        "training-fused": (
            # With the vocabulary as it is: rows of logits begin anywhere. Their peak of memory is the logits'.
            Work("GPT 124M/50257", 16, 1024, ("eager autocast", BASELINE, AMP, *FUSING), (PLAIN,)),
            Work("T5", 16, 256, (BASELINE, AMP, *FUSING), (PLAIN,)),
        ),
        "training-checkpoint": (Work("GPT 124M", 8, 1024, RIVALS, (CLIPPED,), checkpoint=True),),
        "training-large": (Work("GPT 1.3B", 1, 2048, MIXED, (CLIPPED, ACCUMULATED), checkpoint=True),),
        "training-float16": (Work("GPT 124M", 8, 1024, MIXED, (SCALED,), dtype="float16"),),
        "architectures": tuple(Work(model, 1, length, RIVALS) for model, length in ARCHITECTURES.items()),
        "language-training": (Work("BERT", 16, 512, RIVALS, (CLIPPED,)), Work("T5", 16, 256, RIVALS, (CLIPPED,))),
        "image-training": (
            Work("ViT", 64, 224, RIVALS, (CLIPPED,)),
            Work("ResNet-50", 64, 224, RIVALS, (CLIPPED,)),
            Work("UNet", 8, 256, RIVALS, (CLIPPED,)),
        ),
        "growth": (
            *(Work(f"GPT {layers}x1024", 1, 16, (BASELINE, AMP)) for layers in (1, 4, 16)),
            *(Work(f"GPT 1x{width}", 1, 16, (BASELINE, AMP)) for width in (2048, 4096)),
            *(Work(f"{count} weights", 1, 16, (BASELINE, LIMIT, AMP)) for count in (4, 32, 256)),
        ),
    }


def tiny(work: Work) -> Work:
    """The same work on a model of a few thousand weights: it tries the harness, its times mean nothing."""
    return replace(work, model=TINY + work.model, batch=min(work.batch, 2), length=min(work.length, 32))
