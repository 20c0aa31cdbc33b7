"""The cases of transformers: a class, a shrunk configuration, inputs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from proof.models import senses, text
from proof.models.case import Case, Inputs
from proof.models.shrinking import shrunk


def built(name: str, **own: Any) -> nn.Module:
    """A model of that class."""
    import transformers

    kind = getattr(transformers, name)
    config = kind.config_class(**shrunk(kind.config_class, **own))
    config.use_cache = False
    return kind(config)


def case(family: str, name: str, own: dict[str, Any], inputs: Callable[[], Inputs]) -> Case:
    """Of one row."""
    return Case(family, partial(built, name, **own), inputs, package="transformers")


TEXTS = {
    "decoders": (text.DECODERS, text.tokens),
    "experts": (text.EXPERTS, text.tokens),
    "state space": (text.STATES, text.tokens),
    "encoders": (text.ENCODERS, text.tokens),
    "encoder-decoders": (text.PAIRS, text.pair),
}
SENSES = {"vision": senses.VISION, "audio": senses.AUDIO, "several modalities": senses.SEVERAL}
CASES = {
    name: case(family, *row, text.pair if name == "switch" else inputs)
    for family, (rows, inputs) in TEXTS.items()
    for name, row in rows.items()
} | {name: case(family, *row) for family, rows in SENSES.items() for name, row in rows.items()}
