"""Autocast around, inside, absent and off: what a compiled call runs in, and that it leaves nothing behind."""

import threading
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from ampcompile.compiler import ambient, current_call, module_names
from ampcompile.errors import AmpWarning
from ampcompile.torch_private import autocast, dynamo
from tests.compiling import HALF, HIGH, LOW, amp, compiled, dtypes, eager, regions, same_bits
from tests.conftest import modes
from tests.injecting import raised_at
from tests.threads import running

LINEAR = nn.utils.skip_init(nn.Linear, 8, 8)


@pytest.fixture(autouse=True)
def drawn() -> None:
    """Numbers of the test's own seed."""
    LINEAR.reset_parameters()


def reads_dtypes(x):
    """What breaks when the trace sees other dtypes than eager autocast has."""
    h = LINEAR(x)
    mask = torch.full((2, 8), torch.finfo(h.dtype).min, dtype=h.dtype)
    y = torch.softmax(h + mask.triu(), -1).to(h.dtype)
    z = LINEAR(h).float() if h.dtype == HIGH else LINEAR(h) * 2
    return h, y, z, torch.zeros(2, dtype=h.dtype), x.new_ones(3).type_as(h)


def with_regions(x):
    a = LINEAR(x)
    with torch.autocast("cpu", enabled=False):
        b = LINEAR(x)
        with torch.autocast("cpu", dtype=HALF):
            c = LINEAR(x)
            with torch.autocast("cpu", enabled=False):
                d = LINEAR(x)
        e = LINEAR(x)
    with torch.autocast("cpu", dtype=LOW):
        f = LINEAR(x)
    return a, b, c, d, e, f


@torch.autocast("cpu", enabled=False)
def decorated(x):
    return LINEAR(x)


def with_breaks(x):
    a = LINEAR(x)
    torch._dynamo.graph_break()
    b = LINEAR(x)
    with torch.autocast("cpu", enabled=False):
        c = LINEAR(x)
        torch._dynamo.graph_break()
        d = LINEAR(x)
        with torch.autocast("cpu", dtype=HALF):
            e = LINEAR(x)
            torch._dynamo.graph_break()
            f = LINEAR(x)
        g = decorated(x)
    return a, b, c, d, e, f, g, LINEAR(x)


def nested_frames(x):
    def inner(x):
        y = LINEAR(x)
        torch._dynamo.graph_break()
        return y, LINEAR(x)

    with torch.autocast("cpu", enabled=False):
        a = inner(x)
        with torch.autocast("cpu", dtype=HALF):
            b = inner(x)
    return a, b, inner(x)


MODELS = [reads_dtypes, with_regions, with_breaks, nested_frames]


@contextmanager
def leaving_no_state(around):
    """In a region, whose state what runs inside leaves as it was."""
    with regions(around):
        before = modes()
        yield
        assert modes() == before


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("lower", ["aot_eager", pytest.param("eager", marks=pytest.mark.ci)])
def test_results_are_eager_autocasts_whether_or_not_autocast_is_open(model, lower):
    x = torch.randn(2, 8)
    expected = eager(model, x)
    for first in ("absent", "ambient"):
        torch._dynamo.reset()
        run, recorder = compiled(model, lower=lower)
        with leaving_no_state(first):
            assert same_bits(run(x), expected), first
        graphs = len(recorder.graphs)
        with regions("ambient"), leaving_no_state("ambient"):
            assert same_bits(run(x), expected)
        assert same_bits(run(x), expected) and len(recorder.graphs) == graphs, "each of these calls has the same graphs"
        assert not recorder.disagreements
    for around in ("half", "disabled"):
        with leaving_no_state(around):
            run(x)


def test_a_region_inside_wins_over_the_dtype_option_across_graph_breaks_too():
    run, _ = compiled(with_breaks, dtype=HALF)
    assert dtypes(run(torch.randn(2, 8))) == [HALF, HALF, HIGH, HIGH, HALF, HALF, HIGH, HALF]
    torch._dynamo.reset()
    run, _ = compiled(nested_frames, dtype=LOW)
    assert dtypes(run(torch.randn(2, 8))) == [HIGH, HIGH, HALF, HALF, LOW, LOW]


@contextmanager
def of_another_device():
    torch.set_autocast_enabled("mps", True)
    torch.autocast_increment_nesting()
    yield
    torch.autocast_decrement_nesting()
    torch.set_autocast_enabled("mps", False)


@contextmanager
def with_half_as_default():
    torch.set_autocast_dtype("cpu", HALF)
    yield
    torch.set_autocast_dtype("cpu", LOW)


