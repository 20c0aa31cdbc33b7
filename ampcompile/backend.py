"""The entry point of `torch.compile(backend="amp")`: this module is `ampcompile.compiler.backend` itself."""

import sys

from .compiler import backend

sys.modules[__name__] = backend
