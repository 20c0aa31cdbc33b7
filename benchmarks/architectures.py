"""The models to measure, with random weights, and their inputs: `build(name, batch, length, training)`."""

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.models import GPT, GPT_1_3B, GPT_23M, GPT_124M, GPT_124M_ODD, GPTConfig, UNet

Built = tuple[nn.Module, tuple[Tensor, ...]]

GPTS = {"GPT 23M": GPT_23M, "GPT 124M": GPT_124M, "GPT 124M/50257": GPT_124M_ODD, "GPT 1.3B": GPT_1_3B}
TINY = "tiny "
LABELS = 1000


class Shape(NamedTuple):
    """A model of transformers: its class, the names of its inputs, its settings, and those that shrink it."""

    kind: str
    inputs: tuple[str, str]
    full: Mapping[str, Any] = {}
    small: Mapping[str, Any] = {}


_TEXT, _IMAGE = ("input_ids", "labels"), ("pixel_values", "labels")
_ONE_LAYER = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
# Dropout is off everywhere: its random numbers differ from peer to peer, and then so would the losses.
_DRY = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_SMALL_LLAMA = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4}
_SMALL_LLAMA |= {"vocab_size": 64, "num_key_value_heads": 4}
SHAPES: Mapping[str, Shape] = {
    "BERT": Shape("BertForMaskedLM", _TEXT, _DRY, _ONE_LAYER),
    "BERT classifier": Shape("BertForSequenceClassification", _TEXT, _DRY, _ONE_LAYER),
    "T5": Shape(
        "T5ForConditionalGeneration",
        _TEXT,
        {"dropout_rate": 0.0, "decoder_start_token_id": 0, "use_cache": False},
        {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 2},
    ),
    "ViT": Shape("ViTForImageClassification", _IMAGE, {"num_labels": LABELS}, {**_ONE_LAYER, "image_size": 32}),
    "ResNet-50": Shape(
        "ResNetForImageClassification",
        _IMAGE,
        {"num_labels": LABELS},
        {"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [1, 1]},
    ),
} | {
    name: Shape(
        "LlamaForCausalLM",
        _TEXT,
        {
            "use_cache": False,
            "hidden_size": width,
            "intermediate_size": inner,
            "num_hidden_layers": layers,
            "num_attention_heads": width // head,
            "num_key_value_heads": shared,
            "vocab_size": vocab,
        },
        _SMALL_LLAMA,
    )
    for name, width, inner, layers, head, shared, vocab in (
        ("Llama", 1024, 2816, 8, 64, 4, 32000),
        ("Llama d2048", 2048, 8192, 4, 128, 4, 32000),
        ("Llama d4096", 4096, 14336, 2, 128, 8, 8192),
    )
}


def build(name: str, batch: int, length: int, training: bool) -> Built:
    """A float32 model and its inputs, the same at every call.

    Called with the inputs it returns logits or, if `training`, a loss. `length` counts tokens, of an image the
    pixels of a side. `name` is a key of `GPTS`, `SHAPES` or `SMALL`, "UNet", "GPT 4x256" (layers by width) or
    "64 weights"; "tiny " before it shrinks the model.
    """
    torch.manual_seed(0)
    small = name.startswith(TINY)
    model, inputs = _build(name.removeprefix(TINY), small, batch, length, training)
    return model.train(training), inputs


def _build(name: str, small: bool, batch: int, length: int, training: bool) -> Built:
    if shape := re.fullmatch(r"GPT (\d+)x(\d+)", name):
        layers, width = map(int, shape.groups())
        return _gpt(GPTConfig(layers, width, max(1, width // 64), vocab=256, context=256), batch, length, training)
    if name in GPTS:
        tiny = GPTConfig(layers=1, width=32, heads=2, vocab=64, context=32)
        return _gpt(tiny if small else GPTS[name], batch, length, training)
    if weights := re.fullmatch(r"(\d+) weights", name):
        return WithLoss(TinyLinears(int(weights[1]))), (torch.randn(batch, 16),)
    if name in SMALL:
        model, sizes = SMALL[name]
        return WithLoss(model()) if training else model(), (torch.randn(batch, *sizes),)
    if name == "UNet":
        images, targets = torch.randn(2, batch, 3, length, length)
        return UNet(width=8 if small else 64), (images, targets) if training else (images,)
    return _transformer(SHAPES[name], small, batch, length, training)


def _gpt(config: GPTConfig, batch: int, length: int, training: bool) -> Built:
    tokens, targets = torch.randint(config.vocab, (2, batch, length))
    return GPT(config), (tokens, targets) if training else (tokens,)


def _transformer(shape: Shape, small: bool, batch: int, length: int, training: bool) -> Built:
    import transformers

    kind = getattr(transformers, shape.kind)
    config = kind.config_class(**{**shape.full, **(shape.small if small else {})})
    model, classes = kind(config), torch.randint(2, (batch,))
    if shape.inputs is _IMAGE:
        given = torch.randn(batch, 3, length, length), torch.randint(LABELS, (batch,))
    else:
        tokens, others = torch.randint(config.vocab_size, (2, batch, length))
        given = tokens, classes if "Sequence" in shape.kind else others
    if config.is_encoder_decoder and not training:
        return Transformers(model, "input_ids", "decoder_input_ids"), given
    return Transformers(model, *shape.inputs), given if training else given[:1]


class Transformers(nn.Module):
    """A model of `transformers`, called with inputs in order, that returns the loss if there is one, else logits."""

    def __init__(self, model: nn.Module, *names: str) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *inputs: Tensor) -> Tensor:
        output = self.model(**dict(zip(self.names, inputs, strict=False)))
        return output.logits if output.loss is None else output.loss


class TinyLinears(nn.Module):
    """Many weights and next to no arithmetic: linear layers of 16 features, one after the other; (batch, 16)."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


class WithLoss(nn.Module):
    """A model and the mean square of its result, which is its loss in training."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        result = self.model(x)
        return result.float().square().mean() if self.training else result


def _lenet() -> nn.Module:
    """LeNet-5 with ReLU and max pooling."""
    convolutions = (nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU())
    linears = (nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10))
    return nn.Sequential(*convolutions, nn.MaxPool2d(2), nn.Flatten(), *linears)


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))


SMALL: Mapping[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "MLP 3x64": (_mlp, (64,)),
    "LeNet": (_lenet, (1, 28, 28)),
}
"""Models whose steps are mostly the host's work, and the shape of one of their inputs."""
