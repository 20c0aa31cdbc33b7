"""Who runs the rewritten graph: Inductor, AOTAutograd with eager kernels, or the graph itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.fx import GraphModule

from . import compat
from .config import Options


def lower(gm: GraphModule, example_inputs: Sequence[Any], options: Options) -> Callable[..., Any]:
    """The callable that Dynamo installs. Casts are explicit in `gm`: no autocast acts while it is lowered or runs."""
    if options.lower == "eager":
        return _without_autocast(gm)
    with compat.lowering_without_autocast():
        if options.lower == "aot_eager":
            from torch._dynamo.backends.debugging import aot_eager

            return aot_eager(gm, list(example_inputs))
        from torch._inductor.compile_fx import compile_fx

        patches = {"emulate_precision_casts": options.numerics == "eager", **dict(options.inductor)}
        return compile_fx(gm, list(example_inputs), config_patches=patches)


def _without_autocast(gm: GraphModule) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        with compat.autocast_off():
            return gm(*args)

    return run
