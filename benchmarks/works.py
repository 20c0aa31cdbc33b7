"""The measurements on each device, stage by stage: models, shapes and peers."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from benchmarks.architectures import TINY
from benchmarks.peers import AMP, BASELINE, BY_BLOCK, FUSING, LIMIT, PEERS, RELAXED

ALL = tuple(name for name in PEERS if name not in (*FUSING, *BY_BLOCK, RELAXED))
CORE = ("eager fp32", "eager autocast", "Inductor fp32", BASELINE, LIMIT, AMP)
RIVALS = ("eager autocast", BASELINE, LIMIT, AMP)
ARCHITECTURES = {"BERT": 16, "T5": 16, "ViT": 224, "ResNet-50": 224, "UNet": 64}
"""And the length of the one input that inference is measured on."""
KEEP_MEMORY = {
    "MALLOC_TRIM_THRESHOLD_": str(2**34),
    "MALLOC_MMAP_THRESHOLD_": str(2**34),
    "MALLOC_TOP_PAD_": str(2**26),
}
"""Settings with which glibc's allocator keeps freed memory for the next step, instead of fetching it zeroed anew."""


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
    isa: str = ""
    """An older CPU to be: what `ONEDNN_MAX_CPU_ISA` limits this one to. Empty: it uses all it has."""
    keeps_memory: bool = False
    """The allocator keeps what was freed."""
    group: str = ""
    """The name that these peers share, where others run the same model and input in another job."""

    @property
    def name(self) -> str:
        """The name in tables."""
        shape = f"{self.batch}x{self.length}"
        more = ", checkpointing" * self.checkpoint + ", float16" * (self.dtype == "float16")
        more += f", as {self.isa}" * bool(self.isa) + ", memory kept" * self.keeps_memory
        return f"{self.model}, {shape}{more}" + f" ({self.group})" * bool(self.group)

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables of its peers' processes."""
        torchs = {"ATEN_CPU_CAPABILITY": "avx2"} if self.isa == "AVX2" else {}
        older = {"ONEDNN_MAX_CPU_ISA": self.isa, **torchs} if self.isa else {}
        return older | (KEEP_MEMORY if self.keeps_memory else {})

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
            Work("GPT 23M", 1, 16, (*ALL, RELAXED, *BY_BLOCK)),
            Work("GPT 23M", 1, 1, CORE),
            Work("GPT 23M", 8, 128, CORE),
        ),
        "training": (
            Work("GPT 23M", 4, 128, CORE, EVERY),
            Work("GPT 23M", 4, 128, (BASELINE, AMP), (CLIPPED,), checkpoint=True),
            Work("GPT 23M", 4, 128, CORE, (CLIPPED,), keeps_memory=True),
        ),
        "architectures": (
            Work("GPT 124M", 1, 16, (*RIVALS, *BY_BLOCK)),
            *(Work(model, 1, length, RIVALS) for model, length in ARCHITECTURES.items()),
        ),
        "older-cpus": tuple(
            replace(work, isa=isa, peers=("Inductor fp32", BASELINE, AMP))
            for isa in ("AVX512_CORE", "AVX2")
            for work in (
                Work("GPT 23M", 4, 128, (), (CLIPPED,)),
                Work("GPT 23M", 4, 128, (), (SCALED,), dtype="float16"),
                Work("GPT 23M", 1, 16, ()),
                Work("GPT 23M", 8, 128, ()),
            )
        ),
        "growth": (
            *(Work(model, 1, 16, (BASELINE, AMP)) for model in ("GPT 1x512", "GPT 3x512", "GPT 9x512", "GPT 1x2048")),
            *(Work(f"{count} weights", 1, 16, (BASELINE, LIMIT, AMP)) for count in (4, 32, 128)),
        ),
    }