DISABLED = partial(torch.autocast, "cpu", enabled=False)
AROUND = {  # regions around a call, the outermost first, and the dtype of a product
    (): LOW,
    (DISABLED,): HIGH,
    (DISABLED, partial(torch.autocast, "cpu", LOW)): LOW,
    (partial(torch.autocast, "cpu", HALF),): HALF,
    (partial(torch.autocast, "cpu", HALF, enabled=False),): HIGH,
    (partial(torch.autocast, "cuda", enabled=False),): LOW,
    (partial(torch.autocast, "cuda", enabled=False), DISABLED): HIGH,
    (of_another_device,): LOW,
    (with_half_as_default,): HALF,
}


@pytest.mark.filterwarnings("ignore:.* runs in float32:ampcompile.AmpWarning")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"lower": "eager"},
        *(pytest.param(o, marks=pytest.mark.ci) for o in ({"dtype": HALF}, {"lower": "inductor"})),
    ],
)
def test_a_region_that_disables_beats_the_dtype_option_which_beats_other_regions_and_they_the_default(options):
    run, x = amp(LINEAR, **options)[0], torch.randn(2, 8)
    for first in (False, options.get("lower") != "inductor"):
        for around, dtype in AROUND.items():
            if first:
                torch._dynamo.reset()  # compiled there, too
            with ExitStack() as stack:
                for region in around:
                    stack.enter_context(region())
                found = run(x)
            assert found.dtype == (dtype if dtype == HIGH else options.get("dtype", dtype)), around
            assert found.dtype != HIGH or torch.equal(found, LINEAR(x))


def test_a_region_that_beats_the_dtype_option_is_warned_of_once_a_callable():
    x = torch.randn(2, 8)
    for f, name in ((Model(), "Model"), (LINEAR, "Linear"), (LINEAR.forward, "Linear"), (reads_dtypes, "reads_dtypes")):
        run = torch.compile(f, backend="amp", options={"lower": "eager", "dtype": HALF})
        run(x)
        with torch.autocast("cpu", enabled=False):
            with pytest.warns(
                AmpWarning, match=rf"^{name} runs in float32: .*options=\{{'dtype': torch.float16\}}; exp"
            ):
                run(x)
            run(x)
    inner = torch.compile(lambda x: LINEAR(x), backend="amp", options={"lower": "eager", "dtype": HALF})

    def outer(x):
        with torch.autocast("cpu", enabled=False):
            return torch.compiler.disable(lambda: inner(x), recursive=False)()

    assert compiled(outer)[0](x).dtype == HIGH  # the program's own region, which is no remainder


class Stop(Exception):
    pass


def stops_in_a_region(x):
    with torch.autocast("cpu", dtype=HALF), torch.no_grad(), torch.inference_mode():
        y = LINEAR(x)
        torch._dynamo.graph_break()
        if y.shape[0] == 2:
            raise Stop
    return y


@torch.library.custom_op("ampcompile_tests::stop", mutates_args=())
def stop(x: torch.Tensor) -> torch.Tensor:
    raise Stop


@stop.register_fake
def _(x):
    return torch.empty_like(x)


def stops_at_run_time(x):
    with torch.autocast("cpu", enabled=False), torch.no_grad():
        return stop(LINEAR(x))


def stops_in_capture(x):
    with torch.autocast("cpu", dtype=HALF), torch.no_grad(), torch.inference_mode():
        return LINEAR(x)


@pytest.mark.parametrize("around", ["absent", "half", "disabled"])
@pytest.mark.parametrize("lower", ["aot_eager", pytest.param("eager", marks=pytest.mark.ci)])
def test_a_call_that_raises_leaves_no_state_behind(around, lower, monkeypatch):
    def fails(*args):
        raise Stop

    for model in (stops_in_a_region, stops_at_run_time):
        with leaving_no_state(around), pytest.raises(Stop):
            compiled(model, lower=lower)[0](torch.randn(2, 8))
    monkeypatch.setattr(torch.Tensor, "_is_view", fails, raising=False)
    monkeypatch.setattr("ampcompile.passes.capture.capture.current_module_path", fails)
    with leaving_no_state(around), pytest.raises(Exception, match="Stop"):
        amp(stops_in_capture, lower=lower)[0](torch.randn(2, 8))


