"""Every error and warning a user can meet: what was found, what was expected, what to do."""


class AmpError(Exception):
    """Base class of all errors raised by ampcompile."""


class OptionError(AmpError, ValueError):
    """An option of `torch.compile(..., backend="amp", options=...)` that can't be taken."""


class PolicyError(AmpError, ValueError):
    """A policy, or its string form, that names no rule or no pattern."""


class RuleError(AmpError, ValueError):
    """A rule for a custom op that can't be registered."""


class PrecisionError(AmpError, TypeError):
    """`ampcompile.precision` was given a dtype, or something to decorate, that it can't take."""


class BannedOpError(AmpError, RuntimeError):
    """An op that eager autocast refuses too, because it is unsafe in mixed precision."""


class PassError(AmpError, RuntimeError):
    """A graph pass failed; names the pass, the node, the user's source line and the passes already run."""


class AmpWarning(UserWarning):
    """Something works, but not as well as it could; the text says what to do."""


class ScalerError(AmpError, ValueError):
    """A `GradScaler` was given bounds that make no sense, or asked for what it can't know yet."""


class ClipError(AmpError, RuntimeError):
    """A clipping that is part of the step to come was about to meet other gradients than it was made for."""


class StaleWeightError(AmpError, RuntimeError):
    """A weight was written unseen while a backward waited for its old value, and a call used the old value too."""


class WeightsError(AmpError, TypeError):
    """`ampcompile.free_copies` or `ampcompile.invalidate` was given what is neither a module nor tensors."""


class DoubleBackwardError(AmpError, RuntimeError):
    """A gradient of a gradient was asked of a compiled graph that can't give one."""


class AuditError(AmpError, RuntimeError):
    """An audit that can't say what was asked: nothing to compare, or a tolerance that float32 doesn't meet either."""


class ExportError(AmpError, RuntimeError):
    """A model holds something whose casts an exported program can't have written out."""


class CommandLineError(AmpError, ValueError):
    """The command line was given something that names no model and inputs."""
