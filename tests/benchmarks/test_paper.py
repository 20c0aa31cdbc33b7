"""What a GPU would run, counted for small models: beside Inductor under autocast, by hand, and as it was.

``python -m tests.benchmarks.test_paper`` writes paper_small.json again, once a change of the counts is wanted.
"""

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from ampcompile.kernels.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_backward
from benchmarks.paper import device, estimate
from benchmarks.paper.cases import AMP, SMALL, STOCK
from benchmarks.paper.depth import at_depth, repeated
from benchmarks.paper.opaque import COSTS
from benchmarks.paper.state_space import scan

TABLE = Path(__file__).with_name("paper_small.json")
LINEAR = f"{AMP}, fuse=linear, every call"
COUNT = """
import json, logging, sys
from pathlib import Path
from benchmarks.paper import device
device.load(Path(sys.argv[1]))
device.describe()
logging.disable(logging.WARNING)
from benchmarks.paper.cases import AMP, SMALL, STOCK
from benchmarks.paper.cubins import CAPABILITIES, compiled
from benchmarks.paper.lowering import counted
found = {}
for case in SMALL:
    for peer in (STOCK, AMP, *(sys.argv[2:] if case is SMALL[0] else ())):
        graphs = counted(*case.build(), case.training, peer, case.dtype)
        found[f"{case}: {peer}"] = [
            {"kind": g.kind, "launches": g.launches, "calls": sum(g.calls.values()), "bytes": g.bytes, "saved": g.saved}
            for g in graphs
        ]
        if case is SMALL[0]:
            found[f"parts, {peer}"] = [part for graph in graphs for part in graph.parts]
            found[f"kernels, {peer}"] = [
                [name, capability, *compiled(source, capability)]
                for graph in graphs for name, source in graph.kernels.items() for capability in CAPABILITIES
                if peer == AMP or name.startswith("amp_")
            ]
print(json.dumps(found))
"""


DEEP = """
import json, logging, sys
from dataclasses import replace
from pathlib import Path
from unittest import mock
from benchmarks.paper import device, one
device.load(Path(sys.argv[1]))
device.describe()
logging.disable(logging.WARNING)
from benchmarks.paper import cubins
from benchmarks.paper.cases import Case
cubins.usages = lambda kernels: {}
case = Case("GPT 124M", 1, 128, training=True)
print(json.dumps([one.answer(replace(case, layers=layers), sys.argv[2]) for layers in (2, 3, 5)]))
"""


def count(folder, *peers, script=COUNT):
    command = [sys.executable, "-c", script, str(device.build(folder)), *peers]
    run = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], timeout=570)
    assert not run.returncode, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return count(tmp_path_factory.mktemp("paper"), LINEAR)


def total(graphs, what):
    return sum(graph[what] for graph in graphs)


@pytest.mark.ci
def test_amp_has_no_more_of_anything_than_stock(found):
    for case in SMALL:
        ours, theirs = found[f"{case}: {AMP}"], found[f"{case}: {STOCK}"]
        for what in ("launches", "calls", "bytes"):
            assert total(ours, what) <= total(theirs, what), f"{case}: {what}"
        assert total(ours, "saved") <= 1.005 * total(theirs, "saved"), case  # the mean of a norm, 4 bytes a row


@pytest.mark.ci
def test_counts_are_what_they_were(found):
    kept = json.loads(TABLE.read_text())
    if not version("torch").startswith(kept.pop("torch")):
        pytest.skip("other releases of torch lower graphs otherwise")
    for name, graphs in kept.items():
        if not name.endswith(STOCK):
            assert found[name] == graphs, f"{name}; if this is wanted: python -m {__name__}"


@pytest.mark.ci
def test_bytes_by_hand(found):
    """Kernels of a GPT of one layer: 512 tokens of width 64, vocabulary 256, sequences of 128."""
    rows, width, vocab = 512, 64, 256
    ours = dict(map(tuple, found[f"parts, {AMP}"]))
    by_hand = {
        # Pre-activations in, activations out.
        "add erf mul view": 2 * rows * 4 * width * 2,
        # Query, key, value in; result, one logsumexp a row and the random state out.
        "aten._scaled_dot_product_flash_attention.default": 4 * rows * width * 2 + rows * 4 + 24,
        # Logits in; the largest of each row and the logarithm of its sum out.
        "log prepare_softmax_online": rows * vocab * 2 + 2 * rows * 4,
        # Gradients of query, key and value in, of what they were cut out of out, and of its bias for 128 rows each.
        "add clone full neg permute select_scatter sum view": 2 * 3 * rows * width * 2 + rows // 128 * 3 * width * 4,
        # Rows of float32 for as many places as a sequence has, in and out.
        "embedding": 2 * 128 * width * 4,
    }
    assert {label: ours[label] for label in by_hand} == by_hand
    # A kernel of ours, in the order of the block's layers: input, weight and bias in float32 in; result out.
    layers = [(width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)]
    linear = [size for label, size in found[f"parts, {LINEAR}"] if label == "amp_linear_cast"]
    assert linear[:4] == [2 * rows * (fan_in + fan_out) + 4 * fan_out * (fan_in + 1) for fan_in, fan_out in layers]


