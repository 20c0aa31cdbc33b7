"""PEFT's LoRA, trained by TRL's SFTTrainer: adapters follow the optimizer, the frozen model stays, merges are seen."""

import pytest
import torch

pytest.importorskip("peft", reason="peft is not installed")
pytest.importorskip("trl", reason="trl is not installed")

import peft
from accelerate.state import AcceleratorState
from safetensors.torch import load_file

import ampcompile
from examples.ecosystem.lora_sft import train
from examples.ecosystem.transformers_trainer import Passages, small_gpt2
from tests.integrations.compare import LOWER, QUIET, compare

pytestmark = QUIET


def test_training(tmp_path):
    def run(way):
        AcceleratorState._reset_state(True)
        trainer, loss = train(way, str(tmp_path), **{"options": LOWER} if way == "amp" else {})
        return trainer.model, loss

    model = compare(run)
    for name, weight in small_gpt2().named_parameters():
        inside = name.replace("c_attn.", "c_attn.base_layer.").replace("c_fc.", "c_fc.base_layer.")
        found = model.base_model.model.get_parameter(inside)
        assert torch.equal(found, weight) and not found.requires_grad
    model.save_pretrained(tmp_path / "adapters")
    saved = load_file(tmp_path / "adapters" / "adapter_model.safetensors")
    assert len(saved) == 8 and all(".lora_" in name and "_orig_mod" not in name for name in saved)
    loaded = peft.PeftModel.from_pretrained(small_gpt2(), tmp_path / "adapters")
    assert torch.equal(loaded(Passages(4).tokens).logits, model.base_model(Passages(4).tokens).logits)


def test_adapters_of_a_model_that_is_compiled_already():
    base, tokens = small_gpt2(), Passages(2).tokens
    base.compile(backend="amp", options=LOWER)
    with torch.no_grad():
        plain = base(tokens).logits
    config = peft.LoraConfig(
        target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM", init_lora_weights=False
    )
    model = peft.get_peft_model(base, config)
    casts = ampcompile.weight_stats().casts
    with torch.no_grad():
        adapted = model(tokens).logits
    assert ampcompile.weight_stats().casts > casts
    base._compiled_call_impl = None
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        eager = model(tokens).logits.float()
    assert (adapted - eager).norm() < 0.02 * eager.norm() < (adapted - plain).norm()


@pytest.mark.ci
def test_merging_and_switching_are_seen():
    config = peft.LoraConfig(r=4, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True, init_lora_weights=False)
    model = peft.get_peft_model(small_gpt2(), config).eval()
    compiled = torch.compile(model, backend="amp", options=LOWER)
    tokens = Passages(4).tokens

    def error():
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            ours, eager = compiled(tokens).logits, model(tokens).logits
        return float((ours - eager).norm() / eager.norm())

    with torch.no_grad():
        plain = model(tokens).logits
        with model.disable_adapter():
            assert (model(tokens).logits - plain).norm() > 0.1 * plain.norm(), "the adapters do something"
            assert error() < 1e-3
    assert error() < 1e-3
    assert ampcompile.weight_stats().copies
    model.merge_adapter()
    assert error() < 1e-3
    model.unmerge_adapter()
    assert error() < 1e-3
