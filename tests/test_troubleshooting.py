"""Each message of ours that docs/troubleshooting.md quotes in a heading comes, in the words that stand there."""

import logging
import re
import warnings
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

import ampcompile
from ampcompile.compiler import ambient, backend, results
from ampcompile.errors import AmpError, AmpWarning
from ampcompile.kernels import native, tables
from ampcompile.optim import plan
from ampcompile.passes.decide import fp8
from ampcompile.policy import Policy
from ampcompile.torch_private import dynamo, patches
from ampcompile.weights import table
from tests.test_layout import ROOT, SOURCES

HEADINGS = re.findall(r"^### `(.*)`$", (ROOT / "docs/troubleshooting.md").read_text(), re.MULTILINE)
X = torch.ones(2, 4)

Patch = pytest.MonkeyPatch


def compiled(f: Any, **options: Any) -> Any:
    return torch.compile(f, backend="amp", options={"lower": "eager", **options})


def optimizer_with_gradient(kind: Any = torch.optim.SGD, value: float = 1.0, **how: Any) -> Any:
    param = nn.Parameter(torch.ones(3))
    param.grad = torch.full_like(param, value)
    return kind([param], lr=0.1, **how)


def no_compiler(patch: Patch) -> None:
    patch.setattr(native.shutil, "which", lambda _: None)
    patch.delenv("CXX", raising=False)
    native.find_compiler.__wrapped__()


def other_torch(patch: Patch) -> None:
    def install(*_: Any) -> None:
        raise AttributeError("no such place")

    patch.setattr(patches, "install", install)
    ambient.install.__wrapped__()


def fp8_on_a_cpu(_: Patch) -> None:
    fp8._warn_of_device.cache_clear()
    compiled(nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)), policy="op linear=fp8")(torch.ones(16, 16))


def refusing_fake(_: Patch) -> None:
    with torch.library._scoped_library("tests_troubleshooting", "FRAGMENT") as library:
        library.define("wide(Tensor x) -> Tensor")
        library.impl("wide", torch.sin, "CPU")

        def fake(x: Tensor) -> Tensor:
            torch._check(x.dtype == torch.float32)
            return torch.empty_like(x)

        torch.library.register_fake("tests_troubleshooting::wide", fake, lib=library)
        compiled(lambda x: torch.ops.tests_troubleshooting.wide(x), policy="op tests_troubleshooting::wide=low")(X)


def unsafe_loss(patch: Patch) -> None:
    """As on a GPU, whose rules ban it."""
    of = Policy.rule_for
    patch.setattr(Policy, "rule_for", lambda self, op, device, path="": of(self, op, "cuda", path))
    compiled(nn.functional.binary_cross_entropy)(X / 2, X)


def only_infinite(_: Patch) -> None:
    scaler, optimizer = ampcompile.GradScaler("cpu"), optimizer_with_gradient(value=torch.inf)
    scaler.scale(torch.ones(()))
    for _ in range(200):
        scaler.step(optimizer)
        scaler.update()


def no_scaler(patch: Patch) -> None:
    patch.setattr(backend, "_has_instance", lambda of: False)
    backend._look_for_a_scaler.cache_clear()
    compiled(nn.Linear(4, 4), dtype=torch.float16)(X)


def changed_after_clipping(_: Patch) -> None:
    scaler, optimizer = ampcompile.GradScaler("cpu"), optimizer_with_gradient()
    scaler.scale(torch.ones(()))
    scaler.clip_grad_norm_(optimizer, 1.0)
    optimizer.param_groups[0]["params"][0].grad.add_(1.0)
    scaler.step(optimizer)


def unscaled_after_clipping(_: Patch) -> None:
    scaler, optimizer = ampcompile.GradScaler("cpu"), optimizer_with_gradient(ampcompile.optim.SGD)
    scaler.scale(torch.ones(()))
    optimizer.clip_grad_norm_(1.0)
    scaler.unscale_(optimizer)


def captured_with_counts(patch: Patch) -> None:
    patch.setattr(tables, "capturing", lambda device: True)
    plan.require_counts(optimizer := optimizer_with_gradient(torch.optim.AdamW), plan.parameters(optimizer))


