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
        "GPT2ForSequenceClassification",
        "DebertaForQuestionAnswering",
        "DebertaForMaskedLM",
        "AllenaiLongformerBase",
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
    "more than 200 million parameters, too long on two cores": (
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
}
"""Why → the models of huggingface.py that it isn't asked for."""

CAUSES = {
    "regnety_002": """its weights are those of convolutions, which oneDNN puts into blocks in each training call.
It finds them in the processor's cache after a cast; a copy it reads from memory, line by line. With 40 weights of
576 x 160 in turn, one takes 131 us from a copy and 137 with its cast, of which the cast alone takes 18. So copies gain
little here, and to know 39 of them fresh takes 100 us a call. In inference convolutions read copies in blocks"""
}
"""Model → why amp is slower on it than Inductor."""
