"""What the machine has is measured, and the advice follows the measurement."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ampcompile.command_line import doctor as cli_doctor
from ampcompile.torch_private import patches


def test_doctor_measures_and_advises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_doctor, "_WIDTH", {"cpu": 32})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(cli_doctor, "time_call", lambda device, multiply: multiply() is None or 0.001)
    monkeypatch.setattr(cli_doctor, "_seconds_of_others", lambda: 0.0)
    found = cli_doctor.examine(rounds=3)
    assert found["versions"]["torch"] == torch.__version__
    assert found["devices"][0]["device"] == "cpu" and found["devices"][0]["threads"] == torch.get_num_threads()
    assert {p["work"]: p["shape"][0] for p in found["products"]} == {"one row": 1, "many rows": 1024}
    assert all(seconds > 0 for p in found["products"] for seconds in p["seconds"].values())
    assert len(found["advice"]) == 1 and found["advice"][0].startswith("cpu: bf16 ")
    json.dumps(found)
    monkeypatch.setenv("COLUMNS", "400")
    text = cli_doctor.table(found)
    assert "1 times with one row" in text and "1000 us" in text
    assert " us" not in cli_doctor.table(found | {"others": 4000.0})
    assert torch.__version__ in text and found["advice"][0] == text.splitlines()[0]
    assert "patches" not in text
    patched = cli_doctor.table(found, patched=True)
    assert patched.startswith(found["advice"][0]) and all(group.when in patched for group in patches.TABLE)
    assert any("torch.Tensor.data" in group["patches"] for group in found["patches"])


@pytest.mark.parametrize(("capability", "has"), [((8, 0), False), ((8, 9), True), ((9, 0), True)])
def test_units_for_8_bits_are_named(capability: tuple[int, int], has: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    about = SimpleNamespace(name="a GPU", major=capability[0], minor=capability[1], total_memory=1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: about)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", None)
    findings = {"versions": {}, "devices": [cli_doctor._gpu(0)], "caches": {}, "products": [], "missing": []}
    assert ("fp8 tensor cores" in cli_doctor.table(findings | {"advice": []})) == has


def test_a_first_product_which_packs_and_tunes_counts_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_doctor, "_WIDTH", {"cpu": 32})
    seconds = iter(2 * [0.3, 0.3, 0.3, 0.01, 0.02, 0.04])  # of the two kinds of product, the dtypes in turn
    monkeypatch.setattr(cli_doctor, "time_call", lambda device, multiply: next(seconds))
    for product in cli_doctor._products("cpu", rounds=2):
        assert product["seconds"] == {"f32": 0.01, "bf16": 0.02, "f16": 0.04}
        assert set(product["spread"].values()) == {1.0}


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
    (line,) = cli_doctor._advice([product(gain=gain)], others=0.0)
    assert line.startswith(ADVICE[gain])


def test_the_processors_times_are_those_of_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cli_doctor, "PROCESSOR_TIMES", tmp_path / "stat")
    monkeypatch.setattr(cli_doctor.os, "sysconf", lambda name: 100)
    monkeypatch.setattr(cli_doctor.time, "process_time", lambda: 3.0)
    (tmp_path / "stat").write_text("cpu  100 200 300 9000 9000 5 15 80 70 70\ncpu0 1\n")
    assert cli_doctor._seconds_of_others() == 4.0


def test_no_ratio_is_told_of_times_that_are_not_to_be_trusted() -> None:
    steady, unsteady = product(), product("one row", 1 / 60, bf16=8.0)
    assert cli_doctor._advice([unsteady, steady], others=0.0) == [ADVICE[2.0]]
    assert cli_doctor._advice([product(f16=8.0)], others=0.0) == [ADVICE[2.0]]
    (line,) = cli_doctor._advice([unsteady], others=0.0)
    assert line.startswith("cpu: bf16 can't be judged, as the same product took now more, now less time. Run")
    (line,) = cli_doctor._advice([steady], others=4000.0)
    assert line.startswith("cpu: bf16 can't be judged, as other processes use 4000.0 of ")
    assert cli_doctor._spread([1.0, 1.0, 1.0, 9.0, 1.0]) == 1.0 and cli_doctor._spread([1.0, 9.0, 1.0, 9.0]) > 5
    assert (cli_doctor._time(1e-3, 1.2), cli_doctor._time(1e-3, 2.0)) == ("1000 us", "unsteady")