def penalty_through_dropout(_: Patch) -> None:
    x = X.clone().requires_grad_()
    run = compiled(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.5)), lower="aot_eager")
    (slope,) = torch.autograd.grad(run(x).sum(), x, create_graph=True)
    slope.square().sum().backward()


def inside_another(_: Patch) -> None:
    inner = compiled(nn.Linear(4, 4))
    torch.compile(lambda x: inner(x) + 1, backend="eager")(X)


def numbers() -> Iterator[int]:
    yield 1


def returns_a_set(_: Patch) -> None:
    results._warned.discard(set)
    linear = nn.Linear(4, 4)

    def f(x: Tensor) -> set[Tensor]:
        y = linear(x)
        torch._dynamo.graph_break()
        return {y}

    compiled(f)(X)


def without_a_rule(_: Patch) -> None:
    with torch.library._scoped_library("tests_troubleshooting", "FRAGMENT") as library:
        library.define("mine(Tensor x) -> Tensor")
        library.impl("mine", torch.sin, "CompositeExplicitAutograd")
        compiled(lambda x: torch.ops.tests_troubleshooting.mine(x))(X)


def trained_without_units(patch: Patch) -> None:
    patch.setattr(backend, "is_emulated", lambda *_: True)
    patch.setattr(backend, "_without_units", {})
    optimizer = optimizer_with_gradient()
    compiled(nn.Linear(4, 4))(X)
    del optimizer


def no_table(patch: Patch) -> None:
    patch.setattr(native, "objects_library", lambda _: None)
    table.load.__wrapped__()


def layer_in_place(patch: Patch) -> None:
    """As up to torch 2.13: newer releases compile it."""
    patch.setattr(dynamo, "compiles_nothing", lambda fn: True)
    nn.Linear(4, 4).compile(backend="amp", options={"lower": "eager"})


def inside_a_switched_off_region(_: Patch) -> None:
    with torch.autocast("cpu", enabled=False):
        compiled(nn.Linear(4, 4), dtype=torch.bfloat16)(X)


def generic_step(_: Patch) -> None:
    scaler, optimizer = ampcompile.GradScaler("cpu"), optimizer_with_gradient(torch.optim.RMSprop)
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)


def step_in_float64(_: Patch) -> None:
    param = nn.Parameter(torch.ones(3, dtype=torch.float64))
    param.grad = torch.ones_like(param)
    ampcompile.optim.AdamW([param]).step()


def loaded_after_release(_: Patch) -> None:
    model = nn.Linear(4, 4)
    checkpoint = {name: value.clone() for name, value in model.state_dict().items()}
    run = compiled(model)
    with torch.no_grad():
        run(X)
    ampcompile.release_masters(model)
    model.load_state_dict(checkpoint)


