"""Which weights FSDP2 gathers in 16 bits: decided from the compiled graphs, by all ranks together.

At the start of a root's forward the ranks compare notes in one small collective, a few times early on and then ever
more rarely. A weight is switched when all know graphs that round it, none knows another reader, and none still waits
for a backward through it. Nothing but these votes changes how a weight is gathered, so ranks can't disagree.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ampcompile.dtypes import LOW, named
from ampcompile.errors import ShardingError
from ampcompile.policy import Policy
from ampcompile.torch_private import fsdp
from ampcompile.torch_private.dynamo_modules import see_as_parameters

from .weight import Gather, GatherRecord, ShardedWeight, roots

EARLY = 8
"""Calls of forward that begin with a vote; later those whose number is a power of two."""


class ShardPolicy:
    """How the weights below one or more roots are gathered. `str` is a table of them."""

    def __init__(self, roots: list[Root]) -> None:
        self._roots = roots

    def records(self) -> list[GatherRecord]:
        """How each weight is gathered now."""
        return [gather.record() for root in self._roots for gather in root.gathers]

    @property
    def bytes_saved(self) -> int:
        """The bytes that one gather of every weight saves each rank."""
        return sum(record.bytes_saved for record in self.records())

    def __str__(self) -> str:
        records = self.records()
        width = max((len(record.weight) for record in records), default=0)
        lines = [f"{r.weight:{width}} {r.gathered_as:4} {r.bytes_saved:>12,} {r.because}" for r in records]
        return "\n".join([*lines, f"{self.bytes_saved:,} bytes saved by each rank's gathers of all weights"])


class Root:
    """One root: its weights, and the hook before its forward in which the ranks vote."""

    def __init__(self, module: nn.Module) -> None:
        self.gathers = [_gather(name, param, group) for name, param, group in fsdp.params_of(module)]
        self.module, self.calls = module, 0
        module.register_forward_pre_hook(torch.compiler.disable(self.before_forward), prepend=True)
        roots.add(self)

    def choose(self, dtype: torch.dtype, policy: Policy) -> None:
        """Take all back to float32, and decide anew."""
        fsdp.reshard(self.module)
        for gather in self.gathers:
            gather.widen()
            gather.dtype = dtype
            gather.kept = "" if gather.param is not None else gather.kept
            if gather.param is not None and (dtype == torch.float32 or policy.keeps_fp32(gather.module)):
                gather.kept = "dtype=torch.float32" if dtype == torch.float32 else "the policy"
            gather.settled = bool(gather.kept)
        self.calls = 0

    def before_forward(self, module: nn.Module, args: Any) -> None:
        """Vote, in some of the calls."""
        if not fsdp.at_rest(module):  # a checkpoint computes it again
            return
        self.calls += 1
        if self.calls > EARLY and self.calls & (self.calls - 1):
            return
        open_questions: defaultdict[Any, list[Gather]] = defaultdict(list)
        for gather in self.gathers:
            if not gather.settled:
                open_questions[gather.param.mesh].append(gather)
        if open_questions:
            fsdp.reshard(module)  # after an evaluation FSDP keeps a root's own weights
        for mesh, gathers in open_questions.items():
            votes = torch.tensor([gather.vote() for gather in gathers], device=mesh.device_type)
            for dim in range(mesh.ndim):
                dist.all_reduce(votes, dist.ReduceOp.MIN, group=mesh.get_group(dim))
            for gather, vote in zip(gathers, votes.tolist(), strict=True):
                gather.settle(vote)


def _gather(name: str, param: Any, group: Any) -> Gather:
    gather = Gather(name)
    gather.kept = fsdp.why_not(param)
    if not gather.kept:
        gather.param = fsdp.SwitchableParam.adopt(param, group, gather.attach)
    return gather


def _note_another_backend(weight: Any) -> None:
    weight.gathering.read_in_float32("another backend's graph")


def shard_policy(
    model: nn.Module, dtype: torch.dtype | str | None = None, policy: Policy | str | Mapping[str, Any] | None = None
) -> ShardPolicy:
    """Let FSDP2 gather weights in 16 bits where every reader rounds them first: half the bytes, the same results.

    Call it on every rank after `fully_shard`, before the first forward, or later between steps; then each graph is
    compiled once more. Gathers begin in float32. Once all ranks have compiled the graphs that read a weight, and all
    of these round it to `dtype` before they use it, it is gathered in `dtype`. The rest stays float32: norms, what is
    read in both types, what eager code or another backend's graph reads. Gradients, their reduction and the shards that
    optimizers and checkpoints see are float32 as before.

    `dtype`: the type that the graphs compute in; default: the ambient autocast's, or that of the device. With
    `torch.float32` all gathers are float32 again. `policy`: weights of modules that it runs in `fp32` stay float32,
    for readers that come later. The result tells how each weight is gathered, at any time; `explain` does too.

    A reader in float32 that appears after the switch gets a ShardingError, on each rank that runs it. Raises
    ShardingError if `model` contains no module that was given to `fully_shard`, or is in the middle of a step.

    >>> def shard(model):
    ...     for block in model.blocks:
    ...         block.compile(backend="amp")
    ...         fully_shard(block)
    ...     return ampcompile.shard_policy(fully_shard(model), dtype=torch.bfloat16)
    """
    if not isinstance(model, nn.Module) or not (modules := fsdp.roots(model)):
        raise ShardingError(
            f"found no FSDP2 module in {type(model).__name__}, expected one: call ampcompile.shard_policy(model) after "
            "torch.distributed.fsdp.fully_shard(model)."
        )
    dtype, policy = named(dtype), Policy.parse(policy or "default")
    if dtype not in (None, *LOW, torch.float32):
        raise ShardingError(f"shard_policy got dtype={dtype}; expected torch.bfloat16, torch.float16 or torch.float32.")
    see_as_parameters(ShardedWeight, _note_another_backend)
    known = {root.module: root for root in roots}
    chosen = [known.get(module) or Root(module) for module in modules]
    for root in chosen:
        device_type = next((gather.param.mesh.device_type for gather in root.gathers if gather.param), "cpu")
        root.choose(dtype or torch.get_autocast_dtype(device_type), policy)
    return ShardPolicy(chosen)
