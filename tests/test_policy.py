import re
from glob import escape

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ampcompile.dtypes import FP8
from ampcompile.errors import OptionError
from ampcompile.policy import MODULE_VALUES, OP_VALUES, Policy
from ampcompile.rules.table import rule_for

aten = torch.ops.aten
SOFTMAX, NORM, LINEAR = aten.softmax.int, aten.layer_norm.default, aten.linear.default

# Any name that torch allows for a module, with the characters that mean something in a policy's string most of all.
globs = st.text(st.one_of(st.sampled_from(" ,;='\"[]*@.0a\n\t\u2003\\"), st.characters()), min_size=1)


def overrides(values: tuple[str, ...]) -> st.SearchStrategy:
    return st.lists(st.tuples(globs, st.sampled_from(values)), max_size=4).map(tuple)


policies = st.builds(Policy, ops=overrides(OP_VALUES), modules=overrides(MODULE_VALUES))


def category(policy: Policy, op=SOFTMAX, module_path: str = "", device: str = "cuda") -> str | None:
    rule = policy.rule_for(op, device, module_path)
    return rule and rule.category


@given(policies)
def test_the_string_form_inverts(policy):
    parsed = Policy.parse(str(policy))
    assert parsed == policy and hash(parsed) == hash(policy)


@given(st.lists(globs.map(lambda name: name.replace(".", "-")), min_size=1, max_size=4))
def test_a_name_matches_itself_and_its_escape_nothing_else(names):
    path = ".".join(names)
    for glob in (path, escape(path)):
        policy = Policy.parse(str(Policy(modules=((glob, "fp32"),))))
        assert policy.of_module(path) == policy.of_module(f"{path}.inner") == "fp32"
        assert not policy.unmatched([], [path])
        assert glob == path or policy.of_module(f"{path}x") == "default"


def test_names_in_quotes():
    policy = Policy(modules=(("a b", "fp32"), ('say "x", y', "low"), ("it's", "fp16"), ("h[0]", "fp32"), ("é", "fp32")))
    assert str(policy) == (
        'module "a b"=fp32, module "say ""x"", y"=low, module "it\'s"=fp16, module h[0]=fp32, module é=fp32'
    )
    assert (
        Policy.parse("module 'a b' = fp32, module 'say \"x\", y'=low, module 'it''s'=fp16").modules
        == policy.modules[:3]
    )
    rule = policy.rule_for(LINEAR, "cuda", "a b")
    assert rule is not None and rule.because == 'policy: module "a b"=fp32'


def test_policies_people_write():
    policy = Policy((("softmax", "fp32"), ("mm", "low")), (("head", "fp32"), ("body", "bf16"), ("tail", "fp16")))
    ways = {"head": torch.float32, "body": "torch.bfloat16", "tail": "half"}
    given_by = {"ops": {"softmax": "float32", "mm": "lower_precision_fp"}, "modules": ways}
    assert Policy(**given_by) == Policy.parse(given_by) == Policy.parse(policy) == policy
    assert Policy([["softmax", "f32"], ["mm", "low"]], [*ways.items()]) == policy
    assert Policy.parse({}) == Policy() and hash(Policy(**given_by)) == hash(policy)


def test_strings_people_write():
    policy = Policy((("softmax*", "low"), ("mylib::*", "fp32")), (("encoder.layers.*.norm", "fp32"),))
    assert str(policy) == "op softmax*=low, op mylib::*=fp32, module encoder.layers.*.norm=fp32"
    assert Policy.parse(" module encoder.layers.*.norm = fp32,op  softmax*=low , op mylib::*=fp32") == policy
    assert str(Policy()) == "default"
    assert Policy.parse("default") == Policy.parse("  ") == Policy()


NO_ENTRIES = "softmax=fp32|op softmax|op|layer x=fp32|op a=fp32,|default, op a=low|op a=low; module b=fp32"
NO_NAMES = 'module a b=fp32|module "a=fp32|module a"b=fp32|module =fp32|module a=|module a b=fp32'


