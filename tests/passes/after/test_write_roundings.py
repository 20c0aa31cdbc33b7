"""What ops on 16-bit numbers round is written as casts, and what has 16 bits already isn't rounded again."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import CheckpointPolicy

from ampcompile.passes.after.write_roundings import WriteRoundings
from ampcompile.passes.base import run_passes
from ampcompile.torch_private import lowering
from tests.compiling import LOW, same_bits
from tests.passes.tidied import word

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


def convert(x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.ops.prims.convert_element_type.default(x, dtype)


def graph(f, device: str = "cpu") -> GraphModule:
    """Of two matrices; with casts as they are there, and marks on all ops, as torch marks those on 16-bit numbers."""
    with FakeTensorMode():
        a, b = torch.empty(2, 4, 4, dtype=LOW, device=device)
        gm = make_fx(f, decomposition_table={torch.ops.aten._to_copy.default: convert})(a, b)
    for node in calls(gm):
        node.meta[lowering.ROUND_AS_EAGER] = True
    return gm


def write(gm: GraphModule) -> int:
    return run_passes([WriteRoundings()], gm)[0].rewrites


def calls(gm: GraphModule) -> list[Node]:
    return [node for node in gm.graph.nodes if node.op == "call_function"]


def marked(gm: GraphModule) -> str:
    """The ops; `!`: with a mark that Inductor heeds."""
    words = [(node, word(node)) for node in calls(gm)]
    heeded = {n for n, name in words if not n.target.is_view and not (name == "<" and lowering.CASTS_NEED_MARKS)}
    return " ".join(name + "!" * (n in heeded and bool(n.meta.get(lowering.ROUND_AS_EAGER))) for n, name in words)


@pytest.mark.parametrize("name", CASES)
def test_what_is_rounded_and_where(name):
    f, expected = CASES[name]
    a, b = torch.rand(2, 4, 4, dtype=LOW)
    gm = graph(f)
    changed = write(gm)
    assert marked(gm) == expected and bool(changed) == (">" in expected)
    assert write(gm) == 0
    assert same_bits(gm(a, b), f(a, b))


def test_what_is_computed_on_the_way_to_a_result_is_not_rounded():
    gm = graph(lambda a, b: a * b + a)
    calls(gm)[0].meta[lowering.ROUND_AS_EAGER] = False
    write(gm)
    a, b = torch.rand(2, 4, 4, dtype=LOW)
    assert marked(gm) == "> > mul > add <" and same_bits(gm(a, b), (a.float() * b.float() + a.float()).to(LOW))


def test_a_graph_without_marks_stays_as_it_is():
    gm = graph(lambda a, b: a * b + a)
    for node in calls(gm):
        del node.meta[lowering.ROUND_AS_EAGER]
    assert write(gm) == 0


def test_templates_hand_on_what_they_add_up():
    gm = graph(lambda a, b: (a @ b) * 2)
    with torch._inductor.config.patch(max_autotune_gemm=True):
        write(gm)
    assert marked(gm) == "mm! >! mul <"


def test_marks_of_a_value_stay_with_its_16_bits():
    gm = graph(lambda a, b: a * b)
    marks = {"recompute": CheckpointPolicy.MUST_SAVE, lowering.WRITE_TO_MEMORY: True}
    calls(gm)[0].meta |= marks
    write(gm)
    *_, product, result = calls(gm)
    assert marks.items() <= result.meta.items() and not marks.keys() & product.meta.keys()


def test_inductors_passes_drop_no_rounding():
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes

    def chain(a: Tensor, b: Tensor) -> Tensor:
        return ((a * b + a).sin() / 3).float() * b

    gm = graph(chain, "cuda")
    write(gm)
    written = marked(gm)
    with torch._inductor.config.patch(lowering.config_for_rounding(True, ())):
        joint_graph_passes(gm)
    assert marked(gm) == written and written.count("<") == 4
