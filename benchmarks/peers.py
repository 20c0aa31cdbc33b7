"""The ways to run a model that are compared: compilers, precisions, CUDA graphs, or why one can't run here."""

import importlib.util
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from ampcompile.compiler.backend import amp
from ampcompile.config import Options


@dataclass(frozen=True)
class Peer:
    """One way to run a model."""

    name: str
    compiler: str
    """"eager", "inductor", "amp", or "amp's graph": the compiled code of amp's, called as stock torch.compile calls it,
    with copies of weights that are made once."""
    precision: str
    """"float32", "autocast" (by torch.autocast around the call), "converted" (the whole model), "compiled", or "float8"
    (linear layers by torchao's recipe "tensorwise", the rest by torch.autocast)."""
    graphs: bool = False
    """In CUDA graphs, by `mode="reduce-overhead"`; on a CPU that is the default mode."""
    whole: bool = False
    """The training step as one CUDA graph, by `ampcompile.capture_step`; on a CPU without a graph."""
    cpp: bool = False
    """Launched by generated C++ instead of Python: Inductor's `cpp_wrapper`."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the backend "amp"."""

    def say_unable(self) -> str:
        """Why this peer can't run here; empty if it can."""
        if self.precision == "float8" and importlib.util.find_spec("torchao") is None:
            return "torchao is not installed"
        try:
            Options.parse(self.options)
        except Exception as error:  # an option or a value of a policy that this version hasn't
            return f"{type(error).__name__}: {error}".splitlines()[0]
        return ""

    def open_context(self, device: str, dtype: torch.dtype) -> AbstractContextManager:
        """The context that the forward call runs in."""
        return torch.autocast(device, dtype) if self.precision in ("autocast", "float8") else nullcontext()

    def compile(self, model: nn.Module, dtype: torch.dtype) -> Callable[..., Any]:
        """The model, ready to be called; nothing is compiled before the first call."""
        if self.precision == "converted":
            model.to(dtype)
        if self.precision == "float8":
            quantize_by_torchao(model)
        if self.compiler == "eager":
            return model
        torch._inductor.config.cpp_wrapper = self.cpp  # of the whole process, which is the peer's own
        mode = "reduce-overhead" if self.graphs else "default"
        if self.compiler == "inductor":
            return torch.compile(model, mode=mode)
        # What it returns is in autocast's types, as what the others do.
        options = {"mode": mode, "dtype": dtype, "outputs": "autocast", **self.options}
        if self.compiler == "amp's graph":
            return torch.compile(model, backend=partial(_compile_without_checks, options))
        return torch.compile(model, backend="amp", options=options)


def quantize_by_torchao(model: nn.Module) -> None:
    """Let torchao replace the linear layers of a model, but for the head, as it advises."""
    float8: Any = importlib.import_module("torchao.float8")
    recipe = float8.Float8LinearConfig.from_recipe_name("tensorwise")
    float8.convert_to_float8_training(model, config=recipe, module_filter_fn=lambda _, name: "head" not in name)


def _compile_without_checks(
    options: dict[str, Any], gm: torch.fx.GraphModule, inputs: Sequence[Any]
) -> Callable[..., Any]:
    """Compile a graph as amp does; its code, given the copies that amp would give it after some calls."""
    graph: Any = amp(gm, inputs, options=options)
    held: list[Any] = []

    def call(*args: Any) -> Any:
        for _ in range(4 if not held else 0):  # by then those are packed for which it pays
            held[:] = graph._copies(args)
        return graph.compiled(*args, *held)

    return call


AMP, BASELINE = "amp", "Inductor + autocast"
SAME = "amp's graph, called by stock torch.compile"
"""A call of amp takes more by what is amp's own: its wrapper, and the look at all weights."""
CONVERTED = "Inductor, converted"
"""The whole model in the low type: fast, and not mixed precision any more."""
GRAPHS, CPP, WHOLE = ", CUDA graphs", ", C++ wrapper", ", the whole step in a CUDA graph"
"""Ways to launch"""
FP8, TORCHAO = "amp, fp8", "torchao float8"
SMALL = "amp, 7.1 bytes a parameter"
"""Parameters of the low type with masters of 24 bits, states in 8 bits."""
_IN_FP8 = {"policy": {"ops": {"linear": "fp8"}}}
PEERS = {
    peer.name: peer
    for peer in (
        Peer("eager float32", "eager", "float32"),
        Peer("eager autocast", "eager", "autocast"),
        Peer("Inductor float32", "inductor", "float32"),
        Peer(BASELINE, "inductor", "autocast"),
        Peer(CONVERTED, "inductor", "converted"),
        Peer(CONVERTED + GRAPHS, "inductor", "converted", graphs=True),
        Peer(AMP, "amp", "compiled"),
        *(Peer(BASELINE + how, "inductor", "autocast", how == GRAPHS, cpp=how == CPP) for how in (GRAPHS, CPP)),
        *(Peer(AMP + how, "amp", "compiled", how == GRAPHS, cpp=how == CPP) for how in (GRAPHS, CPP)),
        Peer(SAME, "amp's graph", "compiled"),
        Peer(AMP + WHOLE, "amp", "compiled", whole=True),
        *(
            Peer(FP8 + how, "amp", "compiled", how == GRAPHS, how == WHOLE, options=_IN_FP8)
            for how in ("", GRAPHS, WHOLE)
        ),
        *(Peer(SMALL + how, "amp", "converted", whole=how == WHOLE) for how in ("", WHOLE)),
        *(Peer(TORCHAO + how, "inductor", "float8", how == GRAPHS) for how in ("", GRAPHS)),
    )
}
