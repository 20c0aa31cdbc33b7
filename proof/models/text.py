"""Language models of transformers."""

from __future__ import annotations

from typing import Any

import torch

from proof.models.subject import Inputs

Rows = dict[str, tuple[str, dict[str, Any]]]
DECODERS: Rows = {
    "llama": ("LlamaForCausalLM", {}),
    "mistral": ("MistralForCausalLM", {"sliding_window": 4}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3ForCausalLM", {}),
    "gemma": ("GemmaForCausalLM", {}),
    "gemma2": ("Gemma2ForCausalLM", {"sliding_window": 4, "query_pre_attn_scalar": 8}),
    "gemma3": ("Gemma3ForCausalLM", {"sliding_window": 4, "query_pre_attn_scalar": 8}),
    "gpt2": ("GPT2LMHeadModel", {}),
    "gpt-neo": ("GPTNeoForCausalLM", {"attention_types": [[["global", "local"], 1]], "window_size": 4}),
    "gpt-neox": ("GPTNeoXForCausalLM", {}),
    "gpt-j": ("GPTJForCausalLM", {"rotary_dim": 4}),
    "gpt-bigcode": ("GPTBigCodeForCausalLM", {}),
    "codegen": ("CodeGenForCausalLM", {"rotary_dim": 4}),
    "opt": ("OPTForCausalLM", {}),
    "bloom": ("BloomForCausalLM", {}),
    "falcon": ("FalconForCausalLM", {}),
    "mpt": ("MptForCausalLM", {}),
    "phi": ("PhiForCausalLM", {"num_key_value_heads": 4}),
    "phi3": ("Phi3ForCausalLM", {}),
    "olmo": ("OlmoForCausalLM", {}),
    "olmo2": ("Olmo2ForCausalLM", {}),
    "cohere": ("CohereForCausalLM", {}),
    "cohere2": ("Cohere2ForCausalLM", {"sliding_window": 4}),
    "stablelm": ("StableLmForCausalLM", {}),
    "starcoder2": ("Starcoder2ForCausalLM", {}),
    "granite": ("GraniteForCausalLM", {}),
    "nemotron": ("NemotronForCausalLM", {"head_dim": 8, "num_key_value_heads": 2}),
    "persimmon": ("PersimmonForCausalLM", {}),
    "xglm": ("XGLMForCausalLM", {}),
    "ctrl": ("CTRLLMHeadModel", {"dff": 48}),
    "biogpt": ("BioGptForCausalLM", {}),
    "smollm3": ("SmolLM3ForCausalLM", {}),
    "glm": ("GlmForCausalLM", {}),
    "helium": ("HeliumForCausalLM", {}),
    "diffllama": ("DiffLlamaForCausalLM", {}),
}
EXPERTS: Rows = {
    "mixtral": ("MixtralForCausalLM", {}),
    "qwen2-moe": ("Qwen2MoeForCausalLM", {}),
    "qwen3-moe": ("Qwen3MoeForCausalLM", {}),
    "olmoe": ("OlmoeForCausalLM", {}),
    "deepseek-v3": (
        "DeepseekV3ForCausalLM",
        {"num_key_value_heads": 4, "n_group": 2, "topk_group": 1, "kv_lora_rank": 8, "q_lora_rank": 8}
        | {"qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8, "first_k_dense_replace": 1, "head_dim": 4},
    ),
    "granite-moe": ("GraniteMoeForCausalLM", {}),
    "gpt-oss": ("GptOssForCausalLM", {"sliding_window": 4}),
    "phimoe": ("PhimoeForCausalLM", {}),
    "jetmoe": ("JetMoeForCausalLM", {"kv_channels": 8}),
    "ernie4.5-moe": ("Ernie4_5_MoeForCausalLM", {"moe_num_experts": 4, "moe_k": 2}),
    "switch": ("SwitchTransformersForConditionalGeneration", {"expert_capacity": 8, "router_jitter_noise": 0.0}),
}
STATES: Rows = {
    "mamba": ("MambaForCausalLM", {"time_step_rank": 4}),
    "mamba2": ("Mamba2ForCausalLM", {"num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 4}),
    "falcon-mamba": ("FalconMambaForCausalLM", {"time_step_rank": 4}),
    "rwkv": ("RwkvForCausalLM", {"attention_hidden_size": 32}),
    "recurrent-gemma": ("RecurrentGemmaForCausalLM", {"lru_width": 32, "attention_window_size": 4}),
    "qwen3-next": ("Qwen3NextForCausalLM", {"layer_types": ["linear_attention", "full_attention"]}),
    "jamba": (
        "JambaForCausalLM",
        {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1}
        | {"mamba_d_state": 8, "mamba_dt_rank": 4, "use_mamba_kernels": False},
    ),
}
ENCODERS: Rows = {
    "bert": ("BertForMaskedLM", {}),
    "roberta": ("RobertaForMaskedLM", {}),
    "distilbert": ("DistilBertForMaskedLM", {}),
    "electra": ("ElectraForMaskedLM", {}),
    "deberta": ("DebertaForMaskedLM", {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}),
    "deberta-v2": ("DebertaV2ForMaskedLM", {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}),
    "albert": ("AlbertForMaskedLM", {}),
    "mpnet": ("MPNetForMaskedLM", {}),
    "xlnet": ("XLNetLMHeadModel", {"d_inner": 48}),
    "modernbert": ("ModernBertForMaskedLM", {"local_attention": 4}),
    "longformer": ("LongformerForMaskedLM", {"attention_window": [4, 4]}),
    "funnel": ("FunnelForMaskedLM", {"block_sizes": [1, 1], "d_head": 8, "d_inner": 48}),
    "squeezebert": ("SqueezeBertForMaskedLM", {"embedding_size": 32}),
    "roformer": ("RoFormerForMaskedLM", {}),
    "fnet": ("FNetForMaskedLM", {}),
    "convbert": ("ConvBertForMaskedLM", {}),
    "mobilebert": (
        "MobileBertForMaskedLM",
        {"intra_bottleneck_size": 16, "true_hidden_size": 16, "num_feedforward_networks": 2},
    ),
    "esm": ("EsmForMaskedLM", {"vocab_size": 64, "mask_token_id": 3, "token_dropout": False, "pad_token_id": 0}),
    "nystromformer": ("NystromformerForMaskedLM", {"num_landmarks": 8, "segment_means_seq_len": 8}),
}
PAIRS: Rows = {
    "t5": ("T5ForConditionalGeneration", {}),
    "mt5": ("MT5ForConditionalGeneration", {}),
    "bart": ("BartForConditionalGeneration", {}),
    "mbart": ("MBartForConditionalGeneration", {}),
    "pegasus": ("PegasusForConditionalGeneration", {}),
    "marian": ("MarianMTModel", {}),
    "m2m100": ("M2M100ForConditionalGeneration", {}),
    "blenderbot": ("BlenderbotForConditionalGeneration", {}),
    "led": ("LEDForConditionalGeneration", {"attention_window": 4, "max_encoder_position_embeddings": 40}),
    "longt5": ("LongT5ForConditionalGeneration", {"local_radius": 3}),
    "prophetnet": (
        "ProphetNetForConditionalGeneration",
        {"num_encoder_layers": 2, "num_encoder_attention_heads": 4, "num_decoder_attention_heads": 4},
    ),
    "fsmt": ("FSMTForConditionalGeneration", {"src_vocab_size": 64, "tgt_vocab_size": 64}),
}


def tokens() -> Inputs:
    """Two sentences of eight tokens, one of them padded."""
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[0, -2:] = 0
    return {"input_ids": torch.randint(3, 64, (2, 8)), "attention_mask": mask}


def pair() -> Inputs:
    """The same, and what the decoder begins with."""
    return tokens() | {"decoder_input_ids": torch.randint(3, 64, (2, 6))}
