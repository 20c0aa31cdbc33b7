"""Greedy generation, whose model is compiled call by call while its cache grows or stands still."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from proof.models.judge import judge_differences, try_out
from proof.models.subject import Case, Subject
from proof.ops.calls import amp, autocast, eager, stock
from proof.ops.compare import Difference
from proof.results import Verdict

SAME, TIE = "same tokens", "a tie"
CACHES = {"static cache": "static", "dynamic cache": "dynamic"}
DECODERS = ("llama", "gpt2", "qwen3", "gemma2", "opt", "mixtral")
PROMPT, NEW = 5, 10


class Writer:
    """A language model that goes on with two prompts."""

    def __init__(self, case: Case, low: torch.dtype) -> None:
        torch.manual_seed(0)
        self.subject, self.low = Subject(case, "no_grad"), low
        self.prompts = torch.randint(3, 64, (2, PROMPT))

    def tokens(self, how: Callable[[Any], Any], around: AbstractContextManager, cache: str) -> Tensor:
        """[2, PROMPT + NEW], with `how` applied to what the model calls at each token."""
        model: Any = self.subject.model
        plain = model.forward
        model.forward = how(plain)
        try:
            with around:
                return model.generate(
                    self.prompts,
                    attention_mask=torch.ones_like(self.prompts),
                    do_sample=False,
                    use_cache=True,
                    min_new_tokens=NEW,
                    max_new_tokens=NEW,
                    cache_implementation=CACHES[cache],
                    disable_compile=True,
                )
        finally:
            model.forward = plain

    def difference(self, ours: Tensor, theirs: Tensor) -> str:
        """Where two texts first part, if no rounding explains it: in float64 the two tokens are further apart than
        twice the largest error of eager autocast's.
        """
        if ours.shape != theirs.shape:
            return f"{tuple(ours.shape)} tokens; eager {tuple(theirs.shape)}"
        for row, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            if (parted := (a != b).nonzero()).numel() == 0:
                continue
            place = int(parted[0])
            inputs = {"input_ids": a[None, :place]}
            near = self.subject.run(self.subject.model, inputs, autocast(self.low)).outputs[0][0, -1].double()
            exact = self.subject.exact(inputs).outputs[0][0, -1].double()
            apart, noise = float((exact[a[place]] - exact[b[place]]).abs()), float((near - exact).abs().max())
            if apart > 2 * noise:
                return f"row {row}, token {place}: {int(a[place])}, eager {int(b[place])}, {apart:.3g} apart"
        return ""


def judge(group: str, case: Case, low: torch.dtype, cache: str) -> Verdict:
    """Compare the text that amp and eager autocast write; the latter refuses a static cache in float32."""
    writer = Writer(case, low)
    theirs = writer.tokens(eager, autocast(low), "dynamic cache")
    same = False

    def differences(how: Callable[[Any], Any], around: AbstractContextManager) -> list[Difference]:
        nonlocal same
        ours = writer.tokens(how, around, cache)
        same = torch.equal(ours, theirs)
        text = writer.difference(ours, theirs)
        return [Difference("tokens", text)] if text else []

    found = try_out(lambda: differences(amp(lower="aot_eager", dtype=low), nullcontext()))
    if not found:
        return Verdict(group, {SAME if same else TIE: 1})
    there = try_out(lambda: differences(stock("aot_eager"), autocast(low)))
    return judge_differences(group, found, there)
