"""Which weights FSDP2 gathers in 16 bits: decided once, from the graphs that the first forward ran.

A graph is compiled while FSDP holds the weights that it was given, so the first gathers come before anything is known:
they are in float32. At the start of a root's second forward each rank knows who read its weights in the first, and in
the backward between them; FSDP's own gathers keep the ranks at the same forward. A weight is gathered in 16 bits from
then on if compiled graphs rounded it and nothing else read it. Ranks whose programs are the same decide the same, but
some aren't: an expert without tokens, a norm that rank 0 logs. Ranks that gather different numbers of bytes wait for
ever, or mix them up, so one collective of a byte for each weight makes the decision common; what any rank objects to
stays float32. Nothing later changes how a weight is gathered but another call of `shard_policy`.
"""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ampcompile.dtypes import LOW, named, short_name
from ampcompile.errors import UnsupportedError
from ampcompile.policy import Policy
from ampcompile.torch_private import fsdp, marks
from ampcompile.torch_private.dynamo import see_as_parameters

from .weight import Gather, GatherRecord, ShardedWeight, roots

E4M3 = torch.float8_e4m3fn


class ShardPolicy:
    """How the weights below one or more roots are gathered. `str` is a table of them."""

    def __init__(self, roots: "list[Root]") -> None:
        self._roots = roots

    def records(self) -> list[GatherRecord]:
        """How each weight is gathered now."""
        return [record for root in self._roots for record in root.records()]

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
    """One root: its weights, and the hooks around its forward: the first decides."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.calls = module, 0
        found = [(name, param, group, fsdp.why_not(param)) for name, param, group in fsdp.params_of(module)]
        self.gathers = [Gather(name, fsdp.GatheredParam(param, group)) for name, param, group, why in found if not why]
        kept = [(name, param.sharded_param.dtype, why) for name, param, _, why in found if why]
        self.others = [GatherRecord(name, short_name(dtype), why, 0) for name, dtype, why in kept]
        module.register_forward_pre_hook(torch.compiler.disable(self.before_forward), prepend=True)
        module.register_forward_hook(torch.compiler.disable(self.after_forward), always_call=True)
        roots.add(self)

    def records(self) -> list[GatherRecord]:
        """How each weight is gathered from the next gather on."""
        return [gather.record() for gather in self.gathers] + self.others

    def choose(self, dtype: torch.dtype, policy: Policy, fp8: bool) -> None:
        """Take all back to float32, and decide anew."""
        fsdp.reshard(self.module)
        self.calls = 0
        for gather in self.gathers:
            kept = "the policy" if policy.of_module(gather.module) == "fp32" else ""
            kept = "dtype=torch.float32" if dtype == torch.float32 else kept
            gather.decide(None)
            gather.param.forget()
            gather.forget(gather.wide if gather.wide in LOW else dtype, fp8, kept)

    def before_forward(self, module: nn.Module, args: Any) -> None:
        """Decide, in the second call; let the first gather measure all that is quantized."""
        self.calls += 1
        for gather in self.gathers:
            gather.param.attach()
        if self.calls == 2:
            self.decide()
        quantized = [gather.param for gather in self.gathers if gather.param.low == E4M3]
        for param in quantized:
            param.together, param.measured = quantized, False

    def after_forward(self, *_: Any) -> None:
        """From here on somebody may write shards: what is gathered outside of forward and backward is measured anew."""
        for gather in self.gathers:
            gather.param.together = None

    def decide(self) -> None:
        """Gather in 16 or 8 bits what no rank objects to, of those that share the weight."""
        by_group: defaultdict[Any, list[Gather]] = defaultdict(list)
        for gather in self.gathers:
            by_group[gather.param.process_group].append(gather)
        for group, gathers in by_group.items():
            objections = [[not gather.may_be(dtype) for dtype in (gather.dtype, E4M3)] for gather in gathers]
            votes = torch.tensor(objections, device=gathers[0].param.device).to(torch.uint8)
            dist.all_reduce(votes, dist.ReduceOp.MAX, group=group)
            for gather, (to_low, to_fp8) in zip(gathers, votes.tolist(), strict=True):
                gather.decide(None if to_low and to_fp8 else E4M3 if to_low else gather.dtype)


def _note_another_backend(weight: Any) -> None:
    weight.gathering.lasting = "another backend's graph"
    weight.gathering.read_whole(weight.gathering.lasting)


@marks.run_untraced
def shard_policy(
    model: nn.Module,
    dtype: torch.dtype | str | None = None,
    policy: Policy | str | Mapping[str, Any] | None = None,
    fp8: bool = True,
) -> ShardPolicy:
    """Let FSDP2 gather weights in 16 bits where every reader rounds them first: half the bytes, the same results.

    And in 8 bits where every reader multiplies them in fp8, as `options={"policy": ...}` of the compiled graphs says.

    Call it on every rank after `fully_shard`, before the first forward, or later between steps; then each graph is
    compiled once more. The next forward gathers in float32. From the one after it on, a weight is gathered in `dtype`
    if on all ranks compiled graphs read it and round it to `dtype` before they use it. The rest stays float32: norms,
    what is read in both types, what eager code or another backend's graph reads, what isn't read in that forward.
    Weights of 16 bits, as with masters, are gathered as they are, or in 8 bits.
    Gradients, their reduction and the shards that optimizers and checkpoints see are float32 as before.

    `dtype`: the type that the graphs compute in; default: the ambient autocast's, or that of the device. With
    `torch.float32` all gathers are float32 again. `policy`: weights of modules that it runs in `fp32` stay float32,
    for readers that come later. `fp8`: with False, graphs compiled from now on multiply gathered weights in 16 bits.
    The result tells how each weight is gathered, at any time; `explain` does too.

    A reader in float32 that appears later gets an UnsupportedError, on each rank that runs it. Raises
    UnsupportedError if `model` contains no module that was given to `fully_shard`.

    >>> def shard(model):
    ...     for block in model.blocks:
    ...         block.compile(backend="amp")
    ...         fully_shard(block)
    ...     return ampcompile.shard_policy(fully_shard(model), dtype=torch.bfloat16)
    """
    if not isinstance(model, nn.Module) or not (modules := fsdp.roots(model)):
        raise UnsupportedError(
            f"found no FSDP2 module in {type(model).__name__}, expected one: call ampcompile.shard_policy(model) after "
            "torch.distributed.fsdp.fully_shard(model)."
        )
    dtype, policy = named(dtype), Policy.parse(policy or "default")
    if dtype not in (None, *LOW, torch.float32):
        raise UnsupportedError(
            f"shard_policy got dtype={dtype}; expected torch.bfloat16, torch.float16 or torch.float32."
        )
    see_as_parameters(ShardedWeight, _note_another_backend)
    known = {root.module: root for root in roots}
    chosen = [known.get(module) or Root(module) for module in modules]
    for root in chosen:
        device_types = [gather.param.device.type for gather in root.gathers]
        root.choose(dtype or torch.get_autocast_dtype([*device_types, "cpu"][0]), policy, fp8)
    return ShardPolicy(chosen)
