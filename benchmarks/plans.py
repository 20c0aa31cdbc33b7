"""Plans of measurements: models, shapes and peers on two CPU cores, on a GPU, and of calls that are all host."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from benchmarks.architectures import TINY
from benchmarks.peers import AMP, BASELINE, CONVERTED, CPP, FP8, GRAPHS, SAME, SMALL, TORCHAO, WHOLE

CALL = "call"
"""The kind of work that has no training step: one call without gradients."""
CORE = ("eager float32", "eager autocast", "Inductor float32", BASELINE, CONVERTED, AMP)
RIVALS = ("eager autocast", BASELINE, CONVERTED, AMP)
FLOAT32 = ("eager float32", "eager autocast", "Inductor float32", BASELINE, AMP)
WAYS = tuple(name + how for how in ("", GRAPHS, CPP) for name in (BASELINE, AMP))
STOCK = (BASELINE, BASELINE + GRAPHS)
WHOLE_TOO = (*STOCK, *(AMP + how for how in ("", GRAPHS, WHOLE)))
IN_FP8 = (*STOCK, TORCHAO, TORCHAO + GRAPHS, *(FP8 + how for how in ("", GRAPHS, WHOLE)))


@dataclass(frozen=True)
class Work:
    """One model on one input, run by several peers in turn."""

    model: str
    batch: int
    length: int
    """Tokens, or pixels of an image's side."""
    peers: tuple[str, ...]
    kinds: tuple[str, ...] = (CALL,)
    """`CALL`, or the training steps to time, of `benchmarks.candidate.KINDS`."""
    dtype: str = "bfloat16"
    channels_last: bool = False
    gigabytes: float = 0.0
    """About the memory of a GPU that one peer holds."""
    about: str = ""
    """What the name says too."""
    rehearsed: bool = False
    """As few calls as there can be: their times mean nothing."""

    @property
    def name(self) -> str:
        """The name in tables."""
        more = [self.about] * bool(self.about) + ["float16"] * (self.dtype == "float16")
        return ", ".join([self.model, f"{self.batch}x{self.length}", *more])

    @property
    def training(self) -> bool:
        """True if there is a loss to differentiate."""
        return self.kinds != (CALL,)


STEP = ("clipped step",)
ON_CPU = (
    Work("GPT 23M", 1, 16, CORE),
    Work("GPT 23M", 1, 1, CORE),
    Work("GPT 23M", 8, 128, CORE),
    Work("GPT 23M", 4, 128, CORE, ("clipped step", "step", "scaled step", "step of 8 batches")),
    Work("GPT 124M", 1, 16, RIVALS),
    *(
        Work(model, 1, length, RIVALS)
        for model, length in {"BERT": 16, "T5": 16, "ViT": 224, "ResNet-50": 224, "UNet": 64}.items()
    ),
)
"""Small enough for two cores; on older CPUs too, by `ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2`."""
CALLS = (
    *(Work(f"{count} weights", 1, 16, (*FLOAT32, SAME)) for count in (4, 32, 150)),
    *(Work(model, 32, 0, FLOAT32, kinds) for model in ("MLP 3x64", "LeNet") for kinds in ((CALL,), ("step",))),
)
"""Calls and steps that cost the host more than the processor's units."""
LEADING = (
    *(
        Work(f"Llama d{width}", 4, 2048, peers, STEP, gigabytes=16, about=about)
        for width in (4096, 2048)
        for peers, about in ((IN_FP8, "in fp8"), ((*WHOLE_TOO, SMALL, SMALL + WHOLE), ""))
    ),
    Work("GPT 124M/50257", 16, 1024, (*STOCK, AMP, AMP + GRAPHS), STEP, gigabytes=14),
    Work("BERT classifier", 32, 128, WHOLE_TOO, STEP, gigabytes=4),
    Work("ViT", 64, 224, WHOLE_TOO, STEP, gigabytes=6),
    Work("GPT 124M", 8, 1024, WHOLE_TOO, ("scaled step",), dtype="float16", gigabytes=7),
)
"""What a GPU of minutes is asked first; by value, as all that follows."""
OTHERS = (
    Work("GPT 124M", 8, 1024, WAYS, STEP, gigabytes=7),
    Work("GPT 124M", 1, 16, (BASELINE, CONVERTED, AMP, BASELINE + GRAPHS, AMP + GRAPHS), gigabytes=1.5),
    Work("ResNet-50", 128, 224, WAYS, STEP, channels_last=True, gigabytes=12),
)
ON_GPU = LEADING + OTHERS
PLANS = {"cpu": ON_CPU, "calls": CALLS, "gpu": ON_GPU}


def shrink(work: Work) -> Work:
    """The same work on a model of a few thousand weights: it tries the harness."""
    model = work.model if work.model.endswith(" weights") else TINY + work.model.removeprefix(TINY)
    return replace(work, model=model, batch=min(work.batch, 2), length=min(work.length, 32), rehearsed=True)


def pack(works: Sequence[Work], gigabytes: float, processes: int = 19) -> Iterator[list[Work]]:
    """Yield groups of works whose peers fit a GPU's memory and a machine's cores together, in order."""
    group: list[Work] = []
    for work in works:
        together = [*group, work]
        held = sum(len(each.peers) * each.gigabytes for each in together)
        if group and (held > gigabytes or sum(len(each.peers) for each in together) > processes):
            yield group
            together = [work]
        group = together
    if group:
        yield group