class Mapped(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.func.vmap(lambda row: row @ row)(x)


OURS: dict[str, Callable[[Patch], object]] = {
    "option … is unknown": lambda _: compiled(nn.ReLU(), dtpye=torch.float16)(X),
    "no C++ compiler found": no_compiler,
    "ampcompile can't watch": other_torch,
    "pass … failed at …": refusing_fake,
    "… is unsafe in mixed precision": unsafe_loss,
    "found infinite or NaN gradients": only_infinite,
    "a graph trains in float16": no_scaler,
    "found gradients that were written": changed_after_clipping,
    "found a scaler that unscales": unscaled_after_clipping,
    "found no step so far": lambda _: ampcompile.GradScaler("cpu").last_step_skipped,
    "a CUDA graph capture of a step": captured_with_counts,
    "found a gradient of a gradient": penalty_through_dropout,
    "… was compiled with backend 'amp' and is called": inside_another,
    "… was compiled with backend 'amp' and is compiled again": lambda _: torch.compile(
        compiled(nn.ReLU()), backend="eager"
    ),
    "… is a generator function": lambda _: compiled(numbers),
    "found a … among the results": returns_a_set,
    "… the policy isn't followed: …": lambda _: compiled(nn.GRU(4, 4), policy="op linear=fp32")(X),
    "policy pattern … matches no …": lambda _: compiled(nn.Linear(4, 4), policy="op linaer=fp32")(X),
    "the policy asks for fp8": fp8_on_a_cpu,
    "unknown to the policy": without_a_rule,
    "this CPU has no units": trained_without_units,
    "each call casts its weights": no_table,
    "….compile() compiles no layer": layer_in_place,
    "… runs in float32: found torch.autocast": inside_a_switched_off_region,
    "the step of … takes the generic path": generic_step,
    "the step of AdamW is torch's own": step_in_float64,
    "found …, which ampcompile.release_masters turned": loaded_after_release,
    "… waits for a call of …": lambda _: ampcompile.explain(nn.ReLU()),
    "audit found no op to compare": lambda _: ampcompile.audit(lambda x: x)(X),
    "found a transform of torch.func": lambda _: ampcompile.export(Mapped(), (X,)),
}
"""What provokes the message of the heading that begins so"""

THEIRS = {
    "Invalid backend: 'amp', …": "torch's, where ampcompile isn't installed",
    "'AMP' is not a valid DynamoBackend": "Accelerate's",
    "Either mode or options can be specified, but both can't be specified at the same time.": "torch.compile's",
    "Error in op: torch.ops.aten._transformer_encoder_layer_fwd": "Inductor's",
    "mat1 and mat2 must have the same dtype": "ATen's",
    "Index put requires": "ATen's",
    "mixed dtype (CPU)": "ATen's",
    "Got unsupported ScalarType BFloat16": "torch's, of NumPy",
    "one of the variables needed for gradient computation has been modified by an inplace operation": "autograd's",
    "Attempting to unscale FP16 gradients.": "that of torch's scaler, which ours raises too",
    "torch.compile with aot_autograd does not currently support double backward": "AOTAutograd's",
    "… failed with aten.nonzero.default. Adding a graph break.": "Dynamo's",
    "torch._dynamo hit config.recompile_limit": "Dynamo's",
}
"""Whose the other messages are: other packages word them, in each release anew, and their tests are there."""


def said_by(act: Callable[[Patch], object], patch: Patch, caplog: pytest.LogCaptureFixture) -> list[str]:
    """What is shown of ours: warnings, all of which stand at the user's line, however deep in ours and torch's code
    they come up; lines of the log; the text of an error or of a result.
    """
    with warnings.catch_warnings(record=True) as told, caplog.at_level(logging.INFO, "ampcompile"):
        warnings.simplefilter("always")
        try:
            end = repr(act(patch))
        except Exception as error:
            assert isinstance(getattr(error, "inner_exception", error), AmpError)
            end = str(error)
    logged = [record.getMessage() for record in caplog.records if record.name.startswith("ampcompile")]
    ours = [each for each in told if issubclass(each.category, AmpWarning)]
    assert {each.filename for each in ours} <= {__file__}
    return [end, *logged, *(str(each.message) for each in ours)]


def headings(begin: str) -> list[str]:
    return [heading for heading in HEADINGS if heading.startswith(begin)]


@pytest.mark.parametrize("begin", OURS)
def test_a_message_comes_as_its_heading_says(
    begin: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (heading,) = headings(begin)
    words = ".+".join(map(re.escape, heading.strip("…").split("…")))
    said = said_by(OURS[begin], monkeypatch, caplog)
    assert any(re.search(words, each) for each in said), said


def test_weights_of_two_tensors_are_left_to_autocast_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def run(_: Patch) -> None:
        model = nn.Linear(4, 4)
        for name, param in [*model.named_parameters()]:
            setattr(model, name, nn.Parameter(TwoTensor(param.detach(), param.detach().clone())))
        compiled(model, lower="aot_eager", policy="op linear=fp32")(X)

    assert any("left to autocast" in each for each in said_by(run, monkeypatch, caplog))


def test_ops_without_a_rule_are_named_at_the_default_level(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "ampcompile"):
        without_a_rule(monkeypatch)
    assert caplog.messages == ["unknown to the policy, run in what arrives: tests_troubleshooting.mine"]


def test_one_function_finds_the_users_line() -> None:
    callers = {module for module, path in SOURCES.items() if "warnings.warn" in path.read_text()}
    assert callers == {"ampcompile.errors"}


def test_each_heading_that_quotes_a_message_is_provoked_or_another_packages() -> None:
    assert sorted(chain.from_iterable(map(headings, [*OURS, *THEIRS]))) == sorted(HEADINGS)
