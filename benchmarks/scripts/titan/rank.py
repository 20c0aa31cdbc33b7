"""One rank of torchtitan's trainer as it stands, noting losses, the bytes that it gives to collectives, and weights.

python rank.py FIGURES.pt OPTIONS ARGUMENTS...   in a folder with torchtitan in it; OPTIONS are torch.compile's, as JSON
"""

import functools
import json
import sys
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.scripts.titan import without_gpu


def counting(name: str, counts: list[int]) -> None:
    """Add to the last of `counts` the bytes of each input of a collective, which FSDP looks up in torch.distributed."""
    call = getattr(dist, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        _, given = (*args, *kwargs.values())[:2]
        counts[-1] += given.nbytes
        return call(*args, **kwargs)

    setattr(dist, name, counted)


def main() -> None:
    """Write {"losses", "gathered", "reduced": one for each step, "weights": by name, before and after}."""
    path, options = sys.argv[1], json.loads(sys.argv[2])
    del sys.argv[1:3]
    without_gpu.pretend()
    from torchtitan.train import Trainer
    from torchtitan.train import main as run

    if options:
        torch.compile = functools.partial(torch.compile, options=options)
    gathered, reduced, losses, weights = [0], [0], list[float](), list[dict[str, torch.Tensor]]()
    counting("all_gather_single", gathered)
    counting("reduce_scatter_single", reduced)
    found = {"losses": losses, "gathered": gathered, "reduced": reduced, "weights": weights}

    class Noting(Trainer):
        def note_weights(self) -> None:
            named = self.model_parts[0].named_parameters()
            weights.append({name.replace("_orig_mod.", ""): p.full_tensor().detach() for name, p in named})

        def train(self) -> None:
            log = self.metrics_processor.log

            def noting_loss(step: int, loss: float, *args: Any, **kwargs: Any) -> None:
                losses.append(loss)
                log(step, loss, *args, **kwargs)

            self.metrics_processor.log = noting_loss
            self.note_weights()
            super().train()
            self.note_weights()
            if dist.get_rank() == 0:
                torch.save(found, path)

        def train_step(self, batches: Any) -> None:
            super().train_step(batches)
            gathered.append(0)
            reduced.append(0)

    run(Noting)


if __name__ == "__main__":
    main()