@pytest.mark.parametrize("text", [*NO_ENTRIES.split("|"), *NO_NAMES.split("|")])
def test_a_string_that_is_no_policy(text):
    wrong = next(entry.strip() for entry in text.split(",") if entry.strip() != "op a=fp32")
    with pytest.raises(OptionError) as error:
        Policy.parse(text)
    assert str(error.value) == (
        f"policy entry {wrong!r} is neither 'op <glob>=<rule>' nor 'module <glob>=<dtype>'. "
        "Write entries with commas between them, as 'op softmax*=low, module encoder.*.norm=fp32', and quotes around a "
        "name with blanks or one of ,;= in it."
    )


def of_ops(given):
    return Policy(ops=given)


def of_modules(given):
    return Policy(modules=given)


REFUSED = [  # what is given to what, and what is said of it
    (Policy.parse, [None, 3, {"head": "fp32"}, ("op a=low",)], "found the policy {!r}; expected an ampcompile.Policy,"),
    (of_ops, [("a=fp32",), "op a=fp32", ["ab"], {"ab"}, None, 3], "Policy got {!r} for its ops; expected a dict, as"),
    (of_ops, [(("a", "fp32", 1),)], "Policy got {!r} for its ops; expected a dict"),
    *((of_modules, [((glob, "fp32"),)], f"policy module glob {glob!r} is no name; expected") for glob in ("", 3, None)),
    (
        of_ops,
        [(("a", "fp23"),)],
        f"policy op a has the value 'fp23'; expected one of {', '.join(OP_VALUES)}. Did you mean",
    ),
    *(
        (
            of_ops,
            [(("a", dtype),)],
            f"policy op a has the value {dtype!r}; expected one of {', '.join(OP_VALUES)}. Did you",
        )
        for dtype in (torch.float8_e4m3fn, "float8_e4m3fn")
    ),
    (
        of_modules,
        [(("a", "fp6"),)],
        f"policy module a has the value 'fp6'; expected one of {', '.join(MODULE_VALUES)}.",
    ),
]


@pytest.mark.parametrize(
    ("make", "given", "said"), [(make, each, said) for make, several, said in REFUSED for each in several]
)
def test_what_is_no_policy_is_refused(make, given, said):
    with pytest.raises(OptionError, match=f"^{re.escape(said.format(given))}"):
        make(given)


def test_an_op_in_a_module():
    policy = Policy.parse("op softmax=low, op softmax@blocks.*=fp32, op *@head=fp32, op layer_norm@=low")
    assert Policy.parse(str(policy)) == policy
    assert [category(policy, SOFTMAX, path) for path in ("", "a", "blocks.3", "blocks.3.inner")] == [
        "lower_precision_fp",
        "lower_precision_fp",
        "fp32",
        "fp32",
    ]
    assert category(policy, LINEAR, "blocks.3") == category(Policy(), LINEAR)
    assert category(policy, LINEAR, "head.inner") == "fp32" and category(policy, LINEAR, "header") != "fp32"
    assert category(policy, NORM, "") == "lower_precision_fp", "outside of modules"
    assert category(policy, NORM, "blocks.3") == category(Policy(), NORM)
    assert category(Policy((("*norm", "fp32"),)), LINEAR, "norm") == category(Policy(), LINEAR), "it sees no module"
    rule = policy.rule_for(SOFTMAX, "cuda", "blocks.3")
    assert rule is not None and rule.because == "policy: op softmax@blocks.*=fp32"
    assert category(Policy(policy.ops, (("blocks", "low"),)), SOFTMAX, "blocks.3") == "lower_precision_fp"


def test_patterns_of_ops_in_modules_that_match_nothing():
    policy = Policy.parse("op softmax@blocks.3=fp32, op softmax@block.3=fp32, op sofmax@blocks.3=fp32")
    assert policy.unmatched(["aten::softmax.int"], ["blocks.3"]) == {
        "softmax@block.3": ["blocks.3", "blocks"],
        "sofmax@blocks.3": ["softmax", "softmax.int", "aten::softmax"],
    }


