"""An exported program holds every cast, gives the compiled model's bits, and needs nothing of ours."""

import contextlib
import copy
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.utils import _pytree as pytree

import ampcompile
from ampcompile.errors import AmpWarning, OptionError, UnsupportedError
from tests import pages
from tests.compiling import HALF, HIGH, LOW, dtypes, gradients, same_bits
from tests.devices import require_lstm
from tests.models import Net
from tests.tiny_models import build

COPIES_THE_PROGRAM = pytest.mark.filterwarnings(
    "ignore:`isinstance.treespec, LeafSpec:FutureWarning"
)  # torch itself does
ARCHITECTURES = [  # each of the first four, and of swin, whisper and convnext, has what no other has
    "resnet",
    *(pytest.param(name, marks=pytest.mark.ci) for name in ("gpt2", "t5", "gemma2")),
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in ("swin", "whisper", "convnext", "llama", "bert", "vit", "qwen2", "opt", "albert", "bart")
    ),
]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the page's section defines, in a folder of its own."""
    with contextlib.chdir(tmp_path_factory.mktemp("page")):
        names = pages.run("docs/migration.md", "Export")
        return names | {"loaded": torch.export.load("model.pt2")}


def compiled(f: Any, **options: Any) -> Any:
    return torch.compile(f, backend="amp", options={"lower": "eager", **options})


def dtypes_of(program: ExportedProgram, name: str) -> list[torch.dtype]:
    """The dtypes of what ops of a name give, in order."""
    return [n.meta["val"].dtype for n in program.graph.nodes if str(n.target).startswith(f"aten.{name}.")]


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.down(self.up(x).relu() * scale).softmax(-1)


