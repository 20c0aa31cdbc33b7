"""Call a function an additional time with as few side effects as possible."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from ampcompile.compiler.module_names import modules_of
from ampcompile.torch_private import pytree


@contextlib.contextmanager
def preserve_state(f: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
    """Restore gradients, buffers and random states afterwards, for the modules and tensors that `f` visibly uses.

    Not undone: writes to parameters (an optimizer stepping inside `f`), to tensors given as arguments, and all other
    side effects of Python code.
    """
    arguments = pytree.arg_tree_leaves(*args, **kwargs)
    modules = [*modules_of(f), *(m for m in arguments if isinstance(m, torch.nn.Module))]
    tensors = [t for t in arguments if isinstance(t, torch.Tensor)] + [p for m in modules for p in m.parameters()]
    leaves = list({id(t): t for t in tensors if t.is_leaf and t.requires_grad}.values())
    owners = list({id(owner): owner for m in modules for owner in m.modules() if owner._buffers}.values())
    buffers = [(o, name, b, b.detach().clone()) for o in owners for name, b in o._buffers.items() if b is not None]
    grads = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    devices = {t.device.index for t in tensors if t.device.type == "cuda"}
    try:
        with torch.random.fork_rng(sorted(i for i in devices if i is not None), device_type="cuda"):
            yield
    finally:
        for leaf, grad in zip(leaves, grads, strict=True):
            leaf.grad = grad
        with torch.no_grad():
            for owner, name, buffer, before in buffers:
                owner._buffers[name] = buffer
                if not torch.equal(buffer, before):
                    buffer.copy_(before)
