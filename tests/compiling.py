"""Compile a function with amp, keep every graph, and hold each decision against the dtype that autocast's trace saw."""

import copy
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from ampcompile.compiler import inductor
from ampcompile.compiler.backend import Rewritten, rewrite
from ampcompile.compiler.lower import lower
from ampcompile.config import Options
from ampcompile.passes import pipeline
from ampcompile.passes.after import keep_in_8_bits
from ampcompile.passes.base import Pass
from ampcompile.passes.decide.assign_precision import AssignPrecision
from ampcompile.passes.graph import graphs
from benchmarks.numbers import bits as bits
from benchmarks.numbers import same_bits as same_bits

LOW, HALF, HIGH = torch.bfloat16, torch.float16, torch.float32


@dataclass
class Recorder:
    """A backend that is amp and keeps what it was asked. `disagreements`: where a decision gives another dtype."""

    options: Options
    graphs: list[Rewritten] = field(default_factory=list)
    traced: list[str] = field(default_factory=list)
    compared: int = 0
    disagreements: list[str] = field(default_factory=list)

    def amp_options(self, **kwargs: Any) -> Options:  # how `ambient` knows a backend of ours
        return self.options

    def __call__(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        self.graphs.append(rewrite(gm, example_inputs, self.options, self._watch))
        return lower(self.graphs[-1].graph, example_inputs, self.options)

    def _watch(self, done: Pass | None, gm: GraphModule) -> None:
        if isinstance(done, AssignPrecision):
            self.traced.append(text(gm))
            self._compare(gm)

    def _compare(self, gm: GraphModule) -> None:
        for node in (node for graph in graphs(gm) for node in graph.graph.nodes):
            if node.op != "call_function" or "val" not in node.meta:
                continue
            seen, decided = (pytree.tree_leaves(v) for v in (node.meta["val"], node.meta["amp"].result))
            for a, b in zip(seen, decided, strict=True):
                if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
                    self.compared += 1
                    if a.dtype != b.dtype:
                        self.disagreements.append(f"{node.format_node()}: autocast {a.dtype}, decided {b.dtype}")


def amp(f: Any, **options: Any) -> tuple[Any, Recorder]:
    """`f` compiled in one graph, by AOTAutograd unless `lower` says otherwise, and the record of it."""
    return compiled(f, fullgraph=True, **options)


def compiled(f: Any, fullgraph: bool = False, dynamic: bool | None = None, **options: Any) -> tuple[Any, Recorder]:
    """The same; graph breaks are allowed. Results keep eager autocast's dtypes, to be compared with."""
    recorder = Recorder(Options.parse({"lower": "aot_eager", "outputs": "autocast", **options}))
    return torch.compile(f, backend=recorder, fullgraph=fullgraph, dynamic=dynamic), recorder


def text(gm: GraphModule) -> str:
    """A graph with the dtype of every value, `linear: bf16 = aten.linear(x: f32, ...)`, and its bodies below."""
    lines = [line for line in gm.print_readable(print_output=False).splitlines() if not line.strip().startswith("#")]
    return "\n".join(line.split(";  ")[0] for line in lines if line.strip())


def eager(f: Callable[..., Any], *args: Any, dtype: torch.dtype = LOW, **kwargs: Any) -> Any:
    """What eager autocast gives; without its cache, which hands out casts in the dtype of an earlier region."""
    with torch.autocast("cpu", dtype, cache_enabled=False):
        return f(*args, **kwargs)


def dtypes(values: Any) -> list[Any]:
    """The dtypes of all tensors in a structure, in order."""
    return [value.dtype for value in pytree.tree_leaves(values) if isinstance(value, torch.Tensor)]


def gradients(module: torch.nn.Module, run: Callable[[torch.nn.Module], torch.Tensor]) -> list[torch.Tensor | None]:
    """The gradients of a scalar with respect to a module's parameters."""
    module.zero_grad()
    run(module).backward()
    return [p.grad for p in module.parameters()]


def change_passes(patch: pytest.MonkeyPatch, leave_out: Pass | None = None, add: Sequence[Pass] = ()) -> None:
    """Compile without a pass that runs after differentiation, or with more of them."""
    after = pipeline.after
    patch.setattr(pipeline, "after", lambda *args: [*(p for p in after(*args) if p != leave_out), *add])


def compile_anew(patch: pytest.MonkeyPatch) -> None:
    """Take nothing from Inductor's caches."""
    patch.setattr(inductor, "cache_key", lambda *_: str(uuid.uuid4()))


def keep_small_values_too(patch: pytest.MonkeyPatch) -> None:
    """In 8 bits."""
    patch.setattr(keep_in_8_bits, "least", 0)


def error(values: Sequence[torch.Tensor | None], exact: Sequence[torch.Tensor | None]) -> float:
    """Relative L2 distance of all values together from exact ones."""
    pairs = [
        (v.detach().double(), e.detach()) for v, e in zip(values, exact, strict=True) if v is not None and e is not None
    ]
    assert pairs and sum(v is None for v in values) == sum(e is None for e in exact)
    return float((sum((v - e).square().sum() for v, e in pairs) / sum(e.square().sum() for _, e in pairs)).sqrt())


def draws(model: torch.nn.Module, *twins: torch.nn.Module, count: int = 8) -> Iterator[int]:
    """`count` times, each but the first with every weight shuffled, to the same weights in all models.

    To sum errors over: of the few numbers of one draw either side may be nearer by chance.
    """
    for draw in range(count):
        if draw:
            with torch.no_grad():
                for weight in model.parameters():
                    weight.copy_(weight.flatten()[torch.randperm(weight.numel())].view_as(weight))
        for twin in twins:
            twin.load_state_dict(model.state_dict())
        yield draw


def training_errors(
    module: torch.nn.Module, loss: Callable[..., torch.Tensor], inputs: Sequence[torch.Tensor], **options: Any
) -> tuple[float, float, Recorder]:
    """Gradient errors against float64 of eager autocast and of amp: `loss(module, *inputs)` is called.

    They are sums over `draws` of weights, and of inputs where those are floating-point numbers.
    """
    exactly, eagerly, ours = copy.deepcopy(module).double(), copy.deepcopy(module), copy.deepcopy(module)
    run, recorder = amp(lambda *xs: loss(ours, *xs), **options)

    def under_autocast(m: torch.nn.Module, given: Sequence[torch.Tensor]) -> torch.Tensor:
        with torch.autocast("cpu", LOW):
            return loss(m, *given)

    theirs = mine = 0.0
    for draw in draws(eagerly, ours, exactly):
        given = [torch.randn_like(x) if draw and x.is_floating_point() else x for x in inputs]
        wide = [x.double() if x.is_floating_point() else x for x in given]
        exact = gradients(exactly, lambda m, wide=wide: loss(m, *wide))
        theirs += error(gradients(eagerly, lambda m, given=given: under_autocast(m, given)), exact)
        mine += error(gradients(ours, lambda _, given=given: run(*given)), exact)
    return theirs, mine, recorder


def regions(name: str) -> Any:
    """Autocast around a call, by what it is: absent, the same, another dtype, disabled."""
    return {
        "absent": nullcontext(),
        "ambient": torch.autocast("cpu", LOW),
        "half": torch.autocast("cpu", HALF),
        "disabled": torch.autocast("cpu", enabled=False),
    }[name]
