"""The tables are complete and mean what they say; what custom ops add. Agreement with eager: test_parity.py."""

import re
from typing import get_args

import pytest
import torch

from ampcompile.errors import OptionError
from ampcompile.rules import autocast_lists
from ampcompile.rules import ours as rules_ours
from ampcompile.rules import table as rules_table
from ampcompile.rules.autocast_lists import ACCELERATORS, EVERY_DEVICE, GPU_LIKE, Category, Group
from ampcompile.rules.ours import CONTENTS
from ampcompile.rules.table import Rule, composite_needs_decomposition, register_op, rule_for, table
from ampcompile.torch_private import dispatcher
from ampcompile.torch_private.dispatcher import op_named
from tests.op_calls import LOW, Call, autocast, under_rule

DEVICES = ["cpu", "cuda", "xpu", "mps", "mtia", "maia"]
TABLES = autocast_lists.GROUPS
ALL_OPS = frozenset(torch._C._dispatch_get_all_op_names())
aten = torch.ops.aten


def with_autocast_kernel(device: str) -> set[str]:
    return {op for op in ALL_OPS if op.startswith("aten::") and dispatcher.has_autocast_kernel(op, device)}


def of_autocast(device: str) -> dict[str, Rule]:
    return {op: rule for op, rule in table(device).items() if rule.because.startswith("on autocast's")}


@pytest.fixture
def fresh_registry(monkeypatch):
    monkeypatch.setattr("ampcompile.rules.table._registered", {})


@pytest.mark.parametrize("device", DEVICES)
def test_the_table_lists_exactly_the_ops_with_an_autocast_kernel(device):
    only_with_cudnn = {"aten::_cudnn_rnn"} - with_autocast_kernel(device) if device == "cuda" else set()
    assert not only_with_cudnn or torch.version.cuda is None, "this build has cuDNN"
    assert with_autocast_kernel(device) == of_autocast(device).keys() - only_with_cudnn


@pytest.mark.parametrize("torch_release,cpu,cuda", [((2, 11), 129, 126), ((2, 13), 127, 120), ((2, 15), 126, 121)])
def test_the_sizes_that_the_tables_state(monkeypatch, torch_release, cpu, cuda):
    monkeypatch.setattr(dispatcher, "TORCH", torch_release)
    table.cache_clear()
    try:
        assert (len(of_autocast("cpu")), len(of_autocast("cuda"))) == (cpu, cuda)
    finally:
        table.cache_clear()


@pytest.mark.parametrize("device", DEVICES)
def test_no_op_stands_twice_in_the_lists_of_a_device(device):
    for groups in (TABLES, rules_ours.GROUPS):
        names = [op for group in groups if device in group.devices for op in group.names()]
        assert len(names) == len(set(names)), {op for op in names if names.count(op) > 1}


def test_every_group_gives_a_known_category_a_device_and_a_reason():
    group = Group("fp32", ("cpu",), "why", "exp  norm.Scalar\n torchvision::nms")
    assert group.names() == ["aten::exp", "aten::norm.Scalar", "torchvision::nms"]
    assert set(GPU_LIKE) < set(ACCELERATORS) < set(EVERY_DEVICE) == {*ACCELERATORS, "cpu"}
    for group in (*TABLES, *rules_ours.GROUPS):
        assert group.category in get_args(Category) and group.names() and group.because
        assert group.devices and set(group.devices) <= set(EVERY_DEVICE)


def test_devices_without_lists_have_no_rules():
    assert not table("meta") and rule_for(aten.linear.default, "hpu") is None


def test_reasons_name_the_list_and_the_device():
    assert rule_for(aten.linear.default, "cuda").because.startswith(
        "on autocast's lower_precision_fp list (CUDA): matrix products gain from matrix units"
    )
    assert rule_for(aten.lerp.Tensor, "cpu").because.startswith("on ampcompile's promote list: ")