@pytest.mark.parametrize(
    ("glob", "matches"),
    [
        *((glob, True) for glob in ("softmax", "softmax.int", "aten::softmax", "aten::softmax.int", "aten::*")),
        *((glob, True) for glob in ("soft*", "softma[w-y]")),
        *((glob, False) for glob in ("softmax.Dimname", "Softmax", "soft", "mylib::*", "_softmax")),
    ],
)
def test_an_op_is_matched_by_each_of_its_names(glob, matches):
    assert category(Policy(ops=((glob, "low"),))) == ("lower_precision_fp" if matches else "fp32_set_opt_dtype")


def test_each_value_for_ops():
    given_by = {value: category(Policy(ops=(("softmax", value),))) for value in OP_VALUES}
    assert given_by == {
        "low": "lower_precision_fp",
        "bf16": "lower_precision_fp",
        "fp16": "lower_precision_fp",
        **dict.fromkeys(FP8, "fp32_set_opt_dtype"),  # for linear products alone
        "fp32": "fp32",
        "promote": "promote",
        "fp32_inside": "fp32_inside",
        "as_arrives": "as_arrives",
        "default": "fp32_set_opt_dtype",
    }


def test_each_value_for_modules():
    low = torch.float16
    given_by = {
        value: Policy(modules=(("m", value),)).rule_for(LINEAR, "cpu", "m").operand_dtype([torch.float32], low)
        for value in MODULE_VALUES[:-1]
    }
    for recipe in FP8:
        assert given_by.pop(recipe) is low
        assert Policy(modules=(("m", recipe),)).rule_for(LINEAR, "cpu", "m").fp8 == recipe
    assert Policy(modules=(("m", "fp8"),)).rule_for(NORM, "cuda", "m") is rule_for(NORM, "cuda")
    assert given_by == {"low": low, "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    assert Policy(modules=(("m", "default"),)).rule_for(NORM, "cuda", "m") is rule_for(NORM, "cuda")


def test_fp8_leaves_other_ops_to_earlier_entries():
    of_ops = Policy(ops=(("softmax", "low"), ("*", "fp8")))
    assert category(of_ops) == "lower_precision_fp" and of_ops.rule_for(LINEAR, "cpu").fp8
    of_modules = Policy(modules=(("m", "fp32"), ("*", "fp8")))
    assert category(of_modules, NORM, "m.inner") == "fp32" and of_modules.rule_for(LINEAR, "cpu", "m").fp8
    assert not Policy(modules=(("*", "fp8"), ("m", "fp32"))).rule_for(LINEAR, "cpu", "m").fp8
    named = ("module model.head=fp8", "module *=fp8", "op linear@model.head=fp8")
    for text in (*named, "module model=fp8", "op linear=fp8", "op linear@model=fp8"):
        rule = Policy.parse(text).rule_for(LINEAR, "cpu", "model.head")
        assert (rule.fp8, rule.named) == ("fp8", text in named), "by its own path"


LOWER = "lower_precision_fp"
FOUND = [  # a policy, an op, its module, and what decides there: the last that matches, modules before ops
    ("op soft*=low, op *max=fp32", SOFTMAX, "", "fp32"),
    ("op *max=fp32, op soft*=low", SOFTMAX, "", LOWER),
    ("module a=fp32, module a.b=low", SOFTMAX, "a.b", LOWER),
    ("module a.b=low, module a=fp32", SOFTMAX, "a.b", "fp32"),
    ("op softmax=low, module head=fp32, module head.free=default", SOFTMAX, "body", LOWER),
    ("op softmax=low, module head=fp32, module head.free=default", SOFTMAX, "head", "fp32"),
    ("op softmax=low, module head=fp32, module head.free=default", SOFTMAX, "head.free", LOWER),
    ("op *=low, op softmax=default", SOFTMAX, "", "fp32_set_opt_dtype"),
    *(("op *=fp32, module *=low", op, "", None) for op in (aten.view.default, aten.detach.default, aten.size.int)),
    *(("op *=fp32, module *=low", op, "", None) for op in (aten.add_.Tensor, aten.item.default)),
    ("op *=fp32, module *=low", aten.index_put_.default, "", "follow_destination"),
    *(("module e.in.*.norm=fp32", LINEAR, f"e.in.0{path}", "fp32") for path in (".norm", ".norm.x", ".x.norm")),
    ("module e.in.*.norm=fp32", LINEAR, "e.in.0", LOWER),
    ("module encoder=fp32", LINEAR, "encoder.layers.3", "fp32"),
    *(("module encoder=fp32", LINEAR, path, LOWER) for path in ("encoder2", "")),
    ("module *norm=fp32", LINEAR, "a.b.layernorm", "fp32"),
    ("module *.norm=fp32", LINEAR, "norm", LOWER),
    ("module *=fp32", LINEAR, "", "fp32"),
]


@pytest.mark.parametrize(("text", "op", "path", "found"), FOUND)
def test_what_decides(text, op, path, found):
    assert category(Policy.parse(text), op, path) == found


@pytest.mark.parametrize("op", [aten.batch_norm.default, aten.instance_norm.default, aten.native_batch_norm.default])
def test_running_statistics_are_never_cast(op):
    for value in ("fp32", "fp32_inside"):
        assert Policy(ops=(("*", value),)).rule_for(op, "cpu").keeps == ("running_mean", "running_var")
    assert category(Policy(modules=(("*", "bf16"),)), op) == "as_arrives"


def test_custom_ops_are_overridden_by_namespace():
    with torch.library._scoped_library("amp_test_policy", "DEF") as lib:
        lib.define("f(Tensor x) -> Tensor")
        f = torch.ops.amp_test_policy.f.default
        assert category(Policy(), f) is None
        assert category(Policy((("amp_test_policy::*", "fp32"),)), f) == "fp32"
        assert category(Policy((("f", "fp32"),)), f) is None, "a name without :: is aten's"


def test_an_override_of_a_composite_op_keeps_it_whole():
    einsum = aten.einsum.default
    assert Policy().needs_decomposition(einsum, "cpu")
    assert not Policy(ops=(("einsum", "fp32"),)).needs_decomposition(einsum, "cpu")
    assert Policy(ops=(("bmm", "fp32"),)).needs_decomposition(einsum, "cpu")
    modules = Policy(modules=(("head", "fp32"),))
    assert not modules.needs_decomposition(einsum, "cpu", "head.0")
    assert modules.needs_decomposition(einsum, "cpu", "body")


def test_globs_that_match_nothing_come_with_the_nearest_names():
    ops = ["aten::softmax.int", "aten::linear", "mylib::fancy_norm"]
    modules = ["encoder.layers.0.norm1", "encoder.layers.0.linear", "decoder"]
    policy = Policy(
        (("softmax*", "low"), ("sofmax", "low"), ("mylib::fancy_nrm", "fp32"), ("zzzzzzzz", "fp32")),
        (("encoder", "fp32"), ("encodr.layers", "fp32"), ("*.norm", "fp32"), ("decoder", "default")),
    )
    unmatched = policy.unmatched(ops, modules)
    assert list(unmatched) == ["sofmax", "mylib::fancy_nrm", "zzzzzzzz", "encodr.layers", "*.norm"]
    assert unmatched["sofmax"][0] == "softmax"
    assert unmatched["mylib::fancy_nrm"][0] == "mylib::fancy_norm"
    assert unmatched["zzzzzzzz"] == []
    assert unmatched["encodr.layers"][0] == "encoder.layers"
    assert not Policy().unmatched(ops, modules)
    named = {"encoder.layers.0.norm1": "LayerNorm", "encoder.layers.0.linear": "Linear", "": "Net"}
    classes = Policy({"addmm": "fp32", "softmax@Linear": "fp32", "LinEAR": "fp32"}, {"Layer*": "fp32", "Net": "low"})
    assert classes.unmatched(ops, modules, named) == {
        "addmm": ["linear"],
        "softmax@Linear": ["encoder.layers.0.linear"],
        "LinEAR": ["linear", "aten::linear"],
        "Layer*": ["encoder.layers.0.norm1"],
        "Net": ["*"],
    }
