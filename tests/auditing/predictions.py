"""Predicted and measured errors of ten models; `python -m tests.auditing.predictions` prints them as a table."""

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import ampcompile
from ampcompile.auditing.result import Audit
from benchmarks.architectures import build as build_architecture
from benchmarks.paper.cases import Case
from tests import tiny_models


class Cancels(nn.Module):
    """Rounds its input badly: what is left is the difference of large numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(8, 8)
        nn.init.ones_(self.wide.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.wide(x + 100) - 800


def sensitive() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Sequential(Cancels(), nn.Tanh()), nn.Linear(8, 8), nn.Linear(8, 8))


def conv_net() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.Conv2d(8, 16, 3, stride=2), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 16, 3), nn.GELU(), nn.Flatten(), nn.Linear(256, 10)),
    )


TRANSFORMERS = ("bert", "gpt2", "llama", "t5", "vit", "whisper")
MODELS = (*TRANSFORMERS, "UNet", "ConvNet", "MoE", "a cancellation")


@dataclass(frozen=True)
class Subject:
    """A model, and calls of it with different inputs."""

    model: Callable[..., Any]
    draw: Callable[[], tuple[Any, ...]]
    loss: Callable[[Any], Tensor] | None = None

    def audit(self, inputs: Sequence[Any], policy: str = "default") -> Audit:
        return ampcompile.audit(self.model, loss=self.loss, policy=policy)(*inputs)


def build(name: str) -> Subject:
    """One of `MODELS`."""
    if name in TRANSFORMERS:
        model, inputs = tiny_models.build(name)
        draw = tiny_models.CASES[name][2]
        return Subject(
            lambda *values: model(**dict(zip(inputs, values, strict=True))), lambda: (*draw().values(),), _loss
        )
    if name == "UNet":
        model, _ = build_architecture("tiny UNet", 2, 16, True)
        return Subject(model, lambda: (*torch.randn(2, 2, 3, 16, 16),))
    if name == "MoE":
        model, _ = Case("tiny MoE", 2, 16, True).build()
        return Subject(model, lambda: (*torch.randint(256, (2, 2, 16)),))
    if name == "ConvNet":
        return Subject(conv_net(), lambda: (torch.randn(8, 3, 16, 16),))
    return Subject(sensitive(), lambda: (torch.randn(16, 8),))


def _loss(out: Any) -> Tensor:
    return out.logits.float().square().mean()


@dataclass(frozen=True)
class Answer:
    """What `suggest` found for a tolerance of half the error, or as near to float32's as half-way."""

    tolerance: float
    error: float
    audits: int
    """Those of `sensitivities` and of policies."""
    kept: int
    modules: int


def suggest(subject: Subject) -> Answer:
    inputs, told = subject.draw(), list[str]()
    audit = subject.audit(inputs)
    floor = subject.audit(inputs, "module *=fp32").error
    tolerance = max(audit.error / 2, math.sqrt(floor * audit.error))
    policy = audit.suggest(tolerance, progress=told.append)
    paths = [path for path, _ in policy.modules]
    modules = {op.module for op in audit.ops if op.module}
    kept = [m for m in modules if any(p in ("*", m) or m.startswith(f"{p}.") for p in paths)]
    return Answer(tolerance, subject.audit(inputs, str(policy)).error, 1 + len(told), len(kept), len(modules))


def ratios(subject: Subject, modules: int, inputs: int) -> list[float]:
    """Predicted over measured errors of single modules in low precision, as root mean squares over several inputs.

    Of so many modules, evenly chosen; those that add less than ten times float32's error are left out.
    """
    calls = [subject.draw() for _ in range(inputs)]
    sensitivities = [subject.audit(call).sensitivities() for call in calls]
    floor = _mean(subject.audit(call, "module *=fp32").error for call in calls)
    audit = subject.audit(calls[0])
    everything = {op.module for op in audit.ops}
    named = sorted({op.module for op in audit.ops if op.module and op.dtype in (torch.bfloat16, torch.float16)})
    found = []
    for module in named[:: max(1, len(named) // modules)]:
        inside = [f"module {other}=fp32" for other in named if other.startswith(f"{module}.")]
        policy = ", ".join(["module *=fp32", f"module {module}=default", *inside])
        measured = _mean(subject.audit(call, policy).error for call in calls)
        if measured > 10 * floor:
            found.append(_mean(s.error(everything - {module}) for s in sensitivities) / measured)
    return found


def _mean(values: Any) -> float:
    squares = [value**2 for value in values]
    return math.sqrt(sum(squares) / len(squares))


def main(names: Sequence[str]) -> None:
    print(
        "| model | tolerance | error found | audits | kept, of modules | predicted over measured, middle | within 3 |"
    )
    print("|---|--:|--:|--:|--:|--:|--:|")
    for name in names or MODELS:
        torch.manual_seed(0)
        subject = build(name)
        answer = suggest(subject)
        found = sorted(ratios(subject, modules=6, inputs=8))
        within = sum(1 / 3 <= ratio <= 3 for ratio in found)
        print(
            f"| {name} | {answer.tolerance:.1e} | {answer.error:.1e} | {answer.audits} | {answer.kept} of "
            f"{answer.modules} | {found[len(found) // 2]:.2f} | {within} of {len(found)} |",
            flush=True,
        )
        print([round(r, 2) for r in found], file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
