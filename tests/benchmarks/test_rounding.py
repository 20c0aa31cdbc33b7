"""The table of what is bit for bit eager autocast's is measured, and its promises hold."""

import pytest

from ampcompile.torch_private import dispatcher
from benchmarks.rounding import OPS, PAGE, differing, with_table

PROMISED = ("a + b", "a * b", "a / b", "a * b + b", "a * sigmoid(b)", "sigmoid", "tanh", "exp", "silu", "relu")


@pytest.mark.skipif(dispatcher.TORCH < (2, 13), reason="Inductor 2.11 rounds only on CUDA, whatever it is told")
def test_promised_ops_are_equal_on_normal_numbers() -> None:
    shares = differing("eager")
    assert shares.keys() == OPS.keys()
    assert {op: shares[op][0] for op in PROMISED} == dict.fromkeys(PROMISED, 0.0)


def test_relaxed_rounds_less() -> None:
    assert differing("relaxed")["a * sigmoid(b)"][0] > 0.1


def test_the_page_keeps_all_but_its_table() -> None:
    page, machine = PAGE.read_text(), "on torch 9.9.9, toaster CPU (AVX1024)"
    written = with_table(page, ["| `a` | 1 % | 2 % | 3 % |"], machine)
    assert machine in written and "| `a` | 1 % | 2 % | 3 % |\n\n" in written and "| `a + b` |" not in written
    kept = [line for line in page.splitlines() if not line.startswith("| `") and "benchmarks.rounding" not in line]
    assert [line for line in written.splitlines() if line in kept] == kept
