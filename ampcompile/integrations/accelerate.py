"""Hugging Face Accelerate, and the trainers of transformers and TRL, which prepare their models with it."""

from dataclasses import dataclass, field
from typing import Any

from accelerate.utils import DynamoBackend, TorchDynamoPlugin


@dataclass
class AmpPlugin(TorchDynamoPlugin):
    """Makes `Accelerator.prepare` compile models with `backend="amp"`.

    `Accelerator(mixed_precision="bf16", dynamo_plugin=AmpPlugin())`, or, before a trainer's `train()`,
    `trainer.accelerator.state.dynamo_plugin = AmpPlugin()`. Fields are those of Accelerate's TorchDynamoPlugin but for
    `backend`: `options` as in `torch.compile(model, backend="amp", options={...})`, `mode`, `fullgraph`, `dynamic`,
    `disable`, and `use_regional_compilation`, which compiles repeated blocks one by one. `prepare` raises OptionError
    for an unknown option.
    """

    # Accelerate reads only from this whether to compile; it refuses names that its own list lacks.
    backend: DynamoBackend = field(init=False, default=DynamoBackend.INDUCTOR)

    def to_kwargs(self) -> dict[str, Any]:
        """Return torch.compile's arguments; a mode goes into the options, since torch takes no mode beside them."""
        kwargs = super().to_kwargs() | {"backend": "amp"}
        if mode := kwargs.pop("mode", None):
            kwargs["options"] = {"mode": mode, **(self.options or {})}
        return kwargs
