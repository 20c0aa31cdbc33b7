"""The tests. Their GPU is chosen before any of them imports torch."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "softgpu" / "src"))  # a package of its own, not installed for this

from softgpu import choice

choice.choose()
