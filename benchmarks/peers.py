"""The peers that users would choose instead: ways to run a model, each with its settings, or why it can't run."""

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import nn

from ampcompile.config import FUSE_FAMILIES


@dataclass(frozen=True)
class Peer:
    """One way to run a model."""

    name: str
    compiler: str
    """"eager", "inductor", "thunder" or "amp"."""
    precision: str
    """"float32", "autocast" (by torch.autocast around the call), "converted" (the whole model) or "compiled"."""
    mode: str = "default"
    options: tuple[tuple[str, Any], ...] = ()
    freezing: bool = False
    """True if weights become constants of the graph, cast once: for Inductor, without gradients."""
    by_block: bool = False
    """True if each block of the model, and each module beside them, is compiled by itself, as Accelerate's
    `compile_regions` does."""

    @property
    def low(self) -> bool:
        """True if it computes in the low-precision type."""
        return self.precision != "float32"

    def unable(self, device: str) -> str | None:
        """Why this peer can't run here, or None."""
        if device == "cpu" and self.mode == "reduce-overhead":
            return "on a CPU reduce-overhead is the default mode: all it adds is CUDA graphs"
        if self.compiler == "thunder":
            return unusable("thunder", "lightning-thunder")
        return None

    def around(self, device: str, dtype: torch.dtype) -> AbstractContextManager:
        """The context that the forward call runs in."""
        return torch.autocast(device, dtype) if self.precision == "autocast" else nullcontext()

    def compiled(self, model: nn.Module, dtype: torch.dtype) -> Callable[..., Any]:
        """The model, ready to be called; nothing is compiled before the first call."""
        if self.by_block:
            alone = replace(self, by_block=False)
            for name, child in list(model.named_children()):
                parts = child.named_children() if isinstance(child, nn.ModuleList) else [("", child)]
                for index, part in list(parts):
                    model.set_submodule(f"{name}.{index}".strip("."), alone.compiled(part, dtype))  # type: ignore[arg-type]
            return model
        if self.compiler == "eager":
            return model
        if self.compiler == "thunder":
            return importlib.import_module("thunder").jit(model)
        if self.compiler == "inductor":
            mode = None if self.options else self.mode
            # For the whole process, which is the peer's own: Dynamo reads it while it traces, and no option tells it.
            torch._inductor.config.freezing = self.freezing
            return torch.compile(model, mode=mode, options=dict(self.options) or None)
        # What they return is in autocast's types, as what the others do.
        options = {"mode": self.mode, **dict(self.options), "dtype": dtype, "outputs": "autocast"}
        return torch.compile(model, backend="amp", options=options)

    def settings(self) -> dict[str, Any]:
        """The settings that a reader needs to run it too."""
        found: dict[str, Any] = {"compiler": self.compiler, "precision": self.precision}
        if self.compiler in ("inductor", "amp"):
            found |= {"mode": self.mode, "options": dict(self.options)}
        if self.freezing:
            found["torch._inductor.config.freezing"] = True
        return found


KNOWN = {
    "lightning-thunder": "; 0.2.6, tried, runs with torch 2.11 and can't be imported with 2.13: no Tensor.align_as"
}


def unusable(module: str, distribution: str) -> str | None:
    """Why a package can't be used here, or None."""
    try:
        found = version(distribution)
    except PackageNotFoundError:
        return f"{distribution} is not installed{KNOWN.get(distribution, '')}"
    try:
        importlib.import_module(module)
    except Exception as error:
        return f"{distribution} {found} can't be imported with torch {torch.__version__}: {error}"
    return None


def liger_unusable(device: str) -> str | None:
    """Why Liger-Kernel's kernels can't run here, or None."""
    return unusable("liger_kernel", "liger-kernel") if device == "cuda" else "its kernels are Triton's: they need a GPU"


AMP = "amp"
RELAXED = f"{AMP}, relaxed"
"""Without eager autocast's roundings inside fused kernels, as Inductor computes by itself."""
BASELINE = "Inductor + autocast"
FUSING = tuple(f"{AMP}, fuse={family}" for family in ("none", *FUSE_FAMILIES))
"""Each family of fused kernels on, and all off; without a word the cost rule decides."""
BY_BLOCK = (f"{BASELINE}, by block", f"{AMP}, by block")
"""Regional compilation, the recommended way for large models."""
LIMIT = "Inductor, converted"
"""The whole model in the low type: fast, and not mixed precision any more."""

PEERS = {
    peer.name: peer
    for peer in (
        Peer("eager fp32", "eager", "float32"),
        Peer("eager autocast", "eager", "autocast"),
        Peer("Inductor fp32", "inductor", "float32"),
        Peer(BASELINE, "inductor", "autocast"),
        Peer(f"{BASELINE}, max-autotune", "inductor", "autocast", mode="max-autotune"),
        Peer(f"{BASELINE}, reduce-overhead", "inductor", "autocast", mode="reduce-overhead"),
        Peer(f"{BASELINE}, freezing", "inductor", "autocast", freezing=True),
        Peer("Thunder + autocast", "thunder", "autocast"),
        Peer(LIMIT, "inductor", "converted"),
        Peer(f"{LIMIT}, reduce-overhead", "inductor", "converted", mode="reduce-overhead"),
        Peer(AMP, "amp", "compiled"),
        Peer(RELAXED, "amp", "compiled", options=(("numerics", "relaxed"),)),
        Peer(f"{AMP}, max-autotune", "amp", "compiled", mode="max-autotune"),
        Peer(f"{AMP}, reduce-overhead", "amp", "compiled", mode="reduce-overhead"),
        Peer(BY_BLOCK[0], "inductor", "autocast", by_block=True),
        Peer(BY_BLOCK[1], "amp", "autocast", by_block=True),
        *(Peer(name, "amp", "compiled", options=(("fuse", name.partition("=")[2]),)) for name in FUSING),
    )
}
