"""Which models of the scripts run, and why the others don't."""

MODELS: dict[str, tuple[str, ...]] = {
    "huggingface": (
        "DistilBertForMaskedLM",
        "ElectraForCausalLM",
        "DistillGPT2",
        "BlenderbotSmallForCausalLM",
        "DistilBertForQuestionAnswering",
        "MT5ForConditionalGeneration",
        "BlenderbotSmallForConditionalGeneration",
        "ElectraForQuestionAnswering",
        "T5Small",
        "LayoutLMForSequenceClassification",
        "BertForQuestionAnswering",
        "YituTechConvBert",
        "RobertaForQuestionAnswering",
        "MobileBertForQuestionAnswering",
        "PLBartForCausalLM",
    ),
    "timm_models": ("regnety_002", "resmlp_12_224", "mobilenetv3_large_100", "tnt_s_patch16_224"),
}
"""Script → the models that it is asked for, one by one."""

LEFT_OUT = {
    "the script skips them itself": (
        "BlenderbotForConditionalGeneration",
        "GPTJForCausalLM",
        "GPTJForQuestionAnswering",
        "GPTNeoForCausalLM",
        "GPTNeoForSequenceClassification",
        "OPTForCausalLM",
        "Reformer",
    ),
    "the script runs it in float32, without autocast": ("GoogleFnet",),
    "its class is gone from transformers 5": ("Speech2Text2ForCausalLM",),
    "more than 200 million parameters, minutes for each run on two cores": (
        "AlbertForMaskedLM",
        "AlbertForQuestionAnswering",
        "BartForCausalLM",
        "BartForConditionalGeneration",
        "BlenderbotForCausalLM",
        "DebertaV2ForMaskedLM",
        "DebertaV2ForQuestionAnswering",
        "M2M100ForConditionalGeneration",
        "MBartForCausalLM",
        "MBartForConditionalGeneration",
        "MegatronBertForCausalLM",
        "MegatronBertForQuestionAnswering",
        "PegasusForCausalLM",
        "PegasusForConditionalGeneration",
        "TrOCRForCausalLM",
        "XGLMForCausalLM",
        "XLNetLMHeadModel",
    ),
    "for want of time, as one of the same architecture runs": (
        "BertForMaskedLM",
        "CamemBert",
        "LayoutLMForMaskedLM",
        "MobileBertForMaskedLM",
        "PLBartForConditionalGeneration",
        "RobertaForCausalLM",
        "T5ForConditionalGeneration",
    ),
    "for want of time": (
        "AllenaiLongformerBase",
        "DebertaForMaskedLM",
        "DebertaForQuestionAnswering",
        "GPT2ForSequenceClassification",
    ),
}
"""Why → the models of huggingface.py that it isn't asked for."""