def test_a_round_trip_gives_back_the_dtype_of_the_first_operand_and_float64_and_integers_are_left_alone():
    assert table("cpu")["aten::cat"].operand_dtype([torch.int64, torch.float64], LOW) is None
    assert table("cpu")["aten::index_put_"].operand_dtype([torch.int64, torch.float32], LOW) is None
    rule = table("cpu")["torchvision::roi_align"]
    assert rule.operand_dtype([LOW, torch.float32], LOW) == torch.float32
    assert rule.result_dtype([LOW, torch.float32], LOW) == LOW
    assert rule.result_dtype([torch.float32, torch.float32], LOW) == torch.float32
    assert Rule("fp32_inside", "").result_dtype([torch.float32], LOW) == LOW
    assert Rule("fp32", "").result_dtype([LOW], LOW) is None


@pytest.mark.parametrize(
    "device,apart,whole",
    [
        (
            "cpu",
            "einsum inner tensordot linalg_multi_dot matrix_power corrcoef gru.input hstack pad",
            "square rms_norm",
        ),
        ("cuda", "square inner matrix_power nll_loss_nd gru.input pairwise_distance", "einsum pad cross_entropy_loss"),
        ("mps", "square inner instance_norm", "einsum batch_norm"),
    ],
)
def test_composites_are_taken_apart_where_an_op_inside_has_a_rule(device, apart, whole):
    always = "to.dtype reshape dropout layer_norm batch_norm silu contiguous flatten.using_ints chunk linear matmul"
    assert all(composite_needs_decomposition(op_named(f"aten::{op}"), device) for op in apart.split())
    assert not any(
        composite_needs_decomposition(op_named(f"aten::{op}"), device) for op in (whole + " " + always).split()
    )


def test_composites_of_other_libraries_are_taken_apart_unless_they_have_a_rule(fresh_registry):
    with torch.library._scoped_library("amp_test_composite", "DEF") as lib:
        lib.define("twice(Tensor x) -> Tensor")
        lib.impl("twice", lambda x: x @ x, "CompositeImplicitAutograd")
        lib.define("plain(Tensor x) -> Tensor")
        lib.impl("plain", lambda x: x @ x, "CompositeExplicitAutograd")
        ops = torch.ops.amp_test_composite
        assert composite_needs_decomposition(ops.twice.default, "cpu")
        assert not composite_needs_decomposition(ops.plain.default, "cpu")
        register_op(ops.twice.default, "fp32")
        assert not composite_needs_decomposition(ops.twice.default, "cpu")
    assert not composite_needs_decomposition(aten.square.default, "cpu")
    register_op("aten::pow.Tensor_Scalar", "fp32")  # what it is made of
    assert composite_needs_decomposition(aten.square.default, "cpu")


def test_what_composites_hide_names_ops_that_exist_and_matters_on_some_device():
    assert {op for outer, inner in CONTENTS.items() for op in (outer, *inner)} <= ALL_OPS
    used = {op for op in CONTENTS for d in DEVICES if composite_needs_decomposition(op_named(op), d)}
    used |= {inner for op in used for inner in CONTENTS[op]}
    assert CONTENTS.keys() <= used
    assert CONTENTS["aten::pad"] == CONTENTS["aten::_pad_enum"] and len(CONTENTS["aten::pad"]) == 5
    assert all(len(set(inner)) == len(inner) and outer not in inner for outer, inner in CONTENTS.items())


@pytest.fixture
def custom():
    with torch.library._scoped_library("amp_test", "DEF") as lib:
        lib.define("f(Tensor x, Tensor y) -> Tensor")
        lib.define("f.scaled(Tensor x, float by) -> Tensor")
        lib.impl("f", lambda x, y: x * y, "CompositeExplicitAutograd")
        lib.impl("f.scaled", lambda x, by: x * by, "CompositeExplicitAutograd")
        yield torch.ops.amp_test.f, lib


@pytest.mark.parametrize("rule", ["lower_precision_fp", "fp32", "promote"])
def test_a_rule_is_registered_for_all_overloads_or_for_one(custom, fresh_registry, rule):
    f, _ = custom
    register_op("amp_test::f", rule)
    assert rule_for(f.default, "cpu").category == rule_for(f.scaled, "cuda").category == rule
    register_op(f.scaled, "fp32")
    assert rule_for(f.scaled, "cpu").category == "fp32"
    assert rule_for(f.default, "cpu") == Rule(rule, f"registered as {rule} with ampcompile.register_op")


