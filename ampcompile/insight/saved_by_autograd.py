"""What autograd itself saves where a graph isn't differentiated ahead: `lower="eager"` has no cut to read it from."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.fx import GraphModule, Interpreter, Node

from ampcompile.passes.graph import module_path, op_name, source_line
from ampcompile.records.graphs import SavedRecord
from ampcompile.records.recorder import shape_of
from ampcompile.torch_private import pytree, storages

Report = Callable[[tuple[SavedRecord, ...]], None]


class SavedByAutograd(Interpreter):
    """Runs a graph op by op, and reports what its first run saves. What transforms and checkpoints save isn't seen.

    `inputs`: the kind and the name of each of the graph's.
    """

    def __init__(self, gm: GraphModule, inputs: Sequence[tuple[str, str]], report: Report) -> None:
        super().__init__(gm)
        self.inputs, self.report = list(inputs), report
        self.makers: dict[int, Node] = {}  # by the memory of what they made
        self.saved: dict[int, tuple[Node, Tensor, list[str]]] = {}  # of each memory: its maker, the first, its readers

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run it; the first time also report."""
        result, report = super().run(*args, **kwargs), self.report
        self.report = _ignore
        returned = {_key(leaf) for leaf in _tensors(result)}
        placed = dict(zip(self.graph.find_nodes(op="placeholder"), self.inputs, strict=False))
        report(tuple(_record(*each, key in returned, placed) for key, each in self.saved.items()))
        self.makers, self.saved = {}, {}
        return result

    def run_node(self, n: Node) -> Any:
        """Run an op, and note what it makes and saves."""
        saved: list[Tensor] = []
        transforms = n.op == "call_module" and hasattr(self.module.get_submodule(str(n.target)), "graph_module")
        if transforms or not n.op.startswith("call") or self.report is _ignore:
            result = super().run_node(n)  # transforms take no hooks
        else:
            with saved_tensors_hooks(partial(_note, saved), lambda tensor: tensor):
                result = super().run_node(n)
        read = {_key(leaf) for leaf in _tensors(self.fetch_args_kwargs_from_env(n))}
        self.makers |= {key: n for leaf in _tensors(result) if (key := _key(leaf)) not in read}
        for tensor in saved:
            reader = f"the gradient of {op_name(n.target)}" + f" of {module_path(n)}" * bool(module_path(n))
            readers = self.saved.setdefault(_key(tensor), (self.makers.get(_key(tensor), n), tensor, []))[2]
            if reader not in readers:
                readers.append(reader)
        return result


def _note(saved: list[Tensor], tensor: Tensor) -> Tensor:
    saved.append(tensor)
    return tensor


def _ignore(_: tuple[SavedRecord, ...]) -> None:
    """Of later runs nothing is reported."""


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]


def _key(tensor: Tensor) -> int:
    return storages.storage_key(storages.local_part(tensor))


def _record(
    maker: Node, tensor: Tensor, readers: Sequence[str], returned: bool, inputs: dict[Node, tuple[str, str]]
) -> SavedRecord:
    of, name = inputs.get(maker, ("result" if returned else "activation", maker.name))
    if maker.op == "get_attr":
        of = "constant"
    return SavedRecord(
        op=op_name(maker.target) if maker.op.startswith("call") else of,
        module=module_path(maker),
        source=source_line(maker),
        shape=shape_of(tensor),
        because=f"read by {', '.join(readers)}",
        name=name,
        dtype=tensor.dtype,
        kept_as=tensor.dtype,
        bytes=storages.untyped_storage(storages.local_part(tensor)).nbytes(),
        of=of,
    )
