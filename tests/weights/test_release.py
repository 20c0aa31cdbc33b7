"""Serving without float32 weights: the same bits, fewer bytes, an error for all that needs them, and the way back."""

import copy
import ctypes
import gc
import io
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ampcompile
from ampcompile.errors import ReleasedError
from ampcompile.torch_private import patches, storages
from ampcompile.weights import release
from ampcompile.weights.store import store
from benchmarks.models import GPT, GPTConfig
from tests.threads import running

lowered = pytest.mark.parametrize("lower", ["aot_eager", pytest.param("inductor", marks=pytest.mark.ci)])
NEEDED = "release_masters"


class Layer(nn.Module):
    """A norm and two linear layers."""

    def __init__(self, inner: int = 128) -> None:
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(64), nn.Linear(64, inner), nn.Linear(inner, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.first(self.norm(x)).relu())


def tied() -> tuple[nn.Module, Tensor]:
    return GPT(GPTConfig(layers=1, width=64, heads=2, vocab=96, context=16)), torch.randint(0, 96, (2, 8))


def convolutions() -> tuple[nn.Module, Tensor]:
    layers = [nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 3), nn.Flatten(), nn.Linear(128, 64)]
    return nn.Sequential(*layers), torch.randn(2, 3, 8, 8)


def layers() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(Layer(), Layer()), torch.randn(4, 64)


MODELS = {"tied": tied, "convolutions": convolutions, "layers": layers}
FLOAT32 = {  # what graphs read in float32
    "tied": {"tokens.weight", "positions.weight", "blocks.0.attention_norm.weight", "blocks.0.attention_norm.bias"}
    | {"blocks.0.mlp_norm.weight", "blocks.0.mlp_norm.bias", "norm.weight", "norm.bias"},
    "convolutions": {"1.weight", "1.bias"},
    "layers": {f"{i}.norm.{name}" for i in (0, 1) for name in ("weight", "bias")},
}


def amp(model: Any, lower: str = "aot_eager", **options: Any) -> Any:
    return torch.compile(model, backend="amp", options={"lower": lower, **options})


def called(model: nn.Module, x: Tensor, lower: str = "aot_eager", **options: Any) -> Any:
    """The model, compiled and called often enough that its weights are packed."""
    compiled = amp(model, lower, **options)
    with torch.no_grad():
        for _ in range(4):
            compiled(x)
    return compiled


