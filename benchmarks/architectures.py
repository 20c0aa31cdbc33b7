"""The architectures to measure, with random weights, and what they are fed: `build(name, batch, length, training)`."""

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.models import GPT, GPT_1_3B, GPT_23M, GPT_124M, GPT_124M_ODD, GPTConfig
from benchmarks.unet import UNet

Built = tuple[nn.Module, tuple[Tensor, ...]]

GPTS = {"GPT 23M": GPT_23M, "GPT 124M": GPT_124M, "GPT 124M/50257": GPT_124M_ODD, "GPT 1.3B": GPT_1_3B}
TINY = "tiny "
LABELS = 1000
# Dropout is off everywhere: its random numbers differ from peer to peer, and then so would the losses.
FULL: Mapping[str, dict[str, Any]] = {
    "BERT": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "ViT": {"num_labels": LABELS},
    "ResNet-50": {"num_labels": LABELS},
    "T5": {"dropout_rate": 0.0, "decoder_start_token_id": 0},
    "Llama": {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8, "num_attention_heads": 16},
}
SMALL: Mapping[str, dict[str, Any]] = {
    "BERT": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64},
    "ViT": {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "image_size": 32,
    },
    "ResNet-50": {"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [1, 1]},
    "T5": {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 2},
    "Llama": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4},
}


class TinyLinears(nn.Module):
    """Many weights and next to no arithmetic: linear layers of 16 features, one after the other; (batch, 16)."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def build(name: str, batch: int, length: int, training: bool) -> Built:
    """A float32 model and its inputs, the same at every call.

    Called with the inputs it returns logits or, if `training`, a loss. `length` counts tokens, of an image the
    pixels of a side. `name` is a key of `GPTS` or `FULL`, "UNet", "GPT 4x256" (layers by width) or "64 weights";
    "tiny " before it shrinks the model.
    """
    torch.manual_seed(0)
    small = name.startswith(TINY)
    model, inputs = _builder(name.removeprefix(TINY))(small, batch, length, training)
    return model.train(training), inputs


def checkpointed(model: nn.Module) -> nn.Module:
    """A GPT whose blocks keep only their inputs for backward and run twice."""
    assert isinstance(model, GPT)
    model.blocks = nn.ModuleList(map(_Checkpointed, model.blocks))
    return model


def _builder(name: str) -> Callable[[bool, int, int, bool], Built]:
    if shape := re.fullmatch(r"GPT (\d+)x(\d+)", name):
        layers, width = map(int, shape.groups())
        return _gpt(GPTConfig(layers, width, heads=max(1, width // 64), vocab=256, context=256))
    if weights := re.fullmatch(r"(\d+) weights", name):
        return lambda small, batch, length, training: (TinyLinears(int(weights[1])), (torch.randn(batch, 16),))
    if name in GPTS:
        return _gpt(GPTS[name])
    return {"BERT": _bert, "Llama": _llama, "ViT": _vit, "ResNet-50": _resnet, "T5": _t5, "UNet": _unet}[name]


def _gpt(config: GPTConfig) -> Callable[[bool, int, int, bool], Built]:
    def build_gpt(small: bool, batch: int, length: int, training: bool) -> Built:
        shape = GPTConfig(layers=1, width=32, heads=2, vocab=64, context=32) if small else config
        tokens, targets = torch.randint(shape.vocab, (2, batch, length))
        return GPT(shape), (tokens, targets) if training else (tokens,)

    return build_gpt


class _Checkpointed(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=False)


class Transformers(nn.Module):
    """A model of `transformers`, called with inputs in order, that returns the loss if there is one, else logits."""

    def __init__(self, model: nn.Module, *names: str) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *inputs: Tensor) -> Tensor:
        output = self.model(**dict(zip(self.names, inputs, strict=False)))
        return output.logits if output.loss is None else output.loss


def _settings(name: str, small: bool) -> dict[str, Any]:
    return FULL[name] | (SMALL[name] if small else {})


def _bert(small: bool, batch: int, length: int, training: bool) -> Built:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(**_settings("BERT", small))
    tokens, labels = torch.randint(config.vocab_size, (2, batch, length))
    return Transformers(BertForMaskedLM(config), "input_ids", "labels"), (tokens, labels) if training else (tokens,)


def _llama(small: bool, batch: int, length: int, training: bool) -> Built:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**_settings("Llama", small), num_key_value_heads=4, use_cache=False)
    tokens, labels = torch.randint(config.vocab_size, (2, batch, length))
    return Transformers(LlamaForCausalLM(config), "input_ids", "labels"), (tokens, labels) if training else (tokens,)


def _t5(small: bool, batch: int, length: int, training: bool) -> Built:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(**_settings("T5", small), use_cache=False)
    tokens, targets = torch.randint(config.vocab_size, (2, batch, length))
    names = ("input_ids", "labels" if training else "decoder_input_ids")
    return Transformers(T5ForConditionalGeneration(config), *names), (tokens, targets)


def _vit(small: bool, batch: int, side: int, training: bool) -> Built:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(**_settings("ViT", small))
    return Transformers(ViTForImageClassification(config), "pixel_values", "labels"), _images(batch, side, training)


def _resnet(small: bool, batch: int, side: int, training: bool) -> Built:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(**_settings("ResNet-50", small))
    return Transformers(ResNetForImageClassification(config), "pixel_values", "labels"), _images(batch, side, training)


def _unet(small: bool, batch: int, side: int, training: bool) -> Built:
    images, targets = torch.randn(2, batch, 3, side, side)
    return UNet(width=8 if small else 64), (images, targets) if training else (images,)


def _images(batch: int, side: int, training: bool) -> tuple[Tensor, ...]:
    images, labels = torch.randn(batch, 3, side, side), torch.randint(LABELS, (batch,))
    return (images, labels) if training else (images,)
