"""Copies of the parts of DTensor weights follow every writer: each on one rank's part, here in a world of one rank."""

import copy

import pytest
import torch

import ampcompile
from tests.compiling import LOW, same_bits

if not torch.distributed.is_available():
    pytest.skip("this torch was built without torch.distributed", allow_module_level=True)

import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from ampcompile.weights import ShardBinding
from tests.sharding.tensor_parallel import COLUMN_AND_ROW, by_block, local, parallel, whole
from tests.weights.bindings import bind
from tests.weights.writers import unsampled, unseen

pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


@pytest.fixture
def mesh(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


@pytest.fixture
def sharded_over(mesh):
    """What makes a DTensor of this rank's part."""
    return lambda part: DTensor.from_local(part, mesh, [Shard(0)], run_check=False)


@pytest.fixture
def trained(sharded_over):
    """A weight, and a graph that reads a copy of its part."""
    return torch.nn.Parameter(sharded_over(torch.randn(64, 64))), bind([LOW], kind=ShardBinding)


OTHERS = {
    ".data": lambda p: p.data,
    "redistributed as it is": lambda p: p.redistribute(placements=p.placements),
    "a shallow copy": copy.copy,
}


@pytest.mark.parametrize("other", OTHERS)
def test_writes_through_another_dtensor_on_the_part_are_seen_for_as_long_as_it_lives(sharded_over, trained, other):
    weight, binding = trained
    kept = OTHERS[other](weight)
    twice = torch.ones(64, 64)
    twice[unsampled(weight._local_tensor)] = 2
    binding.copies([weight])
    for _ in range(3):
        assert torch.equal(binding.copies([weight])[0], weight._local_tensor.to(LOW))
        with torch.no_grad():
            kept.mul_(sharded_over(twice))


def test_any_optimizers_step_may_have_written_the_part_of_a_weight_that_is_trained(trained):
    weight, binding = trained
    for _ in range(2):
        binding.copies([weight])

    class OfItsOwn(torch.optim.SGD):
        """Holds other tensors than the weight, as optimizers that shard their state do."""

        def step(self):
            part = weight._local_tensor  # held no longer: whoever holds it may write, and it is compared
            unseen(part)[unsampled(part)] = 5

    OfItsOwn([torch.nn.Parameter(torch.ones(1))], lr=0.1).step()
    assert torch.equal(binding.copies([weight])[0], weight._local_tensor.to(LOW))


def at_one_place(tensor):
    """A place that no sample covers, since it is neither at the start nor at the end: the middle of a matrix."""
    return tensor[tensor.shape[0] // 2].narrow(0, tensor.shape[1] // 2 if tensor.dim() > 1 else 0, 1)


def checkpoint(model, folder, load):
    """Saves a checkpoint with other numbers than the model's, and loads it in place."""
    state = {"model": {name: value.detach().clone() * 2 for name, value in model.state_dict().items()}}
    dcp.save(state, checkpoint_id=folder)
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    if load:
        model.load_state_dict(state["model"])


def sharded(model):
    return [p for p in model.parameters() if isinstance(p, DTensor)]


def matrices(model):
    return [p for p in sharded(model) if p.dim() == 2]


def stepped(kind, **options):
    def write(model, folder):
        for p in sharded(model):
            p.grad = torch.ones_like(p)
        kind(sharded(model), lr=0.1, **options).step()
        model.zero_grad()

    return write


def to_matrices(write):
    return lambda model, folder: [write(p) for p in matrices(model)]


WRITERS = {
    "SGD": stepped(torch.optim.SGD),
    "AdamW, foreach": stepped(torch.optim.AdamW, foreach=True),
    "AdamW, fused": stepped(torch.optim.AdamW, fused=True),
    "the scaler's AdamW": lambda model, folder: stepped(lambda params, lr: Stepping(torch.optim.AdamW(params, lr=lr)))(
        model, folder
    ),
    "the DTensor": to_matrices(lambda p: p.mul_(2)),
    "a detached DTensor": to_matrices(lambda p: p.detach().mul_(2)),
    "several DTensors": lambda model, folder: torch._foreach_mul_(matrices(model), [*map(mask, matrices(model))]),
    "several detached DTensors": lambda model, folder: torch._foreach_lerp_(
        [p.detach() for p in matrices(model)], [p.detach() * mask(p) for p in matrices(model)], 0.5
    ),
    ".data": to_matrices(lambda p: p.data.mul_(mask(p))),
    ".data's part": to_matrices(lambda p: at_one_place(p.data.to_local()).fill_(5)),
    "the part": to_matrices(lambda p: p.to_local().mul_(2)),
    "one place of the part": to_matrices(lambda p: at_one_place(p.to_local()).fill_(6)),
    "the part's .data": to_matrices(lambda p: at_one_place(p.to_local().data).fill_(7)),
    "a detached DTensor's part": to_matrices(lambda p: at_one_place(p.detach().to_local()).fill_(8)),
    "another DTensor around the part": to_matrices(
        lambda p: DTensor.from_local(p.to_local(), p.device_mesh, p.placements).mul_(mask(p))
    ),
    "a DTensor redistributed as it is": to_matrices(lambda p: p.redistribute(placements=p.placements).mul_(mask(p))),
    "a state dict": lambda model, folder: model.load_state_dict(
        {name: value.detach() * 1.5 for name, value in model.state_dict().items()}
    ),
    "a checkpoint in place": lambda model, folder: checkpoint(model, folder / "in_place", load=False),
    "swapped": to_matrices(lambda p: torch.utils.swap_tensors(p, torch.nn.Parameter(p.detach() * mask(p)))),
    "a checkpoint": lambda model, folder: checkpoint(model, folder / "loaded", load=True),
}


class Stepping:
    """An optimizer that `ampcompile.GradScaler` steps."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def step(self):
        ampcompile.GradScaler("cpu", enabled=False).step(self.optimizer)


def mask(p):
    """Twos at one place of each part, else ones."""
    ones = torch.ones_like(p)
    at_one_place(ones.to_local()).fill_(2)
    return ones


def forward(f, x):
    """Results without gradients, and gradients of the call after it."""
    with torch.autocast("cpu", LOW, cache_enabled=False):
        with torch.no_grad():
            first = local(f(x))
        return first, local(f(x))


class Pair:
    """Two models alike: each call of one, which is compiled, has the bits of the other's under eager autocast."""

    def __init__(self, mesh, compile_it=whole):
        self.theirs, self.ours = parallel(COLUMN_AND_ROW, mesh), parallel(COLUMN_AND_ROW, mesh)
        self.x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
        self.compiled = compile_it(self.ours, lower="aot_eager")
        forward(self.compiled, self.x)

    def right(self):
        return same_bits(forward(self.compiled, self.x), forward(self.theirs, self.x))


@pytest.mark.ci
@pytest.mark.parametrize(
    ("compile_it", "writers", "casts"),
    [(whole, WRITERS, 1), (by_block, ["SGD", "AdamW, fused", ".data", "swapped"], 2)],
    ids=["whole", "by block"],
)
def test_casts_follow_every_writer(mesh, compile_it, writers, casts, tmp_path):
    """The next calls after it, without gradients and with them, have eager autocast's bits, of one cast a graph."""
    pair = Pair(mesh, compile_it)
    assert ampcompile.weight_stats().copies == 8, ampcompile.weight_stats()
    for name in writers:
        with torch.no_grad():
            WRITERS[name](pair.theirs, tmp_path / "theirs")
            WRITERS[name](pair.ours, tmp_path / "ours")
        before = ampcompile.weight_stats().casts
        assert pair.right(), name
        assert ampcompile.weight_stats().casts == before + casts, name
        assert pair.right(), name
        assert ampcompile.weight_stats().casts == before + casts, f"cast again though unwritten: {name}"


@pytest.mark.ci
def test_one_write_after_a_call_is_seen_through_another_dtensor_that_is_gone_in_the_next(mesh):
    pair = Pair(mesh)
    others = [DTensor.from_local(p.to_local(), p.device_mesh, p.placements) for p in matrices(pair.ours)]
    forward(pair.compiled, pair.x)
    with torch.no_grad():
        for other in [*others, *matrices(pair.theirs)]:
            other.mul_(mask(other))
    del others, other
    assert pair.right()


@pytest.mark.ci
def test_weights_that_replace_others_are_told_from_them(mesh):
    """Python gives a new weight the address of an old one, and its version comes to be that of the old one."""
    pair = Pair(mesh)
    layers = [next(m for m in model.modules() if isinstance(m, torch.nn.Linear)) for model in (pair.ours, pair.theirs)]
    placements = layers[0].weight.placements
    for replacement in range(60):
        values = torch.randn(layers[0].weight.to_local().shape)
        for layer in layers:
            layer.weight = None
            layer.weight = torch.nn.Parameter(DTensor.from_local(values.clone(), mesh, placements))
        for _ in range(1 + replacement % 5):
            with torch.no_grad():
                for layer in layers:
                    layer.weight.mul_(mask(layer.weight))
            assert pair.right(), replacement
