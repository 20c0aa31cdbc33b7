"""Where the entry point of `torch.compile(backend="amp")` looks: `ampcompile.compiler.backend` itself."""

import sys

from .compiler import backend

sys.modules[__name__] = backend
