"""Models of transformers that see, hear, or do several things at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from proof.models.subject import Inputs
from proof.models.text import tokens

Rows = dict[str, tuple[str, dict[str, Any], Callable[[], Inputs]]]


def picture(size: int = 16) -> Callable[[], Inputs]:
    """Two square pictures."""
    return lambda: {"pixel_values": torch.randn(2, 3, size, size)}


def wave() -> Inputs:
    """Two stretches of sound."""
    return {"input_values": torch.randn(2, 400)}


def spectrum() -> Inputs:
    """Two spectra of eight bands, and what the decoder begins with."""
    return {"input_features": torch.randn(2, 8, 32), "decoder_input_ids": torch.randint(3, 64, (2, 6))}


def captioned() -> Inputs:
    """Two pictures with two sentences."""
    return tokens() | picture()()


def with_picture() -> Inputs:
    """Sentences that begin with the 16 places of a picture's patches."""
    found = captioned()
    places = torch.full((2, 16), 63)
    text = found["input_ids"].clamp(max=62)
    return found | {
        "input_ids": torch.cat([places, text], 1),
        "attention_mask": torch.cat([torch.ones_like(places), found["attention_mask"]], 1),
    }


STAGES = {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2}
WINDOWS = {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 2}
PYRAMID = {
    "num_encoder_blocks": 2,
    "depths": [1, 1],
    "sr_ratios": [2, 1],
    "hidden_sizes": [8, 16],
    "patch_sizes": [3, 3],
} | {"strides": [2, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2], "decoder_hidden_size": 16}
RESNET = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 2], "layer_type": "basic"}
BACKBONE = {"backbone_config": {"model_type": "resnet", "out_features": ["stage2"], **RESNET}}
SOUND = {
    "conv_dim": [16, 16],
    "conv_kernel": [10, 3],
    "conv_stride": [5, 2],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "apply_spec_augment": False,
    "classifier_proj_size": 16,
}
VISION: Rows = {
    "vit": ("ViTForImageClassification", {}, picture()),
    "deit": ("DeiTForImageClassification", {}, picture()),
    "beit": ("BeitForImageClassification", {}, picture()),
    "dinov2": ("Dinov2ForImageClassification", {}, picture()),
    "dinov3-vit": ("DINOv3ViTModel", {}, picture()),
    "swin": ("SwinForImageClassification", WINDOWS, picture()),
    "swinv2": ("Swinv2ForImageClassification", WINDOWS, picture()),
    "convnext": ("ConvNextForImageClassification", STAGES, picture(32)),
    "convnextv2": ("ConvNextV2ForImageClassification", STAGES, picture(32)),
    "resnet": ("ResNetForImageClassification", RESNET, picture(32)),
    "regnet": ("RegNetForImageClassification", RESNET | {"groups_width": 8, "layer_type": "y"}, picture(32)),
    "mobilenet-v2": ("MobileNetV2ForImageClassification", {"depth_multiplier": 0.25, "image_size": 32}, picture(32)),
    "mobilevit": (
        "MobileViTForImageClassification",
        {"hidden_sizes": [16, 16, 16], "neck_hidden_sizes": [8, 8, 8, 8, 8, 8, 16], "image_size": 64, "patch_size": 2},
        picture(64),
    ),
    "poolformer": (
        "PoolFormerForImageClassification",
        {"hidden_sizes": [8, 16], "depths": [1, 1], "num_encoder_blocks": 2, "patch_sizes": [3, 3], "strides": [2, 2]}
        | {"padding": [1, 1]},
        picture(),
    ),
    "pvt": (
        "PvtForImageClassification",
        {"image_size": 32, "hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 2, 2, 4]},
        picture(32),
    ),
    "segformer": ("SegformerForSemanticSegmentation", PYRAMID, picture(32)),
    "vit-mae": ("ViTMAEForPreTraining", {"decoder_hidden_size": 32, "decoder_intermediate_size": 48}, picture()),
    "yolos": ("YolosForObjectDetection", {"image_size": [16, 16], "num_detection_tokens": 4}, picture()),
    "detr": ("DetrForObjectDetection", BACKBONE | {"use_timm_backbone": False, "num_queries": 4}, picture(32)),
    "videomae": (
        "VideoMAEForVideoClassification",
        {"num_frames": 4},
        lambda: {"pixel_values": torch.randn(2, 4, 3, 16, 16)},
    ),
}
AUDIO: Rows = {
    "wav2vec2": ("Wav2Vec2ForCTC", SOUND, wave),
    "hubert": ("HubertForCTC", SOUND, wave),
    "wavlm": ("WavLMForCTC", SOUND, wave),
    "unispeech-sat": ("UniSpeechSatForCTC", SOUND, wave),
    "data2vec-audio": ("Data2VecAudioForCTC", SOUND | {"conv_pos_kernel_size": 3}, wave),
    "sew": ("SEWForCTC", SOUND | {"squeeze_factor": 2}, wave),
    "whisper": (
        "WhisperForConditionalGeneration",
        {"num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 40},
        spectrum,
    ),
    "speech-to-text": (
        "Speech2TextForConditionalGeneration",
        {"input_feat_per_channel": 8, "conv_channels": 16, "max_source_positions": 40, "max_target_positions": 40},
        lambda: spectrum() | {"input_features": torch.randn(2, 32, 8)},
    ),
    "speecht5": (
        "SpeechT5ForSpeechToText",
        {key: value for key, value in SOUND.items() if key != "classifier_proj_size"}
        | {"max_speech_positions": 80, "max_text_positions": 40},
        lambda: wave() | {"decoder_input_ids": torch.randint(3, 64, (2, 6))},
    ),
    "audio-spectrogram-transformer": (
        "ASTForAudioClassification",
        {"num_mel_bins": 8, "max_length": 32, "frequency_stride": 4, "time_stride": 4},
        lambda: {"input_values": torch.randn(2, 32, 8)},
    ),
}
SEVERAL: Rows = {
    "clip": ("CLIPModel", {}, captioned),
    "siglip": ("SiglipModel", {}, captioned),
    "blip": ("BlipForConditionalGeneration", {}, captioned),
    "chinese-clip": ("ChineseCLIPModel", {}, captioned),
    "vilt": ("ViltForMaskedLM", {}, captioned),
    "flava": ("FlavaModel", {}, captioned),
    "git": ("GitForCausalLM", {}, captioned),
    "llava": (
        "LlavaForConditionalGeneration",
        {"image_token_index": 63, "vision_feature_layer": -1, "vision_feature_select_strategy": "default"},
        with_picture,
    ),
    "paligemma": ("PaliGemmaForConditionalGeneration", {"image_token_index": 63, "projection_dim": 32}, with_picture),
    "owlvit": ("OwlViTModel", {}, captioned),
    "lxmert": (
        "LxmertForPreTraining",
        {"l_layers": 1, "x_layers": 1, "r_layers": 1, "visual_feat_dim": 8}
        | {"num_object_labels": 8, "num_attr_labels": 8, "num_qa_labels": 8},
        lambda: tokens() | {"visual_feats": torch.randn(2, 4, 8), "visual_pos": torch.rand(2, 4, 4)},
    ),
}
