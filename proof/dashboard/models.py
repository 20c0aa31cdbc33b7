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
    "timm_models": ("lcnet_050", "resmlp_12_224", "regnety_002", "mobilenetv2_100"),
}
"""Script → the models that it is asked for, in this order."""

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
    "more than 200 million parameters": (
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
    "another of its architecture is there": (
        "BertForMaskedLM",
        "CamemBert",
        "LayoutLMForMaskedLM",
        "MobileBertForMaskedLM",
        "PLBartForConditionalGeneration",
        "RobertaForCausalLM",
        "T5ForConditionalGeneration",
    ),
    "minutes for each run on two cores": (
        "AllenaiLongformerBase",
        "DebertaForMaskedLM",
        "DebertaForQuestionAnswering",
        "GPT2ForSequenceClassification",
    ),
}
"""Why → the models of huggingface.py that it isn't asked for."""
