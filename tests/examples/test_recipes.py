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
QUICK = ("typical", "gradient_penalty", "decoding", "validation")
COMPILED, EAGER = Way(compiled=True, lower="aot_eager"), Way(compiled=False)


@pytest.mark.parametrize("name", RECIPES)
def test_it_is_its_eager_twin(name):
    ours, eager = (run(RECIPES[name](way), 12) for way in (COMPILED, EAGER))
    assert ours.scales == eager.scales
    moved = distance(eager.after, eager.before)
    assert moved > 0.01, "it learns nothing"
    assert distance(ours.after, eager.after) < min(0.01, 0.3 * moved)
    assert ours.losses[-1] == pytest.approx(eager.losses[-1], rel=0.05)
    assert eager.losses[-1] < eager.losses[0] or name in ("gan", "decoding")


def test_some_steps_are_skipped():
    assert sum(run(RECIPES[name](COMPILED), 6).skipped > 0 for name in ("typical", "clipping")) == 2


def alive() -> tuple[int, int]:
    """Bytes of all tensors, and how many objects the garbage collector knows."""
    gc.collect()
    objects = gc.get_objects()
    tensors = [o for o in objects if type(o) in (torch.Tensor, torch.nn.Parameter) and o.is_cpu]
    return sum(o.nbytes for o in tensors if o.layout == torch.strided), len(objects)


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.ci) for n in RECIPES])
def test_memory_is_flat_and_graphs_are_few(name):
    counters.clear()
    recipe = RECIPES[name](COMPILED)
    for _ in range(3):
        recipe.step()
    graphs = counters["stats"]["unique_graphs"]
    assert graphs > 0
    for _ in range(17):
        recipe.step()
    (held, objects), copies = alive(), weight_stats()
    for _ in range(180):
        recipe.step()
    held_then, objects_then = alive()
    assert counters["stats"]["unique_graphs"] == graphs
    assert held_then <= held + 4096
    assert (weight_stats().bytes, weight_stats().copies) == (copies.bytes, copies.copies)
    assert objects_then <= objects + 90, "one object every other step is a leak"


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
