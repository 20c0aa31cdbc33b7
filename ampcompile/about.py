"""The package's version, and where the sub-packages `passes` and `kernels` lie in a checkout: beside the package."""

import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

VERSION = "0.1.0"
_FOLDER = os.path.dirname(os.path.realpath(__file__))
_BESIDE = ("passes", "kernels")


class CheckoutFinder:
    """Finds the two sub-packages where a checkout has them; nothing else of its root becomes part of the package.

    It goes before other finders: that of an editable install would take the two from the checkout it was made of.
    """

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        package, _, child = name.rpartition(".")
        return (
            PathFinder.find_spec(name, [os.path.dirname(_FOLDER)])
            if package == __package__ and child in _BESIDE
            else None
        )


def _has(folder: str) -> list[bool]:
    return [os.path.isfile(os.path.join(folder, name, "__init__.py")) for name in _BESIDE]


# A wheel holds the two inside the package: a folder `kernels` beside it is then a package of others.
if not any(_has(_FOLDER)) and all(_has(os.path.dirname(_FOLDER))):
    sys.meta_path.insert(0, CheckoutFinder)
