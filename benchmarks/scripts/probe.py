"""Run a script as it stands, and note each step's loss, and how long the process has computed until then.

python probe.py FIGURES.json SCRIPT.py ARGUMENTS...
"""

import json
import runpy
import sys
import time
from typing import Any

from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook


def main() -> None:
    """Write {"busy": seconds, "losses": numbers}, one of each per optimizer step: its losses are averaged."""
    figures, script = sys.argv[1], sys.argv[2]
    sys.argv = sys.argv[2:]
    sys.path[0] = script.rpartition("/")[0]
    busy, losses, since_step = list[float](), list[float](), list[float]()
    backward = Tensor.backward

    def noting_loss(self: Tensor, *args: Any, **kwargs: Any) -> None:
        since_step.append(self.item())
        backward(self, *args, **kwargs)

    def at_step(*_: Any) -> None:
        busy.append(time.process_time())
        losses.append(sum(since_step) / len(since_step))
        since_step.clear()

    Tensor.backward = noting_loss  # type: ignore[method-assign]
    register_optimizer_step_post_hook(at_step)
    runpy.run_path(script, run_name="__main__")
    with open(figures, "w") as file:
        json.dump({"busy": busy, "losses": losses}, file)


if __name__ == "__main__":
    main()
