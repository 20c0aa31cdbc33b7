"""What the machine has is measured, and the advice follows the measurement."""

import json
from types import SimpleNamespace

import pytest
import torch

from ampcompile.command_line import doctor as cli_doctor
from ampcompile.torch_private import patches


def test_doctor_measures_and_advises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_doctor, "_WIDTH", {"cpu": 32})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = cli_doctor.examine(rounds=3)
    assert found["versions"]["torch"] == torch.__version__
    assert found["devices"][0]["device"] == "cpu" and found["devices"][0]["threads"] == torch.get_num_threads()
    assert {p["work"]: p["shape"][0] for p in found["products"]} == {"one row": 1, "many rows": 1024}
    assert all(seconds > 0 for p in found["products"] for seconds in p["seconds"].values())
    assert len(found["advice"]) == 1 and found["advice"][0].startswith("cpu: bf16 ")
    json.dumps(found)
    monkeypatch.setenv("COLUMNS", "400")
    text = cli_doctor.table(found | {"load": 0.5})
    busy = cli_doctor.table(found | {"load": 4000.0})
    assert "others use" not in text and "others use this machine (load 4000.0 on " in busy
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
    assert ("fp8 tensor cores" in cli_doctor.table(findings | {"advice": [], "load": 0.0})) == has


def test_a_first_product_which_packs_and_tunes_counts_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_doctor, "_WIDTH", {"cpu": 32})
    seconds = iter(2 * [0.3, 0.3, 0.3, 0.01, 0.02, 0.04])  # of the two kinds of product, the dtypes in turn
    monkeypatch.setattr(cli_doctor, "time_call", lambda device, multiply: next(seconds))
    for product in cli_doctor._products("cpu", rounds=2):
        assert product["seconds"] == {"f32": 0.01, "bf16": 0.02, "f16": 0.04}


ADVICE = {
    2.0: "cpu: bf16 is likely to pay. As fast as float32 in matrix products: 2 times with many rows",
    1 / 155: "cpu: bf16 is not likely to pay. As fast as float32 in matrix products: 0.0065 times with many rows",
    1.1: "cpu: bf16 may pay a little",
}


@pytest.mark.parametrize("gain", ADVICE)
def test_advice_follows_what_was_measured(gain: float) -> None:
    product = {"device": "cpu", "work": "many rows", "seconds": {"f32": 1.0, "bf16": 1 / gain, "f16": 1.0}}
    (line,) = cli_doctor._advice("cpu", [product])
    assert line.startswith(ADVICE[gain])
