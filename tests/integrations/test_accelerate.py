"""`prepare` compiles with amp; accumulation, checkpoints and unwrapping are as without compilation."""

import pytest
import torch

pytest.importorskip("accelerate", reason="accelerate is not installed")

import accelerate
from safetensors.torch import load_file

import ampcompile
from ampcompile import GradScaler, OptimizerError, OptionError
from ampcompile.integrations.accelerate import AmpPlugin
from examples.ecosystem.accelerate_loop import train
from tests.integrations.compare import LOWER, QUIET, compare, compare_with_checkpoints, fused_steps, same_keys
from tests.ranks import run_ranks

pytestmark = QUIET


def test_what_torch_compile_is_given(monkeypatch):
    assert AmpPlugin().to_kwargs() == {"backend": "amp"}
    given = AmpPlugin(mode="max-autotune", options=LOWER, fullgraph=True, use_regional_compilation=True)
    expected = {"backend": "amp", "fullgraph": True, "options": {"mode": "max-autotune", "lower": "aot_eager"}}
    assert given.to_kwargs() == expected
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "eager")
    monkeypatch.setenv("ACCELERATE_DYNAMO_MODE", "reduce-overhead")
    assert AmpPlugin().to_kwargs() == {"backend": "amp", "options": {"mode": "reduce-overhead"}}
    with pytest.raises(TypeError, match="backend"):
        AmpPlugin(backend="inductor")


def test_prepare_refuses_an_option_that_is_none():
    accelerator = accelerate.Accelerator(cpu=True, dynamo_plugin=AmpPlugin(options={"weihgts": "cached"}))
    with pytest.raises(OptionError, match="weights"):
        accelerator.prepare(torch.nn.Linear(2, 2))


def test_accelerates_own_list_lacks_us():
    with pytest.raises(ValueError, match="not a valid DynamoBackend"):  # if not: the plugin can go
        accelerate.Accelerator(dynamo_backend="amp", cpu=True)


def test_a_loop_with_accumulation(tmp_path):
    kept = {}

    def run(way):
        accelerate.state.AcceleratorState._reset_state(True)
        accelerator, model, loss = train(way, options=LOWER)
        kept.update(accelerator=accelerator, model=model)
        return model, loss

    compare(run)
    accelerator, model = kept.values()
    plain = accelerator.unwrap_model(model, keep_torch_compile=False)
    assert type(plain) is torch.nn.Sequential and model._orig_mod is plain
    accelerator.save_model(plain, tmp_path)
    same_keys(load_file(tmp_path / "model.safetensors"), plain)

    accelerator.save_state(tmp_path / "state")
    x = torch.randn(8, 64)
    with torch.no_grad():
        before = model(x)
        for p in plain.parameters():
            p.zero_()
        assert not model(x).any()
        accelerator.load_state(tmp_path / "state")
        assert torch.equal(model(x), before)


def test_the_region_of_accelerate_beats_an_option():
    """`prepare` puts autocast inside of what is compiled."""
    outputs = {}
    for dtype in (torch.bfloat16, torch.float16):
        accelerate.state.AcceleratorState._reset_state(True)
        plugin = AmpPlugin(options=LOWER | {"dtype": dtype})
        accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16", dynamo_plugin=plugin)
        torch.manual_seed(0)
        model = accelerator.prepare(torch.nn.Linear(64, 64))
        outputs[dtype] = model(torch.randn(8, 64))
        assert outputs[dtype].dtype is torch.float32
    assert torch.equal(*outputs.values())
    assert torch.equal(outputs[torch.float16], outputs[torch.float16].bfloat16().float())


@pytest.mark.parametrize("optim", [torch.optim, ampcompile.optim])
@pytest.mark.parametrize("scaler", [GradScaler, torch.amp.GradScaler])
def test_a_scaler_in_accelerates_optimizer(optim, scaler):
    """It patches `step` to see whether it is called: torch's step is its own, ours is fused, and skips are told."""
    accelerate.Accelerator(cpu=True)
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = accelerate.optimizer.AcceleratedOptimizer(
        optim.SGD([weight], lr=1.0), scaler=scaler("cpu", init_scale=4.0)
    )
    with fused_steps() as casts:
        check_skips(optimizer, weight)
    assert len(casts) == (2 if optim is ampcompile.optim else 0)


def check_skips(optimizer, weight):
    for factor, skipped, expected in ((1.0, False, 0.0), (torch.inf, True, 0.0), (1.0, False, -1.0)):
        optimizer.zero_grad()
        optimizer.scaler.scale((weight * factor).sum()).backward()
        optimizer.step()
        assert optimizer.step_was_skipped is skipped and weight.eq(expected).all()


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_checkpoints_around_a_compiled_block_in_the_context_of_accelerate(precision):
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision=precision)
    compare_with_checkpoints(accelerator.autocast, accelerator.backward)


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch was built without torch.distributed")
def test_its_fsdp2_gathers_in_16_bits_and_changes_no_number(tmp_path):
    run_ranks("tests.integrations.shards", folder=tmp_path, timeout=200)


@pytest.mark.parametrize("first", ["keep_masters", "prepare"])
def test_masters_are_kept_before_accelerate_takes_the_step(first):
    """The other order is an error that says so, once it has taken the step."""
    accelerate.Accelerator(cpu=True)
    weight = torch.nn.Parameter(torch.ones(4).bfloat16())
    optimizer, scaler = torch.optim.SGD([weight], lr=2**-12), GradScaler("cpu", init_scale=4.0)
    if first == "keep_masters":
        ampcompile.keep_masters(optimizer)
    prepared = accelerate.optimizer.AcceleratedOptimizer(optimizer, scaler=scaler)
    for _ in range(16):
        prepared.zero_grad()
        scaler.scale(-weight.float().sum()).backward()
        prepared.step()
    if first == "keep_masters":
        assert weight.eq(1 + 2**-7).all(), "16 updates that a bfloat16 is too coarse for"
    else:
        with pytest.raises(OptimizerError, match=r"call keep_masters\(\) first, .*Accelerate's prepare"):
            ampcompile.keep_masters(optimizer)
