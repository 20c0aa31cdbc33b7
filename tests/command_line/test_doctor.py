"""What the machine has is measured, and the advice follows the measurement."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ampcompile.command_line import doctor as cli_doctor
from ampcompile.torch_private import patches


def test_doctor_measures_and_advises(monkeypatch: pytest.MonkeyPatch) -> None:
    found = cli_doctor.examine(3, 32, lambda device, multiply: multiply() is None or 0.001)
    assert found["advice"][0].startswith("cpu: bf16 ")
    found |= {"others": 0.0, "advice": cli_doctor.advise(found["products"], 0.0)}  # whatever else runs meanwhile
    assert found["versions"]["torch"] == torch.__version__
    assert found["devices"][0]["device"] == "cpu" and found["devices"][0]["threads"] == torch.get_num_threads()
    shapes = {p["work"]: p["shape"][:2] for p in found["products"]}
    assert shapes == {"one row": [1, 32], "many rows": [1024, 32]}
    assert all(seconds > 0 for p in found["products"] for seconds in p["seconds"].values())
    json.dumps(found)
    monkeypatch.setenv("COLUMNS", "400")
    text = cli_doctor.table(found)
    assert "1 times with one row" in text and "1000 us" in text
    assert "unsteady" in cli_doctor.table(found | {"products": [product(f16=2.0) | {"shape": (1, 2, 2)}]})
    assert " us" not in cli_doctor.table(found | {"others": 4000.0})
    assert torch.__version__ in text and found["advice"][0] == text.splitlines()[0]
    assert "patches" not in text
    patched = cli_doctor.table(found, patched=True)
    assert patched.startswith(found["advice"][0]) and all(group.when in patched for group in patches.TABLE)
    assert any("torch.Tensor.data" in group["patches"] for group in found["patches"])


@pytest.mark.parametrize(("capability", "has"), [((8, 0), False), ((8, 9), True), ((9, 0), True)])
def test_units_for_8_bits_are_named(capability: tuple[int, int], has: bool) -> None:
    about = SimpleNamespace(name="a GPU", major=capability[0], minor=capability[1], total_memory=1)
    gpu = cli_doctor.describe_gpu(0, about)
    findings = {"versions": {}, "devices": [gpu], "caches": {}, "products": [], "missing": []}
    assert ("fp8 tensor cores" in cli_doctor.table(findings | {"advice": []})) == has


def test_a_first_product_which_packs_and_tunes_counts_for_nothing() -> None:
    seconds = iter(2 * [0.3, 0.3, 0.3, 0.01, 0.02, 0.04])  # of the two kinds of product, the dtypes in turn
    for product in cli_doctor.time_products("cpu", 2, 32, lambda device, multiply: next(seconds)):
        assert product["seconds"] == {"f32": 0.01, "bf16": 0.02, "f16": 0.04}
        assert set(product["spread"].values()) == {1.0}


@pytest.mark.parametrize(
    ("times", "steady"), [((0.03, 0.01, 0.01, 0.01, 0.09, 0.01), True), ((0.03, 0.001, 0.009, 0.001, 0.009), False)]
)
def test_times_that_one_call_disturbed_are_steady(times: tuple[float, ...], steady: bool) -> None:
    seconds = iter(2 * [each for each in times for _ in range(3)])
    for product in cli_doctor.time_products("cpu", len(times), 32, lambda device, multiply: next(seconds)):
        assert all(spread == 1.0 if steady else spread > 5 for spread in product["spread"].values())


def product(work: str = "many rows", gain: float = 2.0, **spread: float) -> dict[str, Any]:
    spreads = {"f32": 1.0, "bf16": 1.0, "f16": 1.0} | spread
    return {"device": "cpu", "work": work, "seconds": {"f32": 1.0, "bf16": 1 / gain, "f16": 1.0}, "spread": spreads}


ADVICE = {
    2.0: "cpu: bf16 is likely to pay. As fast as float32 in matrix products: 2 times with many rows",
    1 / 155: "cpu: bf16 is not likely to pay. As fast as float32 in matrix products: 0.0065 times with many rows",
    1.1: "cpu: bf16 may pay a little",
}


@pytest.mark.parametrize("gain", ADVICE)
def test_advice_follows_what_was_measured(gain: float) -> None:
    (line,) = cli_doctor.advise([product(gain=gain)], others=0.0)
    assert line.startswith(ADVICE[gain])


def test_busy_is_neither_idle_nor_waiting() -> None:
    assert cli_doctor.busy_seconds("cpu  100 200 300 9000 9000 5 15 80 70 70\ncpu0 1\n", 100) == 7.0


def test_no_ratio_is_told_of_times_that_are_not_to_be_trusted() -> None:
    steady, unsteady = product(), product("one row", 1 / 60, bf16=8.0)
    assert cli_doctor.advise([unsteady, steady], others=0.0) == [ADVICE[2.0]]
    assert cli_doctor.advise([product(f16=8.0)], others=0.0) == [ADVICE[2.0]]
    (line,) = cli_doctor.advise([unsteady], others=0.0)
    assert line.startswith("cpu: bf16 can't be judged, as the same product took now more, now less time. Run")
    (line,) = cli_doctor.advise([steady], others=4000.0)
    assert line.startswith("cpu: bf16 can't be judged, as other processes use 4000.0 of ")
