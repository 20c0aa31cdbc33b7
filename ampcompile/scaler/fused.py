"""The fused step: on each device, one check of all gradients and one update of all weights."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ampcompile.kernels.adam import AdamTensors, adam_
from ampcompile.kernels.check_grads import check_grads
from ampcompile.kernels.sgd import SgdTensors, sgd_
from ampcompile.torch_private import profiling
from ampcompile.weights import WritableCopies, writable_copies

from .pending import Gradients, PerDevice


@dataclass
class FusedStep:
    """One step of one optimizer; empty where no parameter has a gradient."""

    optimizer: torch.optim.Optimizer
    grads: Gradients
    work: dict[torch.device, AdamTensors | SgdTensors]
    distributed: list[Tensor]
    """The weights if some are DTensors, of which `work` has the local parts."""
    workspaces: dict[torch.device, dict[str, Any]]
    """The buffers that the kernels keep between steps."""

    def check(
        self, scale: Tensor | None, multipliers: Mapping[torch.device, Tensor], max_norm: float | None = None
    ) -> tuple[PerDevice, PerDevice, Tensor]:
        """Return overflow flags and multipliers by device, and the norm of all gradients; see `check_grads`."""
        alone = len(self.work) == 1
        checks = {
            device: check_grads(
                tensors.grads,
                None if scale is None else scale.to(device, non_blocking=True),
                multipliers.get(device),
                max_norm if alone else None,
                self.workspaces.setdefault(device, {}),
                tensors.same,
            )
            for device, tensors in self.work.items()
        }
        first = next(iter(checks.values()))
        found_infs = {device: check.found_inf for device, check in checks.items()}
        factors = {device: check.multiplier for device, check in checks.items()}
        if alone or max_norm is None:
            return found_infs, factors, first.norm
        norm, shrink = clip_over_devices([check.norm for check in checks.values()], max_norm)
        return found_infs, {d: f * shrink.to(d, non_blocking=True) for d, f in factors.items()}, norm

    def run(self, multipliers: Mapping[torch.device, Tensor], found_infs: Iterable[Tensor]) -> None:
        """Update the weights, unless one of `found_infs` isn't 0; bring their copies up to date either way."""
        name = type(self.optimizer).__name__
        with profiling.region(f"Optimizer.step#{name}.step"), torch.no_grad():  # torch's own name
            found_inf = any_set(found_infs)
            for device, tensors in self.work.items():
                workspace = self.workspaces.setdefault(device, {})
                lent, others = lend_copies(tensors)
                skip = None if found_inf is None else found_inf.to(device, non_blocking=True)
                update = sgd_ if isinstance(tensors, SgdTensors) else adam_
                update(tensors, multipliers.get(device), skip, workspace)  # type: ignore[arg-type]
                written = [*tensors.params, *(copy for copy in tensors.copies if copy is not None)]
                torch.autograd.graph.increment_version(written)
                for param, copy in others:
                    copy.copy_(param)
                lent.mark_written()
            torch.autograd.graph.increment_version(self.distributed)
        if hasattr(self.optimizer.step, "_wrapped_by_lr_sched"):
            self.optimizer._opt_called = True  # type: ignore[attr-defined]


def lend_copies(tensors: AdamTensors | SgdTensors) -> tuple[WritableCopies, list[tuple[Tensor, Tensor]]]:
    """Make the kernels write one copy of each float32 weight; returns all, and the others with their weights."""
    tensors.copies = [None] * len(tensors.params)
    lent = writable_copies(tensors.params)
    others = []
    for i, copies in lent.buffers.items():  # laid out as the weight is
        if tensors.kept[i] is None:
            tensors.copies[i], *copies = copies
        others += [(tensors.params[i], copy) for copy in copies]
    return lent, others


def any_set(found_infs: Iterable[Tensor]) -> Tensor | None:
    """Return one flag that isn't 0 if any of these isn't, on the device of the first; None if there are none."""
    flags = list(found_infs)
    if len(flags) <= 1:
        return flags[0] if flags else None
    return torch.stack([f.to(flags[0].device, non_blocking=True).reshape(()) for f in flags]).ne(0).any().float()


def clip_over_devices(norms: list[Tensor], max_norm: float) -> tuple[Tensor, Tensor]:
    """The norm of gradients on several devices, and the factor that clips them; on the first device."""
    norm = torch.linalg.vector_norm(torch.stack([n.to(norms[0].device, non_blocking=True) for n in norms]))
    return norm, (max_norm / (norm + 1e-6)).clamp(max=1)
