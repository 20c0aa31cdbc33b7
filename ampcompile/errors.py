"""Every error and warning a user can meet: what was found, what was expected, what to do."""

import sys
import types
import warnings


class AmpError(Exception):
    """Base class of all errors raised by ampcompile.

    >>> try:
    ...     ampcompile.Policy.parse("softmax")
    ... except ampcompile.AmpError as error:
    ...     print(type(error).__name__)
    OptionError
    """


class OptionError(AmpError, ValueError, TypeError):
    """An unknown or invalid option, policy, rule, dtype, name or other argument.

    >>> torch.compile(model, backend="amp", options={"wieghts": "cached"})
    Traceback (most recent call last):
    ampcompile.errors.OptionError: option 'wieghts' is unknown. Did you mean 'weights'? ...
    >>> ampcompile.Policy(ops={"softmax": "float64"})
    Traceback (most recent call last):
    ampcompile.errors.OptionError: policy op softmax has the value 'float64'; expected one of low, bf16, ...
    >>> ampcompile.register_op("mylib::attention", "bf16")
    Traceback (most recent call last):
    ampcompile.errors.OptionError: register_op got the rule 'bf16' for mylib::attention; expected one of ...
    >>> ampcompile.precision(torch.float64)
    Traceback (most recent call last):
    ampcompile.errors.OptionError: precision got torch.float64; expected torch.float32, torch.bfloat16 or ...
    >>> ampcompile.compile_methods(model, "decode")
    Traceback (most recent call last):
    ampcompile.errors.OptionError: found 'decode', expected the name of a method of Linear.
    >>> ampcompile.invalidate("head.weight")
    Traceback (most recent call last):
    ampcompile.errors.OptionError: found 'str', expected a torch.nn.Module, a tensor, or several tensors: ...
    """


class UnsupportedError(AmpError, RuntimeError):
    """What was asked can't be computed: what there is, and a way that works, are in the message.

    Raised by an op that is unsafe in mixed precision, as eager autocast refuses it; a gradient of a gradient through a
    compiled graph that can't compute one; `export` of casts that can't be written out; `shard_policy` and
    `release_masters` of what they can't take, or a reader that would round a weight.

    >>> f = torch.compile(lambda x: nn.functional.dropout(x).exp().sum(), backend="amp")
    >>> x.requires_grad = True
    >>> (grad,) = torch.autograd.grad(f(x), x, create_graph=True)
    >>> grad.sum().backward()
    Traceback (most recent call last):
    ampcompile.errors.UnsupportedError: found a gradient of a gradient through a compiled graph that draws ...
    >>> class Products(nn.Module):
    ...     def forward(self, x):
    ...         return torch.vmap(torch.dot)(x, x)
    >>> ampcompile.export(Products(), (x,))
    Traceback (most recent call last):
    ampcompile.errors.UnsupportedError: found a transform of torch.func, or a higher-order op unknown to ampcompile, ...
    >>> ampcompile.shard_policy(model)
    Traceback (most recent call last):
    ampcompile.errors.UnsupportedError: found no FSDP2 module in Linear, expected one: ...
    >>> ampcompile.release_masters(nn.Linear(8, 8))
    Traceback (most recent call last):
    ampcompile.errors.UnsupportedError: found no weight of Linear that compiled graphs read in 16 bits, ...
    """


class PassError(AmpError, RuntimeError):
    """A graph pass failed: names the pass and the error, and the op and the user's line if it failed at one op.

    A fault of ampcompile or of torch; or of the function that a custom op's author registered by `register_fake`: then
    the message names that, and what to do.

    >>> from types import SimpleNamespace
    >>> from ampcompile.passes.base import run_passes
    >>> broken = SimpleNamespace(name="broken", apply=lambda graph: 1 / 0)
    >>> run_passes([broken], torch.fx.symbolic_trace(nn.ReLU()))
    Traceback (most recent call last):
    ampcompile.errors.PassError: pass broken failed: ZeroDivisionError: division by zero. Passes before it: none. ...
    """


class AmpWarning(UserWarning):
    """Something works, but not as well as it could; the text says what to do.

    >>> import warnings
    >>> warnings.filterwarnings("ignore", category=ampcompile.AmpWarning)  # or "error", to fail on it
    """


_BETWEEN = frozenset({"ampcompile", "torch", "contextlib", "functools", "lightning"})
"""Packages whose frames may lie between a line of ours and the user's."""


def is_of_user(frame: types.FrameType) -> bool:
    """True if a frame runs neither our code nor torch's, nor that of Lightning, which wraps `torch.compile`."""
    # By the module's name: `passes` and `kernels` may lie in other folders than the rest of the package.
    return frame.f_globals.get("__name__", "").partition(".")[0] not in _BETWEEN


def warn_user(words: str) -> None:
    """Issue an AmpWarning at the innermost line that is neither ours nor torch's: the user's, or another library's."""
    frame = sys._getframe(1)
    while not is_of_user(frame) and frame.f_back is not None:
        frame = frame.f_back
    module, registry = (
        frame.f_globals.get("__name__", "<string>"),
        frame.f_globals.setdefault("__warningregistry__", {}),
    )
    warnings.warn_explicit(words, AmpWarning, frame.f_code.co_filename, frame.f_lineno, module, registry)


def first_line(error: BaseException) -> str:
    """The first line of an error's message; empty if it has none."""
    return next(iter(str(error).strip().splitlines()), "")


class OptimizerError(AmpError, ValueError, RuntimeError):
    """An optimizer or `GradScaler` was asked for what it can't do, or to clip other gradients than it measured.

    >>> ampcompile.keep_masters(torch.optim.SGD(model.parameters()))
    Traceback (most recent call last):
    ampcompile.errors.OptimizerError: found no 16-bit parameter; expected some: float32 parameters need no masters

    >>> ampcompile.GradScaler("cpu").last_step_skipped
    Traceback (most recent call last):
    ampcompile.errors.OptimizerError: found no step so far, expected one: ask after scaler.step(optimizer)

    >>> optimizer = ampcompile.optim.SGD(model.parameters())
    >>> compiled(x).sum().backward()
    >>> norm = optimizer.clip_grad_norm_(1.0)
    >>> model.weight.grad *= 2
    >>> optimizer.step()
    Traceback (most recent call last):
    ampcompile.errors.OptimizerError: found gradients that were written or replaced since clip_grad_norm_(), ...
    """


class CaptureError(AmpError, RuntimeError):
    """A step that `ampcompile.capture_step` can't make a CUDA graph of, or a call that its graph doesn't fit.

    >>> ampcompile.capture_step(print)
    Traceback (most recent call last):
    ampcompile.errors.CaptureError: found parameters on no device, expected them on one: pass the optimizers ...
    """


class AuditError(AmpError, RuntimeError):
    """An audit has no answer: there is nothing to compare, or float32 doesn't meet the tolerance either.

    >>> ampcompile.audit(model)(x).suggest(1e-12)
    Traceback (most recent call last):
    ampcompile.errors.AuditError: found a relative error of ... with everything in float32; expected at most 1e-12. ...
    """
