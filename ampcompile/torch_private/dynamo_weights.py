"""Dynamo's view of parameters of a subclass: it traces them as plain parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch._dynamo.guards import GuardBuilder

from .optimize_contexts import is_ours
from .patches import SHARDED_WEIGHTS, Wrap, install


def see_as_parameters(subclass: type[Tensor], found: Callable[[Tensor], None]) -> None:
    """Let Dynamo trace tensors of a subclass as if they were plain parameters; its guards tell them from these.

    It calls `found(tensor)` where it compiles for another backend than ours. Raises AttributeError in a torch whose
    Dynamo is another.
    """

    def infer(original: Any) -> Any:
        return lambda value: None if type(value) is subclass else original(value)

    def watch(original: Any) -> Any:
        def wrap_tensor(self: Any, value: Any) -> Any:
            if type(value) is subclass and not is_ours(self.tx.output.compiler_fn):
                found(value)
                self.install_guards(GuardBuilder.ID_MATCH)  # other modules of the class may not share the graph unseen
            return original(self, value)

        return wrap_tensor

    wraps: dict[str, Wrap] = {"builder.infer_subclass_type": infer, "VariableBuilder.wrap_tensor": watch}
    install(SHARDED_WEIGHTS, wraps)