def test_threads_do_not_see_one_anothers_autocast():
    run, _ = compiled(with_breaks)
    x = torch.randn(2, 8)
    expected = {}
    for name in ("absent", "half", "disabled"):
        with regions(name):
            expected[name] = dtypes(run(x))
    assert len({tuple(map(str, v)) for v in expected.values()}) == 3
    found, barrier = {}, threading.Barrier(3, timeout=60)

    def work(name):
        barrier.wait()
        for _ in range(5):
            with regions(name):
                found.setdefault(name, []).append(dtypes(run(x)))
        found[name].append(autocast.autocast_nesting())

    with running(*(partial(work, name) for name in expected)):
        pass
    assert all(found[name][:-1] == [expected[name]] * 5 and found[name][-1] == 0 for name in expected)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return self.linear(x)

    def encode(self, x):
        return self.linear(x).softmax(-1)

    @torch.compile(backend="amp", options={"lower": "aot_eager", "outputs": "autocast"})
    def decode(self, x):
        return self.linear(x)


OPTIONS = {"backend": "amp", "options": {"lower": "aot_eager", "outputs": "autocast"}}


def test_every_way_to_compile_is_under_autocast():
    model, x = Model(), torch.randn(2, 8)
    ways = [torch.compile(each, **OPTIONS) for each in (model, model.encode, model.forward)]
    ways += [model.decode, torch.compile(fullgraph=True, **OPTIONS)(LINEAR.forward)]
    assert [way(x).dtype for way in ways] == [LOW] * 5 and model(x).dtype == HIGH
    model.compile(**OPTIONS)
    assert model(x).dtype == torch.compile(nn.functional.linear, **OPTIONS)(x, LINEAR.weight).dtype == LOW


@pytest.mark.parametrize(("first", "lower"), [("amp", "aot_eager"), ("eager", "aot_eager"), ("amp", "eager")])
def test_what_is_compiled_already_is_compiled_as_if_it_were_not(first, lower):
    x, options = torch.randn(2, 8), {"backend": "amp", "options": {"lower": lower}}
    inner = {"backend": first} if first != "amp" else options
    for f in (Model(), LINEAR, Model().encode, lambda x: LINEAR(x)):
        once, twice = torch.compile(f, **options), torch.compile(torch.compile(f, **inner), **options)
        for grad in (torch.enable_grad, torch.no_grad):
            with grad():
                assert once(x).dtype == HIGH and same_bits(twice(x), once(x))


def test_a_module_of_torch_that_is_compiled_in_place_is_warned_about():
    module = nn.Linear(2, 2)
    told = dynamo.compiles_nothing(module._call_impl)  # from torch 2.15 on it is compiled
    with pytest.warns(AmpWarning, match=r"Linear.compile\(\) compiles no layer of torch.nn") if told else nullcontext():
        module.compile(**OPTIONS)


def test_the_device_is_that_of_the_first_parameter_or_tensor():
    with FakeTensorMode():
        on_gpu, on_cpu, offloaded = torch.empty(1, device="cuda"), torch.ones(1), torch.ones(1)
        (with_gpu := nn.ReLU()).weight = nn.Parameter(on_gpu)
    meta, default = torch.zeros(1, device="meta"), torch.accelerator.current_accelerator(check_available=True)
    for f, args, expected in (
        (Model().forward, (meta,), "cpu"),
        (with_gpu.forward, (torch.zeros(1),), "cuda"),
        (Model().to("meta").forward, (torch.zeros(1),), "cpu"),  # weights that are loaded in the call
        (nn.ReLU().forward, (meta,), "meta"),
        (len, (3, {"a": [meta]}), "meta"),
        (len, (3,), getattr(default, "type", "cpu")),
    ):
        first = ambient.FirstParameter(module_names.module_of(f)).find()
        assert ambient.device_type_of(first, args, {}) == expected
    assert ambient.device_type_of(None, (), {"x": meta}) == "meta"
    for args in ((on_gpu,), (on_cpu, on_gpu), ({"a": [on_cpu, (on_gpu,)]},), (3, "text", [on_gpu])):
        assert ambient.device_type_of(offloaded, args, {}) == "cuda"
        assert ambient.device_type_of(None, args, {}) == "cuda"
    assert ambient.device_type_of(on_gpu, (on_cpu,), {}) == "cuda"
    assert ambient.device_type_of(offloaded, (on_cpu, meta), {}) == "cpu"


