"""What a GPU would run, counted for small models: beside Inductor under autocast, and by hand."""

import json
import subprocess
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks.paper import device
from benchmarks.paper.__main__ import add_up, find_failures, show
from benchmarks.paper.cases import AMP, QUANTIZED, SMALL, SMALL_IN_FP8, STOCK, Case
from benchmarks.paper.counts import find_peak

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The device's library."""
    return device.build(tmp_path_factory.mktemp("paper"))


def count(built: Path, case: Case, *peers: str) -> dict[str, Any]:
    """Each peer's answer for a case, all from one process: imports would take each of them as long as a count."""
    asked = [part for peer in peers for part in (json.dumps(asdict(case)), peer)]
    command = [sys.executable, "-m", "benchmarks.paper.one", str(built), *asked]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=570, check=False)
    assert not run.returncode, run.stderr[-3000:]
    answers = dict(zip(peers, map(json.loads, run.stdout.splitlines()[-len(peers) :]), strict=True))
    assert not list(find_failures({str(case): answers}))
    for graph in (graph for peer in peers if peer != STOCK for graph in answers[peer]["graphs"]):
        kernels = graph["kernels"]
        assert not kernels["spilled"] and {"sm_80", "sm_90", "sm_100"} <= kernels.keys()
    return answers


@pytest.mark.ci
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_amp_has_no_more_of_anything_than_stock(case: Case, built: Path) -> None:
    """All kernels compile, and none of ours spills."""
    peers = count(built, case, STOCK, AMP)
    ours, theirs = peers[AMP]["graphs"], peers[STOCK]["graphs"]
    for what in ("launches", "calls", "bytes"):
        assert 0 < add_up(ours, what) <= add_up(theirs, what), what
    assert add_up(ours, "saved") <= 1.005 * add_up(theirs, "saved")  # the mean of a norm, 4 bytes a row
    assert add_up(ours, "flops") == add_up(theirs, "flops") > 0
    assert f"| {AMP} | " in show(str(case), peers)
    if case == SMALL[0]:
        parts = dict(part for graph in ours for part in graph["parts"])
        assert {label: parts[label] for label in BY_HAND} == BY_HAND


ROWS, WIDTH, VOCAB = 512, 64, 256
BY_HAND = {
    # Pre-activations in, activations out.
    "add erf mul view": 2 * ROWS * 4 * WIDTH * 2,
    # Query, key, value in; result, one logsumexp a row and the random state out.
    "aten._scaled_dot_product_flash_attention.default": 4 * ROWS * WIDTH * 2 + ROWS * 4 + 24,
    # Logits in; the largest of each row and the logarithm of its sum out.
    "log prepare_softmax_online": ROWS * VOCAB * 2 + 2 * ROWS * 4,
    # Gradients of query, key and value in, of what they were cut out of out, and of its bias for 128 rows each.
    "add clone full neg permute select_scatter sum view": 2 * 3 * ROWS * WIDTH * 2 + ROWS // 128 * 3 * WIDTH * 4,
    # Rows of float32 for as many places as a sequence has, in and out.
    "embedding": 2 * 128 * WIDTH * 4,
}
"""Bytes of kernels of a GPT of one layer: 512 tokens of width 64, vocabulary 256, sequences of 128."""


@pytest.mark.ci
def test_every_product_is_one_of_8_bits_and_no_weight_is_cast(built: Path) -> None:
    """Two blocks of three products, 512 rows of width 64 and 192 inside."""
    peers = count(built, SMALL_IN_FP8, STOCK, *QUANTIZED)
    rows, width, inner = 512, 64, 192
    weights = 6 * width * inner
    for recipe, answer in peers.items():
        calls = Counter[str]()
        for graph in answer["graphs"]:
            calls.update(graph["calls"])
        in_16_bits = 6 if recipe.endswith("rowwise") else 0  # the weights' gradients
        assert calls["_scaled_mm"] == (0 if recipe == STOCK else 18 - in_16_bits)
        assert recipe == STOCK or sum(n for name, n in calls.items() if "mm" in name) == 18
        assert add_up(answer["graphs"], "flops") == 3 * 2 * rows * weights
        if recipe != STOCK:
            copies = answer["graphs"][-1]
            expected = (2, 10 * weights) if recipe.endswith("rowwise") else (1, 3 * weights)
            assert (copies["kind"], copies["launches"], copies["bytes"]) == ("copies", *expected)
    stock, quantized = (peers[name]["graphs"] for name in (STOCK, f"{AMP}, fp8"))
    assert add_up(quantized, "saved") < 0.8 * add_up(stock, "saved")
    assert add_up(quantized, "launches") <= 37, "one for each product's scale would make it 50"


CODE = """
    kept, weight, tangents = args
    buf0 = empty_strided_cuda((8,), (1,), torch.float32)
    del kept
    buf1 = torch.ops.aten.attend.default(buf0)
    buf2 = buf1[0]
    del buf1
    buf3 = reinterpret_tensor(buf0, (2, 4), (4, 1), 0); del buf0  # reuse
    del tangents
    buf4 = empty_strided_cuda((8,), (1,), torch.float32)
    del buf3
    return (buf2, buf4, )
"""


def test_the_peak_is_that_of_the_code() -> None:
    """Two names for one memory: it goes with the last. Of an op with several results the parts have bytes."""
    given = {"kept": (1, 100), "view_of_kept": (1, 100), "tangents": (2, 1)}
    sizes = {"buf0": 20, "buf2": 30, "buf3": 20, "buf4": 7}
    assert find_peak(CODE, given, sizes) == 100 + 20 + 30 + 7
    assert find_peak(CODE.replace("del kept", "del kept\n    del view_of_kept"), given, sizes) == 100 + 1 + 20
    assert find_peak(CODE, {}, sizes) == 30 + 20 + 7


def test_what_fails_is_told() -> None:
    kernels = {"failed": ["sm_90 triton_a: E"], "spilled": ["sm_90 triton_b: 8 bytes", "sm_90 amp_c: 8 bytes"]}
    found = {"a case": {AMP: {"graphs": [{"kernels": kernels}]}, STOCK: {"error": "died"}}}
    assert list(find_failures(found)) == [
        "a case, amp: sm_90 triton_a: E",
        "a case, amp: sm_90 amp_c: 8 bytes",
        f"a case, {STOCK}: died",
    ]


def test_a_fused_kernel_that_quantizes_for_a_product_is_beside_it() -> None:
    sizes = {"_scaled_mm": 5, "_scaled_mm abs amax": 3, "addmm": 2, "aten.convolution.default": 7, "mul view": 1}
    assert add_up([{"parts": list(sizes.items())}], "outside") == 4
