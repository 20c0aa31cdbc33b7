"""Models of timm, torchvision, diffusers and torch_geometric."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from proof.models.plain import call_in_order
from proof.models.subject import Case, Inputs


def make(path: str, *args: Any, **kwargs: Any) -> Any:
    """Import a class or a function, and call it."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)(*args, **kwargs)


def draw_pictures(size: int = 32) -> Callable[[], Inputs]:
    """Two pictures."""
    return lambda: {"x": torch.randn(2, 3, size, size)}


def draw_graph() -> Inputs:
    """Ten nodes and thirty edges."""
    return {"x": torch.randn(10, 8), "edge_index": torch.randint(0, 10, (2, 30))}


def draw_noised(channels: int = 3, size: int = 16, **more: Callable[[], Any]) -> Callable[[], Inputs]:
    """Two noisy pictures and how noisy they are."""
    return lambda: {
        "sample": torch.randn(2, channels, size, size),
        "timestep": torch.randint(0, 1000, (2,)),
        **{name: draw() for name, draw in more.items()},
    }


def find_boxes(run: Callable[..., Any], inputs: Inputs) -> Any:
    """A detector's losses, if it is in training; else the scores of what it finds, and the sum of the boxes: their
    order is another one where two scores are rounded to one.
    """
    boxes = torch.tensor([[4.0, 4.0, 20.0, 20.0], [8.0, 10.0, 30.0, 28.0]])
    targets = [{"boxes": boxes, "labels": torch.tensor([1, 2])} for _ in inputs["x"]]
    results = run(list(inputs["x"]), targets)
    if isinstance(results, dict):
        return results
    return [(result["scores"], result["boxes"].sum(0)) for result in results]


def make_backbone() -> nn.Module:
    """Two convolutions, for a detector."""
    module: Any = nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 32, 3, 2, 1), nn.ReLU()
    )
    module.out_channels = 32
    return module


def make_detector(name: str, sizes: tuple[int, ...] = (8, 16)) -> nn.Module:
    """A detector of torchvision over a small backbone. It keeps all boxes: how many are above a threshold depends on
    roundings.
    """
    ratios = (0.5, 1.0)[: len(sizes)]
    anchors = make("torchvision.models.detection.anchor_utils.AnchorGenerator", (sizes,), (ratios,))
    size = {"num_classes": 3, "min_size": 32, "max_size": 32}
    kept = {"score_thresh": 0.0, "nms_thresh": 1.0, "topk_candidates": 10_000, "detections_per_img": 10_000}
    return make(f"torchvision.models.detection.{name}", make_backbone(), anchor_generator=anchors, **size, **kept)


def make_segmenter(name: str, head: str, *args: Any) -> nn.Module:
    """A segmenter of torchvision over a small backbone."""
    names = importlib.import_module("torchvision.models._utils")
    layers = names.IntermediateLayerGetter(make_backbone(), {"4": "out"})
    return make(
        f"torchvision.models.segmentation.{name}", layers, make(f"torchvision.models.segmentation.{head}", *args)
    )


def make_convnext() -> nn.Module:
    """ConvNeXt in two stages."""
    block = importlib.import_module("torchvision.models.convnext").CNBlockConfig
    return make("torchvision.models.ConvNeXt", [block(8, 16, 1), block(16, None, 1)], num_classes=8)