@pytest.mark.parametrize("options", [{}, pytest.param({"numerics": "relaxed"}, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architectures_give_the_compiled_models_bits(name: str, options: dict[str, Any]) -> None:
    model, inputs = build(name)
    model.eval()
    with torch.no_grad():
        program = ampcompile.export(model, (), inputs, **options)
        assert same_bits(program.module()(**inputs), compiled(model, **options)(**inputs))
    assert LOW in dtypes_of(program, "to")
    assert all(value is model.state_dict(keep_vars=True)[key] for key, value in program.state_dict.items())


def test_it_is_trained_as_the_compiled_model_is() -> None:
    model, x = Mlp(), torch.randn(5, 8)
    program = ampcompile.export(copy.deepcopy(model), (x,))
    loss: Callable[[Any], Tensor] = lambda f: f(x).square().sum()
    ours = gradients(program.module(), loss)
    assert same_bits(ours, gradients(model, lambda m: loss(compiled(m)))) and all(g is not None for g in ours)


def test_a_model_on_the_meta_device_is_exported_as_written() -> None:
    x = torch.empty(5, 8, device="meta")
    program = ampcompile.export(Mlp().to("meta"), (x,))
    assert program.module()(x).dtype == HIGH and LOW not in dtypes_of(program, "to")


def test_shapes_stay_dynamic() -> None:
    model, x = Mlp(), torch.randn(5, 8)
    program = ampcompile.export(model, (x,), {"scale": 2.0}, dynamic_shapes=({0: Dim("batch", min=2)}, None))
    x = torch.randn(9, 8)
    assert same_bits(program.module()(x, scale=2.0), compiled(model)(x, scale=2.0))


def regions(m: Any, x: Tensor) -> tuple[Tensor, ...]:
    h = m.up(x)
    with torch.autocast("cpu", enabled=False):
        g = m.up(h.float())
    with torch.no_grad(), torch.autocast("cpu", HALF):
        k = m.up(h)
    return torch.einsum("ij,kj->ik", h, g), g, k, x


def sums(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """A buffer takes what a region reads too."""
    h = m.up(x)
    m.total.add_(h.float().sum(0))
    with torch.autocast("cpu", enabled=False):
        return h, m.up(h.float())


def twice(m: Any, x: Tensor) -> Tensor:
    """A cast that did nothing while tracing is read by its readers alone: what reads the value stays low."""
    h = torch.layer_norm(x, (4,)).exp()
    return h.float() * 2 + m.up(h) + (h + 1).type_as(x)


def masked(m: Any, x: Tensor) -> Tensor:
    """With a number too large for float16."""
    h = m.up(x)
    h[h > 0] = -1e9
    return h.softmax(-1)


def selected(m: Any, x: Tensor) -> Tensor:
    """Sizes depend on data."""
    return m.up(x[x[:, 0].nonzero()[:, 0]])


def returned(m: Any, x: Tensor) -> tuple[Tensor, ...]:
    """What is computed leaves in float32, and inputs as they are."""
    h = m.up(x)
    return x, x.view(-1), h, h.view(-1), h


AUTOCAST, UNGUARDED = {"outputs": "autocast"}, {"dtype": HALF, "range_guards": False}
PROGRAMS = {
    # a program, its input, options, the dtypes that some ops give, and those of its results
    # (the product with the third type is in the body that runs without gradients)
    "regions": (regions, HIGH, {}, {"linear": [LOW, HIGH]}, [HIGH, HIGH, HALF, HIGH]),
    "regions as they are": (regions, HIGH, AUTOCAST, {"linear": [LOW, HIGH]}, [LOW, HIGH, HALF, HIGH]),
    "a buffer": (sums, HIGH, {}, {}, [HIGH, HIGH]),
    "a buffer, and the region alone": (lambda m, x: sums(m, x)[1:], HIGH, {}, {}, [HIGH]),
    "no cast": (twice, HIGH, {"policy": "op exp=low"}, {"exp": [LOW], "linear": [LOW], "add": [HIGH, LOW]}, [HIGH]),
    "guarded": (masked, HIGH, {"dtype": HALF}, {}, [HIGH]),
    "not guarded": (masked, HIGH, UNGUARDED, {}, [HIGH]),
    "sizes": (selected, HIGH, {}, {}, [HIGH]),
    "results": (returned, LOW, {}, {}, [LOW, LOW, HIGH, HIGH, HIGH]),
}


@pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning")  # of torch 2.11's torch.export.load
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_give_the_compiled_models_bits_also_after_they_are_saved(name: str, tmp_path: Path) -> None:
    run, dtype, options, ops, results = PROGRAMS[name]
    model = Net(run, up=nn.Linear(4, 4), total=nn.Buffer(torch.zeros(4)))
    nn.init.eye_(model.up.weight)
    x = torch.cat([torch.full((1, 4), 1e3), torch.randn(8, 4).relu()]).to(dtype)  # the first row is too large to mask
    program = ampcompile.export(copy.deepcopy(model), (x,), **options)
    assert "autocast" not in str(program.graph)
    assert {op: dtypes_of(program, op)[: len(ops[op])] for op in ops} == ops
    torch.export.save(program, tmp_path / "program.pt2")
    for each in (program, torch.export.load(tmp_path / "program.pt2")):
        exported, unchanged = each.module(), copy.deepcopy(model)
        for given in (torch.randn(9, 4).relu().to(dtype), x):
            found, expected = exported(given), compiled(unchanged, **options)(given)
            assert dtypes(found) == results and same_bits(found, expected)
            leaves, theirs = map(pytree.tree_leaves, (found, expected))
            assert [v.requires_grad for v in leaves] == [v.requires_grad for v in theirs]
            assert all(map(same_bits, exported.buffers(), unchanged.buffers()))
    assert all(v.isfinite().all() for v in leaves) == (options is not UNGUARDED)


def averages(m: Any, x: Tensor, *, scale: Tensor, seen: Tensor) -> Tensor:
    h = m.up(x) * scale
    for average in (m.kept, m.unsaved, seen):
        average.mul_(0.5).add_(h.mean(0))
    return h * m.kept + m.unsaved


def test_buffers_and_inputs_take_results_with_gradients() -> None:
    buffers = {"kept": nn.Buffer(torch.ones(4)), "unsaved": nn.Buffer(torch.ones(4), persistent=False)}
    model, x = Net(averages, up=nn.Linear(4, 4), **buffers), torch.randn(3, 4)
    program = ampcompile.export(copy.deepcopy(model), (x,), {"seen": torch.ones(4), "scale": torch.ones(4)})
    exported, calls = program.module(), [{"seen": torch.ones(4), "scale": torch.full((4,), 3.0)} for _ in range(2)]
    with torch.no_grad():
        for _ in range(2):
            assert same_bits(exported(x, **calls[0]), compiled(model)(x, **calls[1])) and same_bits(*calls)
            assert all(map(same_bits, exported.buffers(), model.buffers()))


@COPIES_THE_PROGRAM
def test_a_program_whose_results_are_widened_can_be_unflattened() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)), torch.randn(2, 4)
    program = ampcompile.export(model, (x,))
    assert same_bits(torch.export.unflatten(program)(x), program.module()(x))


@pytest.mark.filterwarnings("ignore:The tensor attributes self._flat_weights")  # torch.export's, of every LSTM
def test_what_is_low_though_autocast_traced_it_in_float32_leaves_in_float32() -> None:
    require_lstm()
    model, x = nn.LSTM(4, 4), torch.randn(6, 4)
    program = ampcompile.export(model, (x,))
    assert LOW in dtypes_of(program, "to")
    assert same_bits(program.module()(x), compiled(model)(x))


def test_the_autocast_around_decides_as_for_a_call() -> None:
    model, x = Mlp(), torch.randn(5, 8)
    with torch.autocast("cpu", HALF):
        program = ampcompile.export(model, (x,))
        assert same_bits(program.module()(x), compiled(model)(x)) and dtypes_of(program, "linear") == [HALF, HALF]
    with torch.autocast("cpu", enabled=False):
        assert dtypes_of(ampcompile.export(model, (x,)), "to") == []
    relu = ampcompile.export(nn.Sequential(model.up, nn.ReLU()), (x,), outputs="autocast").module()
    assert relu(x).dtype == LOW


def test_options_of_compiled_code_are_refused_and_patterns_without_a_match_warn() -> None:
    model, args = Mlp(), (torch.randn(5, 8),)
    for option in ({"weights": "every_call"}, {"lower": "inductor"}, {"mode": "default"}, {"epilogue_fusion": True}):
        with pytest.raises(OptionError, match=f"option '{next(iter(option))}' of export: expected one of dtype, "):
            ampcompile.export(model, args, **option)
    with pytest.raises(OptionError, match=r"found the policy 'op linear=fp8' for export; expected none with fp8"):
        ampcompile.export(nn.Linear(16, 16), (torch.randn(16, 16),), policy="op linear=fp8")
    with pytest.raises(OptionError, match=r"option dtype=torch.float32: expected torch.bfloat16"):
        ampcompile.export(model, args, dtype=HIGH)
    with pytest.warns(AmpWarning, match="pattern 'dawn' matches no module .* 'down'") as caught:
        ampcompile.export(model, args, policy="module dawn=fp32, module up=fp32")
    assert caught[0].filename == __file__


class Mapped(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.func.vmap(lambda row: row @ row)(x)


def test_what_cannot_be_written_out_is_an_error_that_says_where() -> None:
    with pytest.raises(
        UnsupportedError, match=r"torch\.func.* at .*test_export\.py:\d+: its casts can't .*\(it calls aten\.\w+\)"
    ):
        ampcompile.export(Mapped(), (torch.randn(3, 4),))


ALONE = """
import sys, torch
sys.modules["ampcompile"] = None  # not to be imported
folder = sys.argv[1]
x, y = torch.load(f"{folder}/numbers.pt")
module = torch.export.load(f"{folder}/model.pt2").module()
packages = [torch._inductor.aoti_load_package(path) for path in sys.argv[2:]]
for run in (module, *packages):
    torch.testing.assert_close(run(x), y, rtol=0, atol=0)
for backend in ("aot_eager", *("inductor" for _ in packages)):
    torch.testing.assert_close(torch.compile(module, backend=backend)(x), y, rtol=0, atol=1e-2)
assert not [name for name in sys.modules if name.startswith("ampcompile.")]
"""


def saved(folder: Path) -> ExportedProgram:
    model, x = Mlp().eval(), torch.randn(5, 8)
    with torch.no_grad():
        program = ampcompile.export(model, (x,))
        torch.save((x, compiled(model)(x)), folder / "numbers.pt")
    torch.export.save(program, folder / "model.pt2")
    return program


@pytest.mark.ci
@COPIES_THE_PROGRAM
def test_it_runs_and_is_compiled_without_ampcompile(page: dict[str, Any], tmp_path: Path) -> None:
    """Where there is a C++ compiler, AOTInductor and Inductor take it too."""
    program = saved(tmp_path)
    packages = []
    if any(map(shutil.which, ("g++", "clang++"))):
        packages = [shutil.move(page["package"](program), tmp_path / "package.pt2")]
    command = [sys.executable, "-P", "-c", ALONE, tmp_path, *packages]
    run = subprocess.run(command, capture_output=True, timeout=500)
    assert not run.returncode, run.stderr.decode()


@COPIES_THE_PROGRAM
def test_onnx_runtime_takes_it(page: dict[str, Any]) -> None:
    """In float16, with norms in float32, as the page says."""
    runtime = pytest.importorskip("onnxruntime", reason="needs onnxruntime and onnxscript, which aren't installed")
    pytest.importorskip("onnxscript", reason="needs onnxscript, which isn't installed")
    model, x = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4)).eval(), torch.randn(5, 8)
    session = runtime.InferenceSession(page["onnx"](model, (x,)).model_proto.SerializeToString())
    (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), compiled(model, dtype=HALF)(x), rtol=0, atol=2e-3)


def test_the_pages_code_runs(page: dict[str, Any]) -> None:
    assert same_bits(page["loaded"].module()(page["x"]), page["y"])