@pytest.mark.ci
def test_every_kernel_compiles_and_none_spills(found):
    kernels = [*found[f"kernels, {AMP}"], *found[f"kernels, {LINEAR}"]]
    assert {capability for _, capability, *_ in kernels} == {80, 90, 100}
    assert not [name for name, _, _, spilled, *_ in kernels if spilled]


@pytest.mark.slow
def test_a_line_through_two_depths_meets_the_count_of_a_third(tmp_path):
    few, more, third = count(tmp_path, AMP, script=DEEP)
    line = at_depth({2: few, 3: more}, 5)
    assert line["parameters"] == third["parameters"]
    for found, wanted in zip(line["graphs"], third["graphs"], strict=True):
        assert sorted(found.pop("parts")) == sorted(wanted.pop("parts"))
        assert found.pop("peak") == pytest.approx(wanted.pop("peak"), rel=0.01)
        assert found | {"kernels": {}} == wanted | {"kernels": {}}


def test_blocks_that_are_compiled_alone_keep_what_each_saves():
    forward = {"kind": "forward", "launches": 2, "calls": {"mm": 3}, "bytes": 70, "flops": 9, "saved": 0, "peak": 50}
    backward = forward | {"kind": "backward", "launches": 4, "calls": {"mm": 6, "bmm": 1}, "saved": 40, "peak": 60}
    graphs = [graph | {"roundings": 1, "parts": [["add", 2, 70]], "kernels": {}} for graph in (forward, backward)]
    answer = repeated({"parameters": 5, "graphs": graphs}, 3)
    assert answer["parameters"] == 15
    first, last = answer["graphs"]
    assert last["calls"] == {"mm": 18, "bmm": 3} and last["parts"] == [["add", 6, 210]] and last["saved"] == 120
    assert [first["peak"], last["peak"]] == [50 + 2 * 40, 60 + 2 * 40], "what the other two blocks have saved is alive"


def test_a_scan_is_a_loop_over_time():
    decay, added = torch.rand(2, 2, 13, 3, 4, dtype=torch.float64)
    state, states = torch.zeros_like(added[:, 0]), []
    for step in range(13):
        state = decay[:, step] * state + added[:, step]
        states.append(state)
    torch.testing.assert_close(scan(decay, added), torch.stack(states, 1))


def test_operations_inside_a_fused_loss_are_those_that_run():
    x, weight = torch.randn(48, 16).bfloat16(), torch.randn(32, 16).bfloat16()
    given = x, weight, None, weight, None, torch.randint(32, (48,))
    with FlopCounterMode(display=False) as forward:
        _, lse = linear_cross_entropy._init_fn(*given)
    more = torch.ones(()), x, weight, None, given[-1], None, lse, "mean", -100, 0.0, 0.0, [True, True, False]
    with FlopCounterMode(display=False) as backward:
        linear_cross_entropy_backward._init_fn(*more)
    costs = [cost(*each) for cost, each in zip(COSTS.values(), (given, more), strict=True)]
    assert [each.flops for each in costs] == [forward.get_total_flops(), backward.get_total_flops()]
    assert [(each.launches, each.products) for each in costs] == [(1, 1), (2, 3)], "one piece"
    logits, operand, head = 48 * 32, 48 * 16, 32 * 16
    assert costs[0].bytes == 2 * (operand + head + 2 * logits)
    assert costs[1].bytes == 2 * (5 * logits + 3 * operand + 2 * head) + 4 * 4 * head


def test_an_estimate_takes_the_longer_of_bytes_and_operations():
    graph = {"launches": 3, "calls": {"mm": 2}, "flops": 0, "parts": [["mm", 2, 6e9], ["add mul", 3, 2e9]]}
    assert estimate.launch_seconds([graph]) == 5 * estimate.LAUNCH
    assert estimate.device_seconds([graph]) == pytest.approx(8e9 / estimate.BANDWIDTH)
    busy = graph | {"flops": 1e15}
    assert estimate.device_seconds([busy]) == pytest.approx(2e9 / estimate.BANDWIDTH + 1e15 / estimate.PRODUCTS)


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        counts = count(Path(folder))
    kept = {name: graphs for name, graphs in counts.items() if name.startswith(tuple(map(str, SMALL)))}
    TABLE.write_text(json.dumps({"torch": version("torch").split("+")[0], **kept}, indent=1) + "\n")
