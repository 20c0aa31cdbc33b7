"""What the kernels compute, in plain torch; each with the signature of its kernel."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ampcompile.kernels.adam import AdamTensors
from ampcompile.kernels.check_grads import Checked
from ampcompile.kernels.masters import read_master, write_master
from ampcompile.kernels.packed_conv import ConvBlocks
from ampcompile.kernels.sgd import SgdTensors
from ampcompile.kernels.step import StepTensors, quantize


def check_grads_reference(
    grads: Sequence[Tensor],
    scale: Tensor | None = None,
    multiplier: Tensor | None = None,
    max_norm: float | None = None,
) -> Checked:
    """`check_grads` in plain torch, without the digest."""
    one = torch.ones((), dtype=torch.float32, device=grads[0].device)
    inverse = one if scale is None else scale.double().reciprocal().float()
    factor = inverse if multiplier is None else inverse * multiplier
    products = [grad.float() * factor for grad in grads]
    finite = torch.stack([product.isfinite().all() for product in products]).all() & (inverse != 0)
    norm = torch.stack([product.double().square().sum() for product in products]).sum().sqrt().float()
    shrink = one if max_norm is None else (max_norm / (norm + 1e-6)).clamp(max=1)
    return Checked((~finite).float(), factor * shrink, norm, one)


def unscale_reference_(grads: Sequence[Tensor], multiplier: Tensor, found_inf: Tensor) -> None:
    """`unscale_` in plain torch, for any floating dtype."""
    bad = [~multiplier.isfinite() | (multiplier == 0)]
    for grad in grads:
        product = (grad.float() * multiplier).to(grad.dtype) if grad.dtype != torch.float64 else grad * multiplier
        bad += [(~grad.isfinite()).any(), (~product.isfinite()).any()]
        grad.copy_(torch.where(multiplier == 1, grad, product))
    found_inf.copy_(torch.where(torch.stack([b.reshape(()) for b in bad]).any(), 1.0, found_inf))


def packed_conv_reference(x: Tensor, weight: Tensor, bias: Tensor | None, blocks: ConvBlocks) -> Tensor:
    """The numbers of `packed_conv` without packing, if `x` is channels-last."""
    settings = blocks.stride, blocks.padding, blocks.dilation, blocks.groups
    return torch.nn.functional.conv2d(x, weight.to(x.dtype), bias, *settings)


def packed_linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The numbers of `packed_linear` without packing."""
    return torch.nn.functional.linear(x, weight.to(x.dtype), bias)


def embedding_gradient_reference(x: Tensor, grad: Tensor, indices: Tensor, padding_idx: int = -1) -> Tensor:
    """The expected value of `x`, as autograd computes it."""
    return x + torch.ops.aten.embedding_dense_backward(grad, indices, len(x), padding_idx, False)


def _begin_step(t: StepTensors, multiplier: Tensor | None, found_inf: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the factor of gradients, and the flag of a skipped step. Random bits differ in each, skipped ones too."""
    for key in t.kept:
        if key is not None and key.dtype == torch.int64:
            key[2] += 1
    zero = torch.zeros((), dtype=torch.float32, device=t.params[0].device)
    factor, skip = zero + 1 if multiplier is None else multiplier, zero if found_inf is None else found_inf
    return factor.reshape(()), skip.reshape(())


def read_weight(t: StepTensors, i: int) -> Tensor:
    """The float32 values of a parameter."""
    kept = t.kept[i]
    return t.params[i] if kept is None else read_master(t.params[i], kept, t.checksums[i])


def _write_weight(t: StepTensors, i: int, weight: Tensor, skip: Tensor) -> None:
    """Write new values of a parameter, unless the step is skipped, and its copies."""
    kept, copy = t.kept[i], t.copies[i]
    if kept is None:
        t.params[i].copy_(torch.where(skip != 0, t.params[i], weight))
    elif skip == 0:
        write_master(t.params[i], kept, t.checksums[i], weight)
    if copy is not None:
        copy.copy_(t.params[i])
    if i in t.quantized:
        quantize({i: t.quantized[i]})


def adam_reference_(tensors: AdamTensors, multiplier: Tensor | None = None, found_inf: Tensor | None = None) -> None:
    """`adam_` in plain torch."""
    t = tensors
    factor, skip = _begin_step(t, multiplier, found_inf)

    def write(to: Tensor, value: Tensor) -> Tensor:
        to.copy_(torch.where(skip != 0, to, value))
        return to

    for i, group in enumerate(t.groups[g] for g in t.group_of):
        param = read_weight(t, i)
        step = t.steps[i].double() + 1
        grad = t.grads[i].float() * (-factor if group.maximize else factor)
        value = param * (1 - group.lr * group.weight_decay) if group.decoupled_weight_decay else param
        if not group.decoupled_weight_decay and group.weight_decay != 0:
            grad = grad + group.weight_decay * param
        mean = t.exp_avgs[i].lerp(grad, 1 - group.beta1)
        square = t.exp_avg_sqs[i] * group.beta2 + (1 - group.beta2) * grad * grad
        peak = t.max_exp_avg_sqs[i]
        largest = square if peak is None else torch.maximum(peak, square)
        root_correction = (1 - group.beta2**step).sqrt().float()
        step_size = (group.lr / (1 - group.beta1**step)).float()
        value = value - step_size * mean / (largest.sqrt() / root_correction + group.eps)
        write(t.steps[i], step.float())
        write(t.exp_avgs[i], mean)
        write(t.exp_avg_sqs[i], square)
        if peak is not None:
            write(peak, largest)
        _write_weight(t, i, value, skip)


def sgd_reference_(tensors: SgdTensors, multiplier: Tensor | None = None, found_inf: Tensor | None = None) -> None:
    """`sgd_` in plain torch."""
    t = tensors
    factor, skip = _begin_step(t, multiplier, found_inf)
    for i, group in enumerate(t.groups[g] for g in t.group_of):
        param = read_weight(t, i)
        update = t.grads[i].float() * (-factor if group.maximize else factor)
        if group.weight_decay != 0:
            update = update + group.weight_decay * param
        buffer = t.momentum_buffers[i]
        if buffer is not None:
            momentum = group.momentum * buffer + (1 - group.dampening) * update
            update = update + group.momentum * momentum if group.nesterov else momentum
            buffer.copy_(torch.where(skip != 0, buffer, momentum))
        _write_weight(t, i, param - group.lr * update, skip)