@pytest.mark.parametrize("rule,category", [("low", "lower_precision_fp"), ("float32", "fp32"), (torch.float32, "fp32")])
def test_a_rule_may_be_spelled_as_in_a_policy(fresh_registry, rule, category):
    register_op("aten::sin", rule)
    assert rule_for(torch.ops.aten.sin.default, "cpu").category == category


NO_FULL_NAME = (
    "expected its name as 'ns::name' or 'ns::name.overload', or an OpOverload such as torch.ops.ns.name.default."
)
REFUSED = [
    *((op, "fp32", NO_FULL_NAME) for op in ("f", "a b::c", "::f", "aten::linear.", "a::b::c", 3, aten.sin)),
    *((name, "fp32", f"found no op {name} in this torch") for name in ("aten::lineaar", "aten::linear.nonsense")),
    ("ns::f", "fp16", "got the rule 'fp16' for ns::f; expected one of lower_precision_fp, fp32, promote."),
]


@pytest.mark.parametrize(("op", "rule", "said"), REFUSED)
def test_what_can_not_be_registered_is_refused(fresh_registry, op, rule, said):
    with pytest.raises(OptionError, match=re.escape(said)):
        register_op(op, rule)
    assert not rules_table._registered


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_custom_ops_registered_with_torch_run_as_in_eager(dtype):
    @torch.library.custom_op("amp_test_torch::product", mutates_args=())
    def product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x * y

    op = torch.ops.amp_test_torch.product.default
    assert rule_for(op, "cpu") is None
    torch.library.register_autocast("amp_test_torch::product", "cpu", dtype)
    rule = rule_for(op, "cpu")
    assert rule_for(op, "cuda") is None
    assert "torch.library.register_autocast" in rule.because
    for x in (torch.randn(5), torch.randn(5, dtype=LOW), torch.randn(5, dtype=torch.float64)):
        y = torch.randn(5).to(x)
        with autocast("cpu", True):
            eager = op(x, y)
        assert torch.equal(eager, under_rule(Call(op, (x, y), {}), rule))
        assert eager.dtype == (torch.float64 if x.dtype == torch.float64 else dtype)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_ops_of_a_library_registered_with_torch_have_their_rule(custom, device):
    f, lib = custom
    assert rule_for(f.default, device) is None
    torch.library.register_autocast("amp_test::f", device, torch.float16, lib=lib)
    rule = rule_for(f.default, device)
    assert (rule.category, rule.dtype) == ("lower_precision_fp", torch.float16)
    assert rule_for(f.default, "cpu" if device == "cuda" else "cuda") is None
    assert rule_for(f.scaled, device) is None


def test_an_autocast_kernel_that_cannot_be_read_is_named():
    with torch.library._scoped_library("amp_test_opaque", "DEF") as lib:
        lib.define("f(Tensor x) -> Tensor")
        lib.impl("f", lambda x: x, "CompositeExplicitAutograd")
        lib.impl("f", lambda x: x.half(), "AutocastCPU")
        rule = rule_for(torch.ops.amp_test_opaque.f.default, "cpu")
        assert rule.category == "as_arrives" and "ampcompile.register_op" in rule.because


def test_torchvision_kernels_agree_with_the_table():
    pytest.importorskip("torchvision")
    for device in ("cpu", "cuda", "xpu"):
        theirs = {
            op
            for op in torch._C._dispatch_get_all_op_names()
            if op.startswith("torchvision::") and dispatcher.has_autocast_kernel(op, device)
        }
        assert theirs <= table(device).keys()
        if device == "cpu":
            assert theirs == {op for op in table(device) if op.startswith("torchvision::")}
    boxes, features = torch.tensor([[0.0, 0, 0, 5, 5]]), torch.randn(1, 2, 8, 8)
    for x in (features, features.to(LOW)):
        call = Call(torch.ops.torchvision.roi_align.default, (x, boxes, 1.0, 2, 2, -1, False), {})
        with autocast("cpu", True):
            eager = call.run()
        assert torch.equal(eager, under_rule(call, table("cpu")["torchvision::roi_align"])) and eager.dtype == x.dtype
