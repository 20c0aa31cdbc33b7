"""Runs a script of PyTorch's benchmarks/dynamo as it is; around it, what it lacks offline and with newer releases.

python -m proof.dashboard.launch SCRIPT ARGUMENT ...

Nothing is downloaded or installed: models are built with random weights, from the configurations that the names on the
hub stand for.
"""

from __future__ import annotations

import importlib
import runpy
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.backends.registry import list_backends, register_backend

from ampcompile.compiler.backend import amp
from proof.models.missing_ops import stand_in

HUB = {
    "allenai/longformer-base-4096": ("LongformerConfig", {}),
    "camembert-base": (
        "CamembertConfig",
        {"vocab_size": 32005, "max_position_embeddings": 514, "type_vocab_size": 1},
    ),
    "distilgpt2": ("GPT2Config", {"n_layer": 6}),
    "google/fnet-base": ("FNetConfig", {}),
    "t5-small": ("T5Config", {}),
    "YituTech/conv-bert-base": ("ConvBertConfig", {}),
}
"""Name on the hub that huggingface.py asks for → the configuration that it stands for."""
BACKENDS: dict[str, dict[str, Any]] = {
    "inductor": {"backend": "inductor"},
    "amp": {"backend": "amp", "options": {"outputs": "autocast"}},
    "amp_every_call": {"backend": "amp", "options": {"outputs": "autocast", "weights": "every_call"}},
}
"""Names that `--backend` may take → arguments of torch.compile. The scripts compare the dtypes of results too."""
compiled: dict[Callable[..., Any], Callable[..., Any]] = {}
"""Function that a script compiles → what torch.compile made of it."""


def optimize(original: Callable[..., Any], backend: Any = "inductor", **named: Any) -> Callable[..., Any]:
    """In place of `torch._dynamo.optimize`, whose backends have no options."""
    if not isinstance(backend, str):  # torch.compile itself calls this
        return original(backend, **named)

    def compile(function: Callable[..., Any]) -> Callable[..., Any]:
        compiled[function] = torch.compile(function, fullgraph=named["nopython"], **BACKENDS[backend])
        return compiled[function]

    return compile


def run(function: Callable[..., Any]) -> Callable[..., Any]:
    """In place of `torch._dynamo.run`, which compiles nothing either, but calls the function instead of what
    torch.compile made of it: graphs of amp fit only under the autocast that amp opens there, around each call.
    """

    def call(*arguments: Any, **named: Any) -> Any:
        with torch.compiler.set_stance("eager_on_recompile"):
            return compiled[function](*arguments, **named)

    return call


def adapt_transformers() -> None:
    """Build configurations without the hub; no caches of keys and values; no graph break at a warning."""
    import transformers
    from transformers.utils.logging import warning_once

    def from_pretrained(name: str, **_: object) -> Any:
        config, changes = HUB[name]
        return getattr(transformers, config)(**changes)

    build = transformers.PreTrainedModel.__init__

    def without_cache(self: Any, config: Any, *arguments: Any, **named: Any) -> None:
        config.use_cache = False
        build(self, config, *arguments, **named)

    transformers.AutoConfig.from_pretrained = staticmethod(from_pretrained)
    transformers.PreTrainedModel.__init__ = without_cache
    torch._dynamo.config.ignore_logging_functions.add(warning_once)


def adapt_timm() -> None:
    """Build models without their trained weights."""
    timm: Any = importlib.import_module("timm.models")
    create = timm.create_model
    timm.create_model = lambda name, *, pretrained, **named: create(name, pretrained=False, **named)


ADAPT = {"huggingface": adapt_transformers, "timm_models": adapt_timm}


def refuse(command: Any, *_: object, **__: object) -> None:
    """In place of `subprocess.check_call`, by which the scripts install packages that they miss."""
    raise RuntimeError(f"the benchmark script wants to run {command}: install what it lacks by hand")


def main(script: str, *arguments: str) -> None:
    """Run a script as its own main program."""
    stand_in()
    ADAPT[Path(script).stem]()
    dynamo: Any = torch._dynamo
    dynamo.optimize, dynamo.run = partial(optimize, dynamo.optimize), run
    for name in BACKENDS.keys() - set(list_backends(exclude_tags=None)):
        register_backend(amp, name=name)  # the scripts take no other names
    vars(subprocess)["check_call"] = refuse
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).parent)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
