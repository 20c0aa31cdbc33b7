"""Mixed precision as a compiler pass: `torch.compile(model, backend="amp")`."""

import importlib
from typing import TYPE_CHECKING, Any

from .about import VERSION  # first: in a checkout the imports below need its finder
from .errors import (
    AmpError,
    AmpWarning,
    AuditError,
    CaptureError,
    OptimizerError,
    OptionError,
    PassError,
    UnsupportedError,
)
from .insight.ask import audit, explain, record
from .precision import keep_fp32, precision

if TYPE_CHECKING:
    from . import optim as optim
    from .compiler.export import export
    from .compiler.methods import compile_methods
    from .insight.compare import compare
    from .insight.watch import watch
    from .optim.keep_masters import keep_masters
    from .policy import Policy
    from .rules import register_op
    from .scaler import GradScaler, capture_step
    from .sharding.decide import shard_policy
    from .timing.step_profile import profile_step
    from .weights import free_copies, invalidate, release_masters, weight_stats

__all__ = [
    "AmpError",
    "AmpWarning",
    "AuditError",
    "CaptureError",
    "GradScaler",
    "OptimizerError",
    "OptionError",
    "PassError",
    "Policy",
    "UnsupportedError",
    "audit",
    "capture_step",
    "compare",
    "compile_methods",
    "explain",
    "export",
    "free_copies",
    "invalidate",
    "keep_fp32",
    "keep_masters",
    "precision",
    "profile_step",
    "record",
    "register_op",
    "release_masters",
    "shard_policy",
    "watch",
    "weight_stats",
]

# These are imported when first used, so that importing the package costs little more than torch. A function that has
# the name of its module can't be among them: importing the module would bind the name to the module.
_LATER = {
    "GradScaler": "scaler",
    "capture_step": "scaler",
    "compare": "insight.compare",
    "compile_methods": "compiler.methods",
    "export": "compiler.export",
    "Policy": "policy",
    "free_copies": "weights",
    "invalidate": "weights",
    "keep_masters": "optim.keep_masters",
    "optim": "optim",
    "profile_step": "timing.step_profile",
    "register_op": "rules",
    "release_masters": "weights",
    "shard_policy": "sharding.decide",
    "watch": "insight.watch",
    "weight_stats": "weights",
}

__version__ = VERSION


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f".{_LATER[name]}", __name__)
    value = module if name == _LATER[name] else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_LATER})
