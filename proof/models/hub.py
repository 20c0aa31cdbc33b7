"""The cases of transformers: a class, a configuration shrunk to two layers of width 32, inputs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from proof.models import senses, text
from proof.models.subject import Case, Inputs

SMALL: dict[str, Any] = {
    **dict.fromkeys(["hidden_size", "d_model", "n_embd", "dim", "word_embed_proj_dim", "embed_dim", "emb_dim"], 32),
    **dict.fromkeys(["intermediate_size", "d_ff", "ffn_dim", "hidden_dim", "encoder_ffn_dim", "decoder_ffn_dim"], 48),
    **dict.fromkeys(["num_hidden_layers", "num_layers", "n_layers", "n_layer", "num_decoder_layers"], 2),
    **dict.fromkeys(["encoder_layers", "decoder_layers"], 2),
    **dict.fromkeys(["num_attention_heads", "num_heads", "n_heads", "n_head"], 4),
    **dict.fromkeys(["encoder_attention_heads", "decoder_attention_heads"], 4),
    **dict.fromkeys(["head_dim", "d_kv", "projection_dim", "state_size"], 8),
    **dict.fromkeys(["max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"], 40),
    **dict.fromkeys(["num_experts", "num_local_experts", "n_routed_experts"], 4),
    **dict.fromkeys(["num_experts_per_tok", "num_key_value_heads", "moe_top_k", "type_vocab_size"], 2),
    **dict.fromkeys(["moe_intermediate_size", "shared_expert_intermediate_size", "embedding_size"], 16),
    "vocab_size": 64,
    "image_size": 16,
    "patch_size": 4,
    "num_channels": 3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "initializer_range": 0.1,
    "init_std": 0.1,
}


def shrink_config(kind: Any, **own: Any) -> dict[str, Any]:
    """The arguments of a small configuration of that class; `own` ones win, those of its parts stand in dicts."""
    default: Any = kind()
    found = {name: value for name, value in SMALL.items() if _is_number(default, name)}
    found |= {name: 0.0 for name, value in vars(default).items() if "drop" in name and isinstance(value, float)}
    for name in kind.sub_configs:
        if (part := getattr(default, name, None)) is not None:
            found[name] = shrink_config(type(part), **own.get(name, {}))
    return {
        **found,
        **{name: value for name, value in own.items() if name not in found or name not in kind.sub_configs},
    }


def _is_number(config: Any, name: str) -> bool:
    fixed = isinstance(getattr(type(config), name, None), property)
    return not fixed and isinstance(getattr(config, name, None), int | float)


def build_model(name: str, **own: Any) -> nn.Module:
    """A model of that class."""
    import transformers

    kind = getattr(transformers, name)
    config = kind.config_class(**shrink_config(kind.config_class, **own))
    config.use_cache = False
    return kind(config)


def make_case(family: str, name: str, own: dict[str, Any], inputs: Callable[[], Inputs]) -> Case:
    """Of one row."""
    return Case(family, partial(build_model, name, **own), inputs, package="transformers")


TEXTS = {
    "decoders": (text.DECODERS, text.tokens),
    "experts": (text.EXPERTS, text.tokens),
    "state space": (text.STATES, text.tokens),
    "encoders": (text.ENCODERS, text.tokens),
    "encoder-decoders": (text.PAIRS, text.pair),
}
SENSES = {"vision": senses.VISION, "audio": senses.AUDIO, "several modalities": senses.SEVERAL}
CASES = {
    name: make_case(family, *row, text.pair if name == "switch" else inputs)
    for family, (rows, inputs) in TEXTS.items()
    for name, row in rows.items()
} | {name: make_case(family, *row) for family, rows in SENSES.items() for name, row in rows.items()}
