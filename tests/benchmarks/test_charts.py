"""The pictures of the pages show what the committed results hold, and what the sentences below them say."""

import html

import pytest

from benchmarks import charts


@pytest.mark.parametrize("name", charts.CHARTS)
def test_the_committed_picture_has_each_number(name: str) -> None:
    picture = html.unescape((charts.FOLDER / f"{name}.svg").read_text())
    for row, bars in charts.CHARTS[name][0]().items():
        assert f">{row}<" in picture, "python -m benchmarks.charts draws it"
        for kind, value in bars.items():
            assert f">{kind}<" in picture and f">{value:.3g}<" in picture


def test_speed_is_least_on_a_gpu_in_bfloat16_and_most_where_units_are_slow_or_missing() -> None:
    times = {row: bars["amp"] for row, bars in charts.speed().items()}
    gpu = [value for row, value in times.items() if row.startswith("H200") and "fp8" not in row]
    slow = [value for row, value in times.items() if "AMX hidden" in row or "AVX-512 alone" in row]
    assert min(gpu) > 1 and max(gpu) < min(value for row, value in times.items() if not row.startswith("H200"))
    assert min(slow) > max(value for row, value in times.items() if value not in slow)


def test_nearly_every_model_moves_fewer_bytes_in_fewer_launches() -> None:
    parts = charts.counted().values()
    assert all(part["launches"] < 1 for part in parts) and sum(part["bytes"] > 1 for part in parts) <= 1


def test_training_ends_where_it_ends_as_usual() -> None:
    apart = charts.losses().values()
    assert len(apart) == 8 and all(abs(row["mean"]) <= max(2 * row["standard error"], 0.5) for row in apart)
