"""transformers' Trainer: training, evaluation, generation, checkpoints, with the plugin and with `model.compile`."""

import pytest
import torch
from transformers import GPT2LMHeadModel

pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate, which is not installed")

import accelerate

import ampcompile
from ampcompile.weights.store import store
from examples.ecosystem.transformers_trainer import Passages, small_gpt2, train
from tests.integrations.compare import LOWER, QUIET, compare, fused_steps, same_keys, weights

pytestmark = QUIET


def fresh(way, folder, **kwargs):
    accelerate.state.AcceleratorState._reset_state(True)
    return train(way, str(folder), **kwargs, **{"options": LOWER} if way == "amp" else {})


@pytest.mark.parametrize(
    "plugin", [{}, pytest.param({"use_regional_compilation": True}, marks=pytest.mark.slow)], ids=["whole", "regional"]
)
def test_training(plugin, tmp_path):
    kept = {}

    def run(way):
        trainer, loss = fresh(way, tmp_path, **plugin if way == "amp" else {})
        kept.update(trainer=trainer)
        return trainer.model, loss

    model = compare(run)
    trainer = kept["trainer"]
    assert type(trainer.model) is GPT2LMHeadModel
    assert trainer.accelerator.unwrap_model(trainer.model_wrapped, keep_torch_compile=False) is model
    trainer.save_model(tmp_path / "saved")
    loaded = GPT2LMHeadModel.from_pretrained(tmp_path / "saved")
    same_keys(loaded.state_dict(), model)
    casts = ampcompile.weight_stats().casts
    trainer.evaluate(Passages(8))
    assert ampcompile.weight_stats().casts == casts, "it evaluates the model that isn't compiled"


@pytest.mark.ci
def test_training_goes_on_from_a_checkpoint(tmp_path):
    arguments = {"gradient_accumulation_steps": 2, "save_strategy": "steps", "save_steps": 6}
    straight, _ = fresh("amp", tmp_path, arguments=arguments)
    resumed, _ = fresh("amp", tmp_path, steps=6, arguments=arguments | {"save_strategy": "no"})
    resumed.args.max_steps = 12
    resumed.train_dataset = straight.train_dataset
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    for a, b in zip(weights(resumed.model), weights(straight.model), strict=True):
        assert torch.equal(a, b)


@pytest.mark.ci
def test_generation_and_evaluation_see_the_trained_weights(tmp_path):
    """Compiled in place, the model that evaluates and generates is the compiled one; with the plugin it isn't."""
    trainer, _ = fresh("float32", tmp_path)
    trainer.eval_dataset = Passages(16)
    plain, compiled = trainer.model, small_gpt2()
    compiled.compile(backend="amp", options=LOWER)
    prompt = Passages(4).tokens[:, :8]

    def evaluate(model):
        trainer.model = trainer.model_wrapped = model
        return trainer.evaluate()["eval_loss"]

    def check():
        compiled.load_state_dict(plain.state_dict())
        casts = ampcompile.weight_stats().casts
        assert evaluate(compiled) == pytest.approx(evaluate(plain), rel=1e-3)
        tokens = compiled.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8, do_sample=False)
        assert ampcompile.weight_stats().casts > casts
        with torch.no_grad():
            scores = plain(tokens).logits[:, 7:-1]
        chosen = scores.gather(-1, tokens[:, 8:, None])
        assert (scores.amax(-1, keepdim=True) - chosen).max() < 0.02 * scores.abs().max()
        return tokens

    first = check()
    with torch.no_grad():
        for p in plain.parameters():
            p.add_(torch.randn_like(p), alpha=0.1)
    assert not torch.equal(first, check())


def test_quantized_weights_are_written_by_the_step(tmp_path):
    """fp8 on a CPU: after the first steps no weight is quantized by a pass of its own."""
    options = {**LOWER, "products": "torch", "policy": {"ops": {"addmm": "fp8"}}}
    accelerate.state.AcceleratorState._reset_state(True)
    with fused_steps() as casts:
        train("amp", str(tmp_path), steps=4, options=options)
    assert len(casts) == 4 and casts[1] == casts[-1] == ampcompile.weight_stats().casts
    assert any(copy.form.quantized for copy in store.by_handle.values())
