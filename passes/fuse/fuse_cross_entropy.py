"""Cross entropy reads 16-bit logits themselves where a cast to float32 stands between: `kernels/cross_entropy.py`."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import GraphModule

from ampcompile.kernels.cross_entropy import CROSS_ENTROPY
from ampcompile.passes.analysis.sizes import elements_hint
from ampcompile.passes.graph import erase_unread, graphs, op_name
from ampcompile.torch_private import tracing

from .losses import Loss, losses, repeat_views
from .matching import Fusion, FusionCost, fuse


@dataclass(frozen=True)
class FuseCrossEntropy:
    """Returns how many losses were fused. Sums of exp are taken in another order than torch's.

    By count Inductor's own loops move as many bytes: they read the logits once forward, and in backward once, writing
    the gradient over them. So only who asks for it gets it.
    """

    cost: FusionCost
    family = "cross_entropy"
    name = "fuse_cross_entropy"
    exact = False
    fate = "fused"

    def apply(self, gm: GraphModule) -> int:
        with tracing.on_fakes_of(gm):
            return sum(self._fuse(loss) for graph in graphs(gm) for loss in list(losses(graph)))

    def _fuse(self, loss: Loss) -> bool:
        value = loss.logits.meta["val"]
        size = elements_hint(value)
        if not self.cost.pays(value.device, 0, None if size is None else 3 * size * value.itemsize):
            return False
        with loss.node.graph.inserting_before(loss.node):
            logits = repeat_views(loss.path, loss.logits)
        record = Fusion(self.family, op_name(loss.node.target), 0)
        fuse(loss.node, CROSS_ENTROPY, (logits, loss.target, loss.weight, *loss.kind), record, [loss.node])
        erase_unread([*loss.path, loss.node])
        return True