@pytest.mark.parametrize(("lower", "region"), [("eager", "disabled"), ("aot_eager", "absent"), ("inductor", "ambient")])
def test_a_model_on_the_meta_device_runs_as_written(lower, region):
    run = torch.compile(nn.Sequential(Model(), nn.Linear(8, 3)).to("meta"), backend="amp", options={"lower": lower})
    x = torch.empty(2, 8, device="meta", requires_grad=True)
    with regions(region):
        result = run(x)
    result.sum().backward()
    assert (result.device.type, result.dtype, result.shape, x.grad.dtype) == ("meta", HIGH, (2, 3), HIGH)


def test_weights_that_leave_the_meta_device_are_autocast():
    model = nn.Linear(8, 8, device="meta")
    run = torch.compile(model, backend="amp", options={"lower": "aot_eager"})
    assert run(torch.empty(2, 8, device="meta", dtype=LOW).to(HIGH)).dtype == HIGH
    model.to_empty(device="cpu").reset_parameters()
    x = torch.randn(2, 8)
    assert same_bits(run(x), eager(model, x).float())


def test_explain_and_introspection_of_dynamo_still_work():
    run, _ = compiled(with_breaks)
    explanation = torch._dynamo.explain(run)(torch.randn(2, 8))
    assert explanation.graph_break_count == 3
    assert run.__name__ == "with_breaks" and run.__wrapped__ is not None


@pytest.mark.parametrize("fullgraph", [False, True])
def test_what_another_backend_compiles_too_is_warned_about(fullgraph):
    x, module, function = torch.randn(2, 8), torch.compile(Model(), **OPTIONS), torch.compile(LINEAR.forward, **OPTIONS)
    for inner, name in ((module, "Model"), (function, "Linear.forward")):
        torch._dynamo.reset()
        outer = torch.compile(lambda x, inner=inner: inner(x) + 1, backend="eager", fullgraph=fullgraph)
        with pytest.warns(AmpWarning, match=f"^{name} was compiled with backend 'amp' and is called inside") as told:
            assert outer(x).dtype == HIGH
        assert told[0].filename == __file__
        torch._dynamo.reset()
        ours, _ = compiled(lambda x, inner=inner: inner(x) + 1, fullgraph=fullgraph)
        assert ours(x).dtype == inner(x).dtype == LOW
    torch._dynamo.reset()
    module = torch.compile(Model(), backend="aot_eager")
    assert torch.compile(lambda x: module(x) + 1, backend="eager")(x).dtype == module(x).dtype == HIGH, "in silence"


def test_what_another_backend_compiles_again_is_warned_about():
    x = torch.randn(2, 8)
    for f, name in ((Model(), "Model"), (LINEAR.forward, "Linear"), (reads_dtypes, "reads_dtypes")):
        ours = torch.compile(f, **OPTIONS)
        with pytest.warns(AmpWarning, match=f"^{name} was compiled with backend 'amp' and is compiled again") as told:
            again = torch.compile(ours, backend="eager")
        said = [each for each in told if each.category is AmpWarning]  # others may be of what is collected meanwhile
        assert len(said) == 1 and said[0].filename == __file__
        torch.compile(ours, **OPTIONS)
        torch.compile(torch.compile(f, backend="eager"), backend="aot_eager")
    assert dtypes(again(x))[0] == HIGH


def test_the_first_parameter_is_one_that_the_module_has_now():
    model = nn.Sequential(nn.Sequential(nn.ReLU(), nn.Linear(2, 2)), nn.Linear(2, 2))
    first = ambient.FirstParameter(model)
    assert first.find() is first.find() is model[0][1].weight
    model[0][1] = nn.Linear(2, 2)
    assert first.find() is model[0][1].weight
    model[0] = nn.Sequential(nn.Linear(2, 2))
    assert first.find() is model[0][0].weight
    model[0][0].weight = nn.Parameter(torch.ones(2, 2))
    assert first.find() is model[0][0].weight
    model[0].to("meta")  # loaded in the call
    assert first.find() is model[1].weight
    del model[0]
    assert first.find() is model[0].weight
    model[0] = nn.Identity()
    assert first.find() is None


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_a_call_that_is_broken_off_anywhere_leaves_the_thread_as_it_was(error):
    x = torch.randn(2, 8)
    run, _ = compiled(LINEAR, outputs="float32")
    with torch.no_grad():
        expected, at = run(x), 1
        while raised_at(at, error, lambda: run(x)):
            looking = dynamo.set_frame_callback(None)
            dynamo.set_frame_callback(looking)
            assert looking is None
            assert current_call.callable is None
            assert torch.is_autocast_cache_enabled() and not autocast.any_autocast_enabled()
            assert same_bits(run(x), expected)
            at += 1
    assert expected.dtype == HIGH and at > 20