VISION = "torchvision.models"
TORCHVISION: dict[str, Callable[[], nn.Module]] = {
    "mobilenet v2": partial(make, f"{VISION}.mobilenet_v2", width_mult=0.1, num_classes=8),
    "mobilenet v3": partial(make, f"{VISION}.mobilenet_v3_small", width_mult=0.1, num_classes=8),
    "mnasnet": partial(make, f"{VISION}.MNASNet", 0.1, num_classes=8),
    "densenet": partial(make, f"{VISION}.DenseNet", 4, (2, 2), 8, num_classes=8),
    "vit": partial(make, f"{VISION}.VisionTransformer", 32, 8, 2, 2, 32, 48, num_classes=8),
    "swin": partial(make, f"{VISION}.SwinTransformer", [4, 4], 8, [1, 1], [2, 2], [2, 2], num_classes=8),
    "convnext": make_convnext,
    "retinanet": partial(make_detector, "RetinaNet"),
    "fcos": partial(make_detector, "FCOS", sizes=(8,)),
    "deeplabv3": partial(make_segmenter, "DeepLabV3", "deeplabv3.DeepLabHead", 32, 4, (2, 3)),
    "fcn": partial(make_segmenter, "FCN", "fcn.FCNHead", 32, 4),
}
DETECTORS = ("retinanet", "fcos")
TIMM: dict[str, dict[str, Any]] = {
    "test_vit": {"img_size": 64},
    "test_vit3": {"img_size": 64},
    "test_resnet": {},
    "test_efficientnet": {},
    "test_byobnet": {},
    "test_convnext": {},
    "test_nfnet": {},
    "test_mambaout": {},
    "cait_xxs24_224": {"img_size": 64, "embed_dim": 32, "depth": 2, "num_heads": 2},
    "test_convnext2": {},
    "eva02_tiny_patch14_224": {"img_size": 56, "embed_dim": 48, "depth": 2, "num_heads": 2},
    "ghostnet_050": {},
}
BLOCKS = {"block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4}
DOWN_UP = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
CROSS = {
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "cross_attention_dim": 16,
    "attention_head_dim": 4,
}
HEADS = {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 2}
CODED = {
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
    "latent_channels": 4,
}
DIFFUSERS: dict[str, tuple[str, dict[str, Any], Callable[[], Inputs]]] = {
    "unet": ("UNet2DModel", {"sample_size": 16, "attention_head_dim": 4, **DOWN_UP, **BLOCKS}, draw_noised()),
    "conditional unet": (
        "UNet2DConditionModel",
        {"sample_size": 16, "in_channels": 4, "out_channels": 4, **CROSS, **BLOCKS},
        draw_noised(4, encoder_hidden_states=lambda: torch.randn(2, 5, 16)),
    ),
    "dit": (
        "DiTTransformer2DModel",
        {
            "sample_size": 8,
            "patch_size": 2,
            "in_channels": 4,
            "num_embeds_ada_norm": 100,
            "norm_num_groups": 4,
            **HEADS,
        },
        lambda: {
            "hidden_states": torch.randn(2, 4, 8, 8),
            "timestep": torch.randint(0, 100, (2,)),
            "class_labels": torch.randint(0, 9, (2,)),
        },
    ),
    "vae": ("AutoencoderKL", {**CODED, **BLOCKS}, lambda: {"sample": torch.randn(2, 3, 16, 16)}),
    "stable diffusion 3": (
        "SD3Transformer2DModel",
        {"sample_size": 8, "patch_size": 2, "in_channels": 4, "out_channels": 4, "joint_attention_dim": 16}
        | {"caption_projection_dim": 32, "pooled_projection_dim": 16, "pos_embed_max_size": 8, **HEADS},
        lambda: {
            "hidden_states": torch.randn(2, 4, 8, 8),
            "encoder_hidden_states": torch.randn(2, 5, 16),
            "pooled_projections": torch.randn(2, 16),
            "timestep": torch.randint(0, 1000, (2,)),
        },
    ),
    "pixart": (
        "PixArtTransformer2DModel",
        {"sample_size": 8, "patch_size": 2, "in_channels": 4, "out_channels": 8, "cross_attention_dim": 32}
        | {"caption_channels": 16, "norm_num_groups": 4, "use_additional_conditions": False, **HEADS},
        lambda: {
            "hidden_states": torch.randn(2, 4, 8, 8),
            "encoder_hidden_states": torch.randn(2, 5, 16),
            "timestep": torch.randint(0, 1000, (2,)),
        },
    ),
}
GEOMETRIC = ("GCN", "GAT", "GraphSAGE", "GIN", "EdgeCNN")


def _timm(name: str, **own: Any) -> nn.Module:
    return make("timm.create_model", name, num_classes=8, **own)


CASES = {
    **{
        f"timm {n}": Case(
            "timm", partial(_timm, n, **own), draw_pictures(own.get("img_size", 64)), call_in_order, "timm"
        )
        for n, own in TIMM.items()
    },
    **{
        f"torchvision {n}": Case(
            "torchvision", build, draw_pictures(), find_boxes if n in DETECTORS else call_in_order, "torchvision"
        )
        for n, build in TORCHVISION.items()
    },
    **{
        f"diffusers {n}": Case("diffusers", partial(make, f"diffusers.{kind}", **own), inputs, package="diffusers")
        for n, (kind, own, inputs) in DIFFUSERS.items()
    },
    **{
        f"torch_geometric {n.lower()}": Case(
            "torch_geometric",
            partial(make, f"torch_geometric.nn.models.{n}", 8, 16, 2, 4),
            draw_graph,
            package="torch_geometric",
        )
        for n in GEOMETRIC
    },
}