def on_cuda() -> dict[str, tuple[Work, ...]]:
    """Works of the racing stages for one GPU, by value: what decides most comes first.

    A job holds few peers, each of which needs a minute or more to compile and memory of its own until the job ends;
    Inductor under autocast stands in each group, so that ratios are taken within a run.
    """
    measured = (AMP, RELAXED)  # always both: what the roundings of numerics="eager" cost
    rivals = ("eager autocast", BASELINE, LIMIT, *measured)
    mixed = (BASELINE, *measured)
    frozen = ("Inductor + autocast, freezing", "Thunder + autocast")
    graphs = tuple(f"{name}, reduce-overhead" for name in (BASELINE, LIMIT, AMP))
    tuned = tuple(f"{name}, max-autotune" for name in (BASELINE, AMP))
    gpt = Work("GPT 124M", 8, 1024, rivals, (PLAIN, CLIPPED, SCALED))
    one = Work("GPT 124M", 1, 16, rivals)
    # With the vocabulary as it is: rows of logits begin anywhere. Their peak of memory is the logits'.
    fused = (BASELINE, "amp, fuse=none", "amp, fuse=linear_cross_entropy")
    odd = Work("GPT 124M/50257", 16, 1024, fused, (PLAIN,), group="linear_cross_entropy")
    large = Work("GPT 1.3B", 1, 2048, mixed)
    return {
        "broken": (
            Work(f"{TINY}GPT 124M", 2, 32, (BASELINE, *measured, graphs[-1]), (SCALED,), group="modes"),
            Work(f"{TINY}GPT 124M", 2, 32, (BASELINE, *FUSING), (PLAIN,), group="fused"),
            Work(f"{TINY}GPT 124M", 2, 32, mixed, (SCALED,), dtype="float16"),
        ),
        "training": (gpt,),
        "inference": (one, replace(one, peers=(BASELINE, *graphs), group="CUDA graphs")),
        "training-modes": (replace(gpt, peers=(BASELINE, *graphs), training=(CLIPPED,), group="CUDA graphs"),),
        "training-fused": (odd,),
        "by-block": (
            replace(one, peers=(BASELINE, AMP, *BY_BLOCK), group="by block"),
            replace(gpt, peers=(BASELINE, AMP, *BY_BLOCK), training=(CLIPPED,), group="by block"),
        ),
        "inference-shapes": (
            Work("GPT 124M", 1, 1, (BASELINE, LIMIT, *measured)),
            Work("GPT 124M", 16, 1024, (BASELINE, LIMIT, *measured)),
        ),
        "training-float16": (replace(gpt, peers=mixed, training=(SCALED,), dtype="float16"),),
        "inference-float16": (replace(one, peers=(BASELINE, LIMIT, *measured), dtype="float16"),),
        "training-large": (replace(large, peers=(BASELINE, AMP), training=(CLIPPED, ACCUMULATED), checkpoint=True),),
        "inference-large": tuple(replace(large, batch=b, length=n) for b, n in ((1, 1), (1, 16), (8, 2048))),
        "language-training": (
            Work("BERT", 16, 512, mixed, (CLIPPED,)),
            Work("T5", 16, 256, mixed, (CLIPPED,)),
        ),
        "image-training": (
            Work("ViT", 64, 224, mixed, (CLIPPED,)),
            Work("ResNet-50", 64, 224, mixed, (CLIPPED,)),
            Work("UNet", 8, 256, mixed, (CLIPPED,)),
        ),
        "architectures": tuple(
            Work(model, 1, length, (BASELINE, LIMIT, *measured)) for model, length in ARCHITECTURES.items()
        ),
        "training-checkpoint": (replace(gpt, peers=mixed, training=(CLIPPED,), checkpoint=True),),
        "training-float32": (
            replace(gpt, peers=("eager fp32", "Inductor fp32", BASELINE), training=(CLIPPED,), group="float32"),
        ),
        "autotuned": (
            replace(one, peers=(BASELINE, *tuned), group="max-autotune"),
            replace(gpt, peers=(BASELINE, *tuned), training=(CLIPPED,), group="max-autotune"),
        ),
        "inference-frozen": (replace(one, peers=(BASELINE, *frozen, AMP), group="frozen"),),
        "growth": (
            *(Work(f"GPT {layers}x1024", 1, 16, (BASELINE, AMP)) for layers in (1, 4, 16)),
            *(Work(f"GPT 1x{width}", 1, 16, (BASELINE, AMP)) for width in (2048, 4096)),
            *(Work(f"{count} weights", 1, 16, (BASELINE, LIMIT, AMP)) for count in (4, 32, 256)),
        ),
    }


def tiny(work: Work) -> Work:
    """The same work on a model of a few thousand weights: it tries the harness, its times mean nothing."""
    model = TINY + work.model.removeprefix(TINY)
    return replace(work, model=model, batch=min(work.batch, 2), length=min(work.length, 32))
