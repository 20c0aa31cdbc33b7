"""Add the gradient of an embedding to the weight's other gradient (CPU).

A weight that both embeds tokens and is an operand of a product, as a language model's tied head, has two gradients to
add. torch writes the embedding's into zeros of the weight's size, then adds it. For a float32 weight of V x D and N
tokens that moves 16·V·D + 12·N·D bytes, in fresh pages; adding row by row moves 12·N·D.
"""

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("ampcompile", "FRAGMENT")
_LIBRARY.define("add_embedding_gradient_(Tensor(a!) x, Tensor grad, Tensor indices, int padding_idx) -> ()")
ADD_EMBEDDING_GRADIENT = torch.ops.ampcompile.add_embedding_gradient_.default


def add_embedding_gradient_(x: Tensor, grad: Tensor, indices: Tensor, padding_idx: int = -1) -> None:
    """Add `grad` (*indices.shape, D) to the rows `indices` of `x` (V, D), dense, both of one dtype.

    Rows of `grad` whose index is `padding_idx` are left out; a negative one leaves out none. Rows that share an index
    are added one after the other, whatever the number of threads.
    """
    ADD_EMBEDDING_GRADIENT(x, grad, indices, padding_idx)


@torch.library.impl(_LIBRARY, "add_embedding_gradient_", "CPU")
def _add(x: Tensor, grad: Tensor, indices: Tensor, padding_idx: int) -> None:
    # index_add_ adds in float32 and in parallel, but with int32 it rounds 16-bit sums after every row.
    rows, indices = grad.reshape(indices.numel(), x.shape[1]), indices.reshape(-1).long()
    if padding_idx >= 0:
        rows = rows.masked_fill((indices == padding_idx)[:, None], 0)
    x.index_add_(0, indices, rows)


@torch.library.register_fake(ADD_EMBEDDING_GRADIENT, lib=_LIBRARY)
def _(x: Tensor, grad: Tensor, indices: Tensor, padding_idx: int) -> None:
    return None
