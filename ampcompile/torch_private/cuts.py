"""The cut of a joint graph into forward and backward: how it is made, and how others are told of it."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple
from uuid import uuid4

from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._functorch import config
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch.fx import GraphModule


class Cut(NamedTuple):
    """Forward and backward of a graph. Forward returns `results` values, and behind them what backward keeps."""

    forward: GraphModule
    backward: GraphModule
    results: int


def within_budget(budget: float | None) -> AbstractContextManager[Any]:
    """Let cuts in the context keep at most this share of what they would. Caches know it by their keys."""
    return nullcontext() if budget is None else config.patch(activation_memory_budget=budget)


def budget_of(gm: GraphModule) -> float:
    """The budget of a joint graph that is about to be cut: that of the user's region around it, or of the setting."""
    for node in gm.graph.nodes:
        custom = node.meta.get("custom")
        if isinstance(custom, dict) and (budget := custom.get("_region_activation_memory_budget")) is not None:
            return float(budget)
    return config.activation_memory_budget


def keep_what_is_marked(gm: GraphModule) -> None:
    """Let a joint graph that is about to be cut keep what is marked so, under a budget of 0, too."""
    if config.activation_memory_budget == 0:
        next(iter(gm.graph.nodes)).meta["memory_budget"] = 1e-9


OnCut = Callable[[Cut], None]


class Cutter(CustomPartitionerFn):
    """Cuts by `cut`, a partitioner of a user's own, or by torch's; `change` then changes the graphs, and `on_cut` sees
    them. `key`: differs in caches wherever `change` may do something different."""

    def __init__(
        self, cut: Callable[..., Any] | None, on_cut: OnCut | None, change: OnCut | None = None, key: str = ""
    ) -> None:
        self.cut, self.on_cut = cut or min_cut_rematerialization_partition, on_cut
        self.change, self.key = change, key

    def __call__(
        self, gm: GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[GraphModule, GraphModule]:
        forward, backward = self.cut(gm, joint_inputs, **kwargs)
        cut = Cut(forward, backward, kwargs["num_fwd_outputs"])
        for each in (self.change, self.on_cut):
            if each is not None:
                each(cut)
        return cut.forward, cut.backward

    def __reduce_ex__(self, protocol: Any) -> Any:
        """What Inductor's caches hash instead of the object."""
        return str, (self.uuid(),)

    def uuid(self) -> str:
        """A new one each time if `on_cut` is to see the cut, since a cut from a cache isn't made, and can't be seen."""
        return str(uuid4()) if self.on_cut is not None else self.key


def run_as_it_is(gm: GraphModule, inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
    """What compiles nothing, in the place of Inductor's `compile_fx_inner`."""
    return make_boxed_func(gm.forward)