def autocast(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        return model(x).float()


def run(compiled: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        return compiled(x)


def saved(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def live_bytes(model: nn.Module) -> int:
    """Bytes of the parameters' memory and of all copies."""
    held = {p.data_ptr(): p.nbytes for p in model.parameters() if storages.has_memory(p)}
    return sum(held.values()) + ampcompile.weight_stats().bytes


@lowered
@pytest.mark.parametrize("name", MODELS)
def test_calls_keep_their_bits_and_only_what_graphs_read_stays(name: str, lower: str) -> None:
    model, x = MODELS[name]()
    expected = autocast(model.eval(), x)
    compiled = called(model, x, lower)
    assert torch.equal(run(compiled, x), expected)
    whole = sum(p.nbytes for p in model.parameters())
    copies = ampcompile.weight_stats()
    released = ampcompile.release_masters(compiled)
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert all(torch.equal(run(compiled, x), expected) for _ in range(3))
    kept = released.kept.keys()
    assert kept == FLOAT32[name] == {n for n, p in model.named_parameters() if storages.has_memory(p)}
    in_float32 = sum(p.nbytes for n, p in model.named_parameters() if n in kept)
    assert released.bytes_freed == whole - in_float32
    assert ampcompile.weight_stats()._replace(casts=0) == copies._replace(casts=0)
    if not any(copy.form.wide for copy in store.copies.values()):
        assert live_bytes(model) <= whole / 2 * 1.1 + in_float32
    assert f"{released.bytes_freed:,} bytes freed" in str(released)


FORBIDDEN: dict[str, Callable[[Any], object]] = {
    "eager call": lambda case: autocast(case.model, case.x),
    "eager call of a part": lambda case: case.model[0].first(case.x),
    "read": lambda case: case.weight.sum(),
    "view": lambda case: case.weight[0],
    "print": lambda case: repr(case.weight),
    "numpy": lambda case: case.weight.detach().numpy(),
    "write": lambda case: torch.no_grad()(case.weight.zero_)(),
    "write of .data": lambda case: case.weight.data.zero_(),
    "new .data": lambda case: setattr(case.weight, "data", torch.zeros_like(case.weight)),
    "another released weight's .data": lambda case: setattr(case.weight, "data", case.model[1].first.weight.data),
    "init": lambda case: nn.init.normal_(case.weight),
    "fused step": lambda case: step(case.weight, fused=True),
    "foreach step": lambda case: step(case.weight, foreach=True),
    "swap": lambda case: torch.utils.swap_tensors(case.weight, case.model[1].first.weight),
    "train": lambda case: case.model.train(),
    "train of the compiled": lambda case: case.compiled.train(),
    "train of a part": lambda case: case.model[0].train(),
    "state_dict": lambda case: case.model.state_dict(),
    "state_dict of the compiled": lambda case: case.compiled.state_dict(),
    "load_state_dict": lambda case: case.model.load_state_dict(case.checkpoint),
    "load_state_dict(assign=True)": lambda case: case.model.load_state_dict(case.checkpoint, assign=True),
    "to": lambda case: case.model.to(torch.bfloat16),
    "half of a part": lambda case: case.model[0].first.half(),
    "share_memory": lambda case: case.model.share_memory(),
    "deepcopy": lambda case: copy.deepcopy(case.model),
    "deepcopy of a part": lambda case: copy.deepcopy(case.model[0].first),
    "pickle": lambda case: pickle.dumps(case.model),
    "save": lambda case: torch.save(case.model, io.BytesIO()),
    "save of weights": lambda case: torch.save([p.detach() for p in case.model.parameters()], io.BytesIO()),
    "other shape": lambda case: run(case.compiled, case.x[:3]),
    "gradients": lambda case: case.compiled(case.x),
    "other options": lambda case: run(amp(case.model, dtype=torch.float16), case.x),
    "another backend": lambda case: run(torch.compile(case.model, backend="eager"), case.x),
    "explain": lambda case: ampcompile.explain(case.compiled)(case.x),
    "audit": lambda case: ampcompile.audit(case.model)(case.x),
    "functional_call": lambda case: torch.func.functional_call(case.model, {}, (case.x,)),
}


def step(weight: Tensor, **options: Any) -> None:
    weight.grad = torch.ones_like(weight)
    torch.optim.AdamW([weight], **options).step()


class Case:
    def __init__(self) -> None:
        self.model, self.x = layers()
        self.model.eval()
        self.checkpoint = saved(self.model)
        self.compiled = called(self.model, self.x)
        self.expected = run(self.compiled, self.x)
        self.weight = self.model[0].first.weight
        self.released = ampcompile.release_masters(self.model)


@pytest.mark.parametrize("use", FORBIDDEN)
def test_what_needs_the_numbers_raises_and_changes_nothing(use: str) -> None:
    case = Case()
    with pytest.raises(Exception, match=f"(?s)(found .* {NEEDED}|has weakref)"):
        FORBIDDEN[use](case)
    assert torch.equal(run(case.compiled.eval(), case.x), case.expected)
    assert not any(module.training for module in case.model.modules())
    case.released.restore(case.checkpoint)
    assert torch.equal(run(case.compiled, case.x), case.expected)
    assert torch.equal(autocast(case.model, case.x), case.expected)


def test_after_restoring_all_works_as_before(tmp_path: Any) -> None:
    case = Case()
    torch.save(case.checkpoint, tmp_path / "model.pt")
    case.released.restore(tmp_path / "model.pt")
    assert all(torch.equal(value, case.checkpoint[name]) for name, value in case.model.state_dict().items())
    copied = copy.deepcopy(case.model.train()).eval()
    assert torch.equal(autocast(copied, case.x), case.expected)
    case.compiled(case.x).sum().backward()
    torch.optim.SGD(case.model.parameters(), lr=0.5).step()
    assert torch.equal(run(case.compiled.eval(), case.x), autocast(case.model, case.x))
    assert not torch.equal(run(case.compiled, case.x), case.expected)
    assert not store.released


def test_another_checkpoint_is_loaded_as_a_whole_and_a_wrong_one_not_at_all() -> None:
    case = Case()
    other = {name: value + 1 for name, value in case.checkpoint.items()}
    for wrong, found in (({}, "nothing"), (other | {"0.first.weight": torch.ones(3)}, r"a tensor of \(3,\)")):
        with pytest.raises(ReleasedError, match=f"found {found} under '0.first.weight' in the checkpoint, expected"):
            case.released.restore(wrong)
        assert torch.equal(run(case.compiled, case.x), case.expected)
    case.released.restore({f"_orig_mod.{name}": value for name, value in other.items()})
    assert all(torch.equal(value, other[name]) for name, value in case.model.state_dict().items())
    assert torch.equal(run(case.compiled, case.x), autocast(case.model, case.x))


def test_a_second_call_gives_the_way_back_too_and_releases_the_rest() -> None:
    model, x = layers()
    checkpoint, compiled = saved(model), called(model, x)
    first = ampcompile.release_masters(model, keep=["0.first.weight", "1"])
    assert first.kept["0.first.weight"] == first.kept["1.second.bias"] == "asked for"
    assert "0.second.weight" not in first.kept and "1.second.bias is kept in float32: asked for" in str(first)
    expected = autocast(model[1], x)
    for name in ("head", "0.firs"):
        with pytest.raises(ReleasedError, match=f"found keep='{name}', expected the name of a weight or module"):
            ampcompile.release_masters(model, keep=name)
    assert torch.equal(autocast(model[1], x), expected), "it can still run eagerly"
    expected = run(compiled, x)
    second = ampcompile.release_masters(model)
    assert second.bytes_freed > first.bytes_freed and torch.equal(run(compiled, x), expected)
    second.restore(checkpoint)
    assert torch.equal(autocast(model, x), expected)


def test_kept_weights_of_a_graph_may_be_written_and_replaced() -> None:
    model, x = layers()
    compiled = called(model, x)
    ampcompile.release_masters(model, keep=["0.first"])
    others = [saved(model[0].first), saved(model[0].norm)]
    expected = run(compiled, x)
    for change in (lambda p: p.mul_(2), lambda p: setattr(p, "data", p.data + 1)):
        with torch.no_grad():
            for p in (*model[0].first.parameters(), *model[0].norm.parameters()):
                change(p)
        assert not torch.equal(run(compiled, x), expected)
    model[0].first.load_state_dict(others[0], assign=True)
    model[0].norm.load_state_dict(others[1])
    assert torch.equal(run(compiled, x), expected)


def read_in_float32(model: nn.Module) -> Any:
    reader = amp(lambda x: x + model[0].first.weight[0])
    run(reader, torch.zeros(64))
    return reader


HOLDERS: dict[str, tuple[Callable[[Any], object], str]] = {
    "a view": (lambda model: model[0].first.weight.detach()[0], "something else holds its memory"),
    "an array": (lambda model: model[0].first.weight.detach().numpy(), "something else holds its memory"),
    "a graph without copies": (read_in_float32, "a compiled graph reads it in float32"),
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_what_cannot_be_proven_is_kept(holder: str) -> None:
    model, x = layers()
    compiled = called(model, x)
    expected = run(compiled, x)
    hold, because = HOLDERS[holder]
    held = hold(model)
    kept = ampcompile.release_masters(model).kept
    assert kept["0.first.weight"] == because and "1.first.weight" not in kept
    assert torch.equal(run(compiled, x), expected)
    del held


def test_graphs_that_are_gone_keep_nothing() -> None:
    model, x = layers()
    called(model, x, weights="every_call")
    torch._dynamo.reset()
    gc.collect()
    compiled = called(model, x)
    assert ampcompile.release_masters(model).kept.keys() == FLOAT32["layers"]
    assert compiled


def test_a_graph_that_reads_one_module_in_float32_and_another_in_16_bits() -> None:
    layer, other = nn.Linear(64, 64), nn.Linear(64, 64)
    x = torch.randn(4, 64)
    f = amp(lambda x, w: other(x) + torch.mv(x, w[0] * 2).unsqueeze(1))
    with torch.no_grad():
        g = called(layer, x)
        expected = f(x, layer.weight)
    kept = ampcompile.release_masters(nn.ModuleList([layer, other])).kept
    assert kept == {"0.weight": "a compiled graph reads it in float32"}
    assert torch.equal(run(lambda x: f(x, layer.weight), x), expected) and run(g, x) is not None


def flat() -> nn.Module:
    """Two layers whose weights are parts of one storage."""
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    memory = torch.cat([layer.weight.detach() for layer in model])
    for layer, part in zip(model, memory.split(64), strict=True):
        layer.weight = nn.Parameter(part)
    return model


def test_parts_of_one_storage_are_released_together_or_not_at_all() -> None:
    model, x = flat(), torch.randn(4, 64)
    compiled = called(model, x)
    expected = run(compiled, x)
    with pytest.raises(ReleasedError, match="found no weight of Sequential that compiled graphs read in 16 bits"):
        ampcompile.release_masters(model, keep=["1"])
    assert ampcompile.release_masters(model).bytes_freed == 2 * 64 * 64 * 4
    assert torch.equal(run(compiled, x), expected)


@pytest.mark.parametrize("options", [{"weights": "every_call"}, {"triton.cudagraphs": True}])
def test_graphs_that_need_the_weights_themselves_keep_them(options: dict[str, Any]) -> None:
    model, x = layers()
    compiled = called(model, x, **options)
    expected = run(compiled, x)
    with pytest.raises(ReleasedError, match="found no weight of Sequential"):
        ampcompile.release_masters(model)
    assert torch.equal(run(compiled, x), expected) and torch.equal(autocast(model, x), expected)


def test_arguments_that_are_refused() -> None:
    model, x = layers()
    called(model, x)
    with pytest.raises(ReleasedError, match="found 'list', expected"):
        ampcompile.release_masters([model[0].first.weight])
    model[1].first.weight._fsdp_flattened = True
    with pytest.raises(ReleasedError, match=r"found 1\.first\.weight, which is sharded; expected plain parameters"):
        ampcompile.release_masters(model)
    assert not store.released and storages.has_memory(model[0].first.weight)


@pytest.mark.parametrize("fails", ["refresh", "_pack", "_wait_for_devices"])
def test_an_error_half_way_leaves_all_as_it_was(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = layers()
    compiled = called(model, x)
    expected, checkpoint = run(compiled, x), saved(model)

    def fail(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(release, fails, fail)
    with pytest.raises(MemoryError):
        ampcompile.release_masters(model)
    monkeypatch.undo()
    assert not store.released and all(torch.equal(v, checkpoint[name]) for name, v in model.state_dict().items())
    assert all(torch.equal(run(compiled, x), expected) for _ in range(4)) and model.train().training
    model.eval()
    ampcompile.release_masters(model)
    assert torch.equal(run(compiled, x), expected)


def test_an_interrupt_between_two_weights_leaves_each_either_way(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = layers()
    compiled, done = called(model, x), []
    expected, discard = run(compiled, x), storages.discard_memory

    def interrupted(*args: Any) -> None:
        if len(done) == 3:
            raise KeyboardInterrupt
        discard(*args)
        done.append(args)

    monkeypatch.setattr(storages, "discard_memory", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ampcompile.release_masters(model)
    monkeypatch.undo()
    assert torch.equal(run(compiled, x), expected)
    with torch.no_grad():
        model[1].second.weight.add_(1)
    assert not torch.equal(run(compiled, x), expected)
    expected = run(compiled, x)
    ampcompile.release_masters(model)
    assert len(store.released) == 8 and torch.equal(run(compiled, x), expected)


def test_what_no_sample_sees_is_in_what_stays() -> None:
    model, x = layers()
    compiled = called(model, x)
    weight = model[0].first.weight
    ctypes.memset(weight.data_ptr() + 4 * 64, 0, 4 * 64)  # a row
    assert not torch.equal(run(compiled, x), expected := autocast(model, x))
    ampcompile.release_masters(model)
    assert torch.equal(run(compiled, x), expected)


def test_several_callables_share_what_stays() -> None:
    model, x = layers()
    model.requires_grad_(False)
    whole, part = called(model, x), called(model[0], x)
    expected, first = run(whole, x), run(part, x)
    with torch.inference_mode():
        whole(x)
    ampcompile.release_masters(model)
    with torch.inference_mode():
        assert torch.equal(whole(x), expected)
    assert torch.equal(run(part, x), first) and torch.equal(run(whole, x), expected)


def test_a_backward_to_come_gets_its_gradients() -> None:
    model, x = layers()
    compiled = called(model, x)
    compiled(x).sum().backward()
    expected = [p.grad for p in model.parameters()]
    model.zero_grad()
    loss = compiled(x).sum()
    ampcompile.release_masters(model)
    loss.backward()
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), expected, strict=True))


def test_eager_code_that_reads_a_weight_has_it_kept_on_request() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            return self.scaled(self.two(self.one(x)))

        @torch.compiler.disable
        def scaled(self, x: Tensor) -> Tensor:
            return x * self.two.weight.sum()

    model, x = Broken(), torch.randn(4, 64)
    compiled, checkpoint = called(model, x), saved(model)
    expected = run(compiled, x)
    released = ampcompile.release_masters(model)
    with pytest.raises(RuntimeError, match=r"found a read or write of two\.weight by other code"):
        run(compiled, x)
    released.restore(checkpoint)
    assert torch.equal(run(compiled, x), expected)
    ampcompile.release_masters(model, keep=["two.weight"])
    assert torch.equal(run(compiled, x), expected)


def test_a_graph_of_any_size_takes_other_sizes() -> None:
    model, x = layers()
    compiled = called(model, x, dynamic=True)
    expected = autocast(model, x[:3])
    ampcompile.release_masters(model)
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert torch.equal(run(compiled, x[:3]), expected)


def test_equal_blocks_that_share_a_graph() -> None:
    model, x = nn.ModuleList(Layer() for _ in range(3)), torch.randn(4, 64)
    for layer in model:
        layer.compile(backend="amp", options={"lower": "aot_eager"})
    with torch.no_grad():
        for _ in range(4):
            expected = [layer(x) for layer in model]
        ampcompile.release_masters(model[:2])
        assert all(torch.equal(layer(x), y) for layer, y in zip(model, expected, strict=True))
        model[2].first.weight.add_(1)
        assert [torch.equal(layer(x), y) for layer, y in zip(model, expected, strict=True)] == [True, True, False]


def test_nothing_outlives_the_model() -> None:
    case = Case()
    assert store.released and patches.is_installed(patches.COPIES)
    del case
    torch._dynamo.reset()
    gc.collect()
    assert not store.released and not patches.is_installed(patches.COPIES)
    assert ampcompile.weight_stats().bytes == 0


def test_a_thread_that_calls_meanwhile_gets_right_results() -> None:
    model, x = layers()
    checkpoint, compiled = saved(model), called(model, x)
    expected, over = run(compiled, x), threading.Event()

    def call() -> None:
        while not over.is_set():
            assert torch.equal(run(compiled, x), expected)

    with running(call, call):
        try:
            for _ in range(50):
                assert torch.equal(run(compiled, x), expected)
                ampcompile.release_masters(model).restore(checkpoint)
        finally:
            over.set()
