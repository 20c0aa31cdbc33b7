"""The table of docs/several_devices.md is what the formula gives; matrix.py holds the formula to counted bytes."""

from tests.ranks import ROOT
from tests.sharding.paper import LLAMA, llama, shard, table


def test_the_page_has_the_table():
    assert table() in (ROOT / "docs" / "several_devices.md").read_text()


def test_the_models_have_their_sizes():
    sizes = {name: sum(shard(shape, 1) for shape, _ in llama(*model)) for name, model in LLAMA.items()}
    assert sizes == {"8 B": 8_030_261_248, "70 B": 70_553_706_496}, "as their model cards say"
