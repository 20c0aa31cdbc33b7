"""An older name of `ampcompile.weights.packing`: the same module."""

import sys

from .weights import packing

sys.modules[__name__] = packing
