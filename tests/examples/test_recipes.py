"""Every recipe trains compiled as it does eagerly, in flat memory, with a number of graphs that stops growing."""

import gc
import subprocess
import sys

import pytest
import torch
from torch._dynamo.utils import counters

from ampcompile import weight_stats
from examples.recipes.everything import RECIPES
from examples.recipes.recipe import Way, compare, distance, run

pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo does
STEPS = 40
COMPILED, EAGER = Way(compiled=True, lower="aot_eager"), Way(compiled=False)


def alive() -> tuple[int, int]:
    """Bytes of all tensors, and how many objects the garbage collector knows."""
    gc.collect()
    objects = gc.get_objects()
    tensors = [o for o in objects if type(o) in (torch.Tensor, torch.nn.Parameter) and o.is_cpu]
    return sum(o.nbytes for o in tensors if o.layout == torch.strided), len(objects)


@pytest.mark.parametrize("name", RECIPES)
def test_it_is_its_eager_twin_and_goes_on_in_flat_memory_with_the_graphs_of_three_steps(name):
    counters.clear()
    recipe = RECIPES[name](COMPILED)
    first = run(recipe, 3)
    graphs = counters["stats"]["unique_graphs"]
    assert graphs > 0
    ours, eager = run(recipe, 9), run(RECIPES[name](EAGER), 12)
    assert [*first.scales, *ours.scales[1:]] == eager.scales
    assert eager.skipped or name not in ("typical", "clipping")
    moved = distance(eager.after, eager.before)
    assert moved > 0.01, "it learns nothing"
    assert distance(ours.after, eager.after) < min(0.01, 0.3 * moved)
    assert ours.losses[-1] == pytest.approx(eager.losses[-1], rel=0.05)
    assert eager.losses[-1] < eager.losses[0] or name in ("gan", "decoding")
    del eager
    for _ in range(8):
        recipe.step()
    (held, objects), copies = alive(), weight_stats()
    for _ in range(STEPS):
        recipe.step()
    held_then, objects_then = alive()
    assert counters["stats"]["unique_graphs"] == graphs
    assert held_then <= held + 4096
    assert (weight_stats().bytes, weight_stats().copies) == (copies.bytes, copies.copies)
    assert objects_then <= objects + STEPS // 2, "one object every other step is a leak"


@pytest.mark.ci
def test_by_inductor_too(capsys):
    compare(RECIPES["gradient_penalty"], steps=4)
    compare(RECIPES["several_models"], steps=4)
    lines = [line for line in capsys.readouterr().out.splitlines() if "% apart" in line]
    assert len(lines) == 2 and all(float(line.split()[1]) < 1.0 for line in lines)


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch was built without torch.distributed")
def test_two_processes_gather_16_bits_and_get_the_same_weights():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    run = subprocess.run([*command, "examples.recipes.fsdp2"], capture_output=True, text=True, timeout=300)
    assert "the same weights as with float32 gathers" in run.stdout, run.stdout + run.stderr
    assert "0.up.weight" in run.stdout and "bf16       32,768" in run.stdout, run.stdout
