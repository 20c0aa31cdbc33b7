"""Run every recipe, or those named, compiled and eagerly: python -m examples.recipes [gan validation ...]"""

import sys

from examples.recipes import everything
from examples.recipes.recipe import compare

for name, recipe in everything.RECIPES.items():
    if name in (sys.argv[1:] or everything.RECIPES):
        compare(recipe)
