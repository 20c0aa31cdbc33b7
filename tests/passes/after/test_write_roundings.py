"""What ops on 16-bit numbers round is written as casts, and what has 16 bits already isn't rounded again."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import CheckpointPolicy

from ampcompile.passes.after.write_roundings import WriteRoundings
from ampcompile.passes.base import run_passes
from ampcompile.torch_private import lowering
from tests.compiling import LOW, same_bits

CASES = {  # what is done to two matrices: the ops afterwards, `>` widens, `<` rounds, `!` is marked for Inductor
    "a sum": (lambda a, b: a + b, "> > add <"),
    "a number twice": (lambda a, b: a * a, "> mul <"),
    "an argument by name": (lambda a, b: torch.add(a, b, alpha=0.5), "> > add <"),
    "to float32": (lambda a, b: a * b.float(), "> > mul"),
    "a cube": (lambda a, b: a**3, "> mul < > > mul <"),
    "other powers": (lambda a, b: a**2, "> pow <"),
    "chosen": (lambda a, b: torch.where(a > b, a, b).maximum(a).relu(), "gt where maximum relu"),
    "chosen of what is rounded": (lambda a, b: (a + b).relu() * a, "> > add < relu > > mul <"),
    "chosen of two types": (lambda a, b: a.maximum(b.float()), "> > maximum"),
    "of a product": (lambda a, b: (a @ b).t().neg() * 2, "mm! t neg > mul <"),
    "of a reduction": (lambda a, b: a.sum(0).relu() + a.sum(0), "sum! relu! sum! > >! add <"),
    "of a pool": (lambda a, b: F.avg_pool2d(a[None], 2).sin(), "unsqueeze avg_pool2d! >! sin <"),
    "a kernel of eager's": (lambda a, b: torch.digamma(a), "digamma!"),
    "copied": (lambda a, b: a.clone(), "clone!"),
}


def graph(f, *args: Tensor) -> torch.fx.GraphModule:
    """With casts as they are there, and with marks on all ops, as torch marks those on 16-bit numbers."""
    gm = make_fx(f, decomposition_table={torch.ops.aten._to_copy.default: convert}, tracing_mode="fake")(*args)
    for node in calls(gm):
        node.meta[lowering.ROUND_AS_EAGER] = True
    return gm


def convert(x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.ops.prims.convert_element_type.default(x, dtype)


def write(gm: torch.fx.GraphModule) -> int:
    return run_passes([WriteRoundings()], gm)[0].rewrites


def calls(gm: torch.fx.GraphModule) -> list[Node]:
    return [node for node in gm.graph.nodes if node.op == "call_function"]


def words(gm: torch.fx.GraphModule) -> str:
    return " ".join(map(word, calls(gm)))


def word(node: Node) -> str:
    name = node.target._schema.name.split("::")[1]
    if name == "convert_element_type":
        name = "<" if node.meta["val"].dtype == LOW else ">"
    of_no_use = node.target.is_view or (name == "<" and lowering.CASTS_NEED_MARKS)
    return name + "!" * (node.meta.get(lowering.ROUND_AS_EAGER, False) and not of_no_use)


def operands() -> Tensor:
    return torch.rand(2, 4, 4, dtype=LOW)


@pytest.mark.parametrize("name", CASES)
def test_what_is_rounded_and_where(name):
    f, expected = CASES[name]
    a, b = operands()
    gm = graph(f, a, b)
    changed = write(gm)
    assert words(gm) == expected and bool(changed) == (">" in expected)
    assert write(gm) == 0
    assert same_bits(gm(a, b), f(a, b))


def test_what_is_computed_on_the_way_to_a_result_is_not_rounded():
    gm = graph(lambda a, b: a * b + a, *operands())
    calls(gm)[0].meta[lowering.ROUND_AS_EAGER] = False
    write(gm)
    a, b = operands()
    assert words(gm) == "> > mul > add <" and same_bits(gm(a, b), (a.float() * b.float() + a.float()).to(LOW))


def test_a_graph_without_marks_stays_as_it_is():
    gm = graph(lambda a, b: a * b + a, *operands())
    for node in calls(gm):
        del node.meta[lowering.ROUND_AS_EAGER]
    assert write(gm) == 0


def test_templates_hand_on_what_they_add_up():
    gm = graph(lambda a, b: (a @ b) * 2, *operands())
    with torch._inductor.config.patch(max_autotune_gemm=True):
        write(gm)
    assert words(gm) == "mm! >! mul <"


def test_marks_of_a_value_stay_with_its_16_bits():
    gm = graph(lambda a, b: a * b, *operands())
    marks = {"recompute": CheckpointPolicy.MUST_SAVE, lowering.WRITE_TO_MEMORY: True}
    calls(gm)[0].meta |= marks
    write(gm)
    *_, product, result = calls(gm)
    assert marks.items() <= result.meta.items() and not marks.keys() & product.meta.keys()


def test_inductors_passes_drop_no_rounding():
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes

    def chain(a: Tensor, b: Tensor) -> Tensor:
        return ((a * b + a).sin() / 3).float() * b

    with FakeTensorMode():
        gm = graph(chain, *torch.empty(2, 4, 4, dtype=LOW, device="cuda"))
    write(gm)
    written = words(gm)
    with torch._inductor.config.patch(lowering.config_for_rounding(True, ())):
        joint_graph_passes(gm)
    assert words(gm) == written and written.count("<") == 4
