"""What a call costs the host: the same lines for few weights and for many, and on a GPU about what it does on a CPU."""

from pathlib import Path

import pytest
import torch

from benchmarks import overhead
from benchmarks.architectures import TinyLinears, WithLoss
from benchmarks.records import Records
from tests.devices import DEVICES
from tests.weights.bindings import lines_of


def test_each_device_has_its_figures(tmp_path: Path) -> None:
    records = Records(tmp_path / "r.json", {})
    overhead.measure(records, ["cpu"], rounds=1, counts=[3])
    assert [list(peers) for peers in records.stages.values()] == [["cpu"]] * 2
    assert records.stages["the look at 3 weights"]["cpu"]["seconds"][0] > 0


@pytest.mark.gpu
def test_on_a_gpu_a_call_costs_the_host_what_it_does_on_a_cpu(tmp_path: Path) -> None:
    """All in turn, the least of many: the machine may be busy."""
    records = Records(tmp_path / "r.json", {})
    overhead.measure(records, ["cpu", "cuda"], rounds=100, counts=[148])
    calls, looks = ({name: each["seconds"][0] for name, each in peers.items()} for peers in records.stages.values())
    assert calls["cuda"] <= calls["cpu"] + 10e-6
    assert looks["cuda"] <= 1.3 * looks["cpu"]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("training", [False, True])
def test_a_call_runs_the_same_lines_for_many_weights_as_for_few(device: str, training: bool) -> None:
    def lines(count: int) -> int:
        torch._dynamo.reset()
        model, x = WithLoss(TinyLinears(count)).to(device).train(training), torch.ones(2, 16, device=device)
        run = torch.compile(model, backend="amp", options={"dtype": torch.bfloat16, "lower": "aot_eager"})
        with torch.set_grad_enabled(training):
            for _ in range(4):
                run(x)
            return lines_of(lambda: run(x))

    few, many = lines(8), lines(32)
    assert 0 < few == many
