"""Tiny transformers models with random weights, their inputs, and a loss on everything they return."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
NO_DROPOUT: dict[str, Any] = dict.fromkeys(["hidden_dropout_prob", "attention_probs_dropout_prob"], 0.0)
BERT_LIKE = SMALL | NO_DROPOUT
SEQ2SEQ = (
    {"vocab_size": 64, "d_model": 32, "dropout": 0.0}
    | dict.fromkeys(["encoder_attention_heads", "decoder_attention_heads"], 4)
    | dict.fromkeys(["encoder_ffn_dim", "decoder_ffn_dim"], 48)
)
PICTURE: dict[str, Any] = {"image_size": 16, "patch_size": 4, "num_channels": 3}


def tokens() -> dict[str, Tensor]:
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[0, -2:] = 0
    return {"input_ids": torch.randint(3, 64, (2, 8)), "attention_mask": mask}


def pair() -> dict[str, Tensor]:
    return tokens() | {"decoder_input_ids": torch.randint(3, 64, (2, 6))}


def picture(size: int = 16) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(2, 3, size, size)}


def sound() -> dict[str, Tensor]:
    return {"input_features": torch.randn(2, 8, 32), "decoder_input_ids": torch.randint(3, 64, (2, 6))}


Case = tuple[str, dict[str, Any], Callable[[], dict[str, Tensor]]]

# name: class, configuration, inputs. The first seven are asked for by name; the others differ in what they do.
CASES: dict[str, Case] = {
    "llama": ("LlamaForCausalLM", SMALL, tokens),
    "gpt2": (
        "GPT2LMHeadModel",
        {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
        | dict.fromkeys(["resid_pdrop", "embd_pdrop", "attn_pdrop"], 0.0),
        tokens,
    ),
    "bert": ("BertForMaskedLM", BERT_LIKE, tokens),
    "t5": (
        "T5ForConditionalGeneration",
        {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0},
        pair,
    ),
    "vit": ("ViTForImageClassification", BERT_LIKE | PICTURE, picture),
    "resnet": (
        "ResNetForImageClassification",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 2], "layer_type": "basic", "num_channels": 3},
        lambda: picture(32),
    ),
    "whisper": (
        "WhisperForConditionalGeneration",
        SEQ2SEQ
        | {"num_mel_bins": 8, "encoder_layers": 2, "decoder_layers": 2}
        | {"max_source_positions": 16, "max_target_positions": 32}
        | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
        sound,
    ),
    "mistral": ("MistralForCausalLM", SMALL | {"sliding_window": 4}, tokens),
    "qwen2": ("Qwen2ForCausalLM", SMALL, tokens),
    "gemma2": ("Gemma2ForCausalLM", SMALL | {"head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8}, tokens),
    "phi": ("PhiForCausalLM", SMALL | {"num_key_value_heads": 4}, tokens),
    "opt": (
        "OPTForCausalLM",
        SMALL | {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0, "attention_dropout": 0.0},
        tokens,
    ),
    "bloom": ("BloomForCausalLM", {"vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 4}, tokens),
    "roberta": ("RobertaForMaskedLM", BERT_LIKE | {"max_position_embeddings": 40}, tokens),
    "albert": ("AlbertForMaskedLM", BERT_LIKE | {"embedding_size": 16}, tokens),
    "electra": ("ElectraForMaskedLM", BERT_LIKE | {"embedding_size": 16}, tokens),
    "bart": (
        "BartForConditionalGeneration",
        SEQ2SEQ | {"encoder_layers": 1, "decoder_layers": 1, "max_position_embeddings": 32},
        pair,
    ),
    "deit": ("DeiTForImageClassification", BERT_LIKE | PICTURE, picture),
    "swin": (
        "SwinForImageClassification",
        PICTURE
        | {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 2, "drop_path_rate": 0.0}
        | NO_DROPOUT,
        picture,
    ),
    "convnext": (
        "ConvNextForImageClassification",
        {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "drop_path_rate": 0.0},
        lambda: picture(32),
    ),
    "longformer": (  # sizes computed by tensor ops
        "LongformerForMaskedLM",
        BERT_LIKE | {"attention_window": [4, 4], "max_position_embeddings": 40, "pad_token_id": 0},
        tokens,
    ),
    "segformer": (
        "SegformerForSemanticSegmentation",
        {"num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [8, 16]}
        | {"patch_sizes": [3, 3], "strides": [2, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2]}
        | {"decoder_hidden_size": 16, "classifier_dropout_prob": 0.0, "drop_path_rate": 0.0}
        | NO_DROPOUT,
        lambda: picture(32),
    ),
}


def build(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """A model in training mode without dropout, and its inputs."""
    import transformers

    kind, config, inputs = CASES[name]
    model_class = getattr(transformers, kind)
    model = model_class(model_class.config_class(**config, use_cache=False)).train()
    return model, inputs()


def outputs(model: Any, inputs: dict[str, Tensor]) -> list[Tensor]:
    """Every tensor that the model returns, in order."""
    returned = pytree.tree_leaves(tuple(model(**inputs, return_dict=True).values()))
    return [value for value in returned if isinstance(value, Tensor)]


def loss(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """A scalar that every output tells on."""
    return sum(v.to(torch.promote_types(v.dtype, torch.float32)).square().mean() for v in outputs(model, inputs))
