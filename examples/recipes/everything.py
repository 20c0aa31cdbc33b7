"""All recipes by name."""

from examples.recipes.accumulation import Accumulation
from examples.recipes.clipping import Clipping
from examples.recipes.custom_functions import CustomFunctions
from examples.recipes.decoding import Decoding
from examples.recipes.forced_fp32 import ForcedFp32
from examples.recipes.forces import Forces
from examples.recipes.gan import Gan
from examples.recipes.gradient_penalty import GradientPenalty
from examples.recipes.mean_teacher import MeanTeacher
from examples.recipes.outer_autocast import OuterAutocast
from examples.recipes.recipe import Recipe
from examples.recipes.semi_supervised import SemiSupervised
from examples.recipes.several_models import SeveralModels
from examples.recipes.threads import Threads
from examples.recipes.typical import Typical
from examples.recipes.validation import Validation
from examples.recipes.warm_up import WarmUp

RECIPES: dict[str, type[Recipe]] = {
    recipe.__module__.rpartition(".")[2]: recipe
    for recipe in (
        Typical,
        Clipping,
        Accumulation,
        GradientPenalty,
        Forces,
        SeveralModels,
        CustomFunctions,
        ForcedFp32,
        SemiSupervised,
        MeanTeacher,
        Gan,
        Decoding,
        Validation,
        WarmUp,
        OuterAutocast,
        Threads,
    )
}
