"""Capture: one spelling, a fake on every node, and no op wired to another value than the user's."""

import torch
import torch.nn.functional as F
from torch import nn

from ampcompile.passes.graph import module_path, source_line
from tests.compiling import HIGH, LOW, amp, compiled, dtypes, eager, same_bits
from tests.models import Net


def on_both_sides_of(no_op):
    """A float32 `h` and a bfloat16 one, each read as it is and through an op that may do nothing."""

    def f(x, w):
        for h in (x + 1, x @ w):
            y = no_op(h)
            yield from (y, h, y * 2, h + 1)

    return lambda x, w: list(f(x, w))


NO_OPS = {
    "float": lambda h: h.float(),
    "to": lambda h: h.to(HIGH),
    "to low": lambda h: h.to(LOW),
    "type_as": lambda h: h.type_as(torch.zeros(1)),
    "type": lambda h: h.type(HIGH),
    "contiguous": lambda h: h.contiguous(),
    "dropout": lambda h: F.dropout(h, 0.5, training=False),
    "expand": lambda h: h.expand(4, 4),
    "real": lambda h: torch.real(h),
    "two in one": lambda h: F.dropout(h.float().contiguous(), 0.1, training=False),
}


def write_through(x, w, h):
    h.float().add_(1)
    return h * 2


def constants(x, w, h):
    masked = x.masked_fill(torch.tensor([[True, False, True, True]]), 0.0) @ x
    return x @ torch.tensor([[1.0, 70000.0]] * 4), torch.tensor(3) + x.sum(), torch.tensor([1, 2]), masked


def by_a_size(x, w, h):
    """Of a size computed by a tensor op: its number is known while tracing; reading it must not be asked for again."""
    rows = torch.div(x.size(0), 2, rounding_mode="trunc")
    wide = x.view(rows, -1)
    return torch.utils.checkpoint.checkpoint(lambda w: w.view(rows, -1) @ w.t(), wide, use_reentrant=False)


def composites(x, w, h):
    return torch.einsum("ij,kj->ik", x, x), torch.linalg.multi_dot([x, x, x]), F.cross_entropy(x, x.softmax(-1))


PROGRAMS = {name: lambda x, w, h, no_op=no_op: on_both_sides_of(no_op)(x, w) for name, no_op in NO_OPS.items()}
PROGRAMS |= {each.__name__: each for each in (write_through, constants, by_a_size, composites)}


def test_every_bit_is_eagers():
    """Of two matrices, and of one that is computed for each program."""

    attention = nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True).eval()

    def attend(x, w, h):
        return attention(h, h, h, need_weights=True), h * 2, F.normalize(h.float()), h

    programs = {**PROGRAMS, "a no-op inside a Python functional": attend}

    def f(x, w):
        return {name: program(x, w, x + 1) for name, program in programs.items()}

    x, w = torch.randn(4, 4), torch.randn(4, 4)
    run, recorder = amp(f)
    found, expected = run(x, w), eager(f, x, w)
    assert [name for name in programs if not same_bits(found[name], expected[name])] == []
    assert not recorder.disagreements
    graph = recorder.traced[0]  # taken apart where rules hide inside, and only there
    assert "einsum" not in graph and "multi_dot" not in graph
    assert "aten.cross_entropy_loss.default" in graph and "aten.softmax.int" in graph


def normed(m, x):
    """Computes in float32 and gives back what arrived, as Llama's does."""
    y = x.float()
    return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def stream(m, x):
    for norm, linear in zip(m.norms, m.linears, strict=True):
        x = x + linear(norm(x))
    return x


def residual_stream():
    norms, linears = ([make() for _ in range(3)] for make in (lambda: Net(normed), lambda: nn.Linear(8, 8)))
    return Net(stream, norms=nn.ModuleList(norms), linears=nn.ModuleList(linears))


def test_a_residual_stream_lowered_by_policy_stays_low_through_norms_in_float32():
    model, x = residual_stream(), torch.randn(2, 8)
    # float32 where it was traced: the norms' casts did nothing then
    run, recorder = amp(model, policy="op add.Tensor=low")
    assert run(x).dtype == LOW
    adds = [n for n in recorder.graphs[0].graph.graph.nodes if n.target is torch.ops.aten.add.Tensor]
    residual = [n for n in adds if n.args[1] != 1e-6]
    assert len(residual) == 3 and {n.meta["val"].dtype for n in residual} == {LOW}
    assert dtypes(eager(model, x)) == [HIGH]


def test_modes_that_the_model_enters_stay_in_the_graph():
    linear = nn.Linear(4, 4)

    def f(x):
        with torch.no_grad():
            a = linear(x)
        with torch.inference_mode():
            b = linear(x)
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            c = F.scaled_dot_product_attention(x, x, x)
        return a, b.clone(), linear(x), c

    x = torch.randn(4, 4)
    run, recorder = amp(f)
    results = run(x)
    assert [r.requires_grad for r in results] == [False, False, True, False]
    targets = [getattr(n.target, "__name__", "") for n in recorder.graphs[0].graph.graph.nodes]
    assert targets.count("_enter_inference_mode") == targets.count("_exit_inference_mode") == 1
    assert targets.count("_sdpa_kernel") == 2 and targets.count("_set_grad_enabled") == 2
    assert same_bits(results, eager(f, x))


def test_every_value_has_a_fake_and_ops_keep_their_module_and_line():
    model, x = nn.Sequential(nn.Linear(8, 8), residual_stream()), torch.randn(2, 8)
    run, recorder = amp(model)
    run(x)
    nodes = recorder.graphs[0].graph.graph.nodes
    assert all("val" in n.meta for n in nodes if n.op != "output")
    linears = [n for n in nodes if n.target is torch.ops.aten.linear.default]
    assert [module_path(n) for n in linears] == ["0", "1.linears.0", "1.linears.1", "1.linears.2"]
    assert all("test_capture.py:" in source_line(n) for n in linears[1:])  # Sequential's own line is torch's


def test_a_tensor_made_of_sizes_and_of_numbers_that_are_read():
    """`torch.tensor` detaches in place what a conversion may have returned as it was."""

    def program(x, scale):
        return x * torch.tensor([x.size(0), 2, 3, scale[0].item()]) + torch.tensor(scale.tolist()).sum()

    x, scale = torch.ones(5, 4), torch.tensor([2, 3])
    run, _ = compiled(program, fullgraph=True, dynamic=True)
    assert torch.equal(run(x, scale), program(x, scale))


def test_what_is_detached_in_place_after_a_conversion_that_changes_nothing():
    def program(x):
        h = x * 2
        h.float().detach_()
        return h + x

    x = torch.ones(5, requires_grad=True)
    run, _ = compiled(program, fullgraph=True)
    run(x).sum().backward()
    assert torch.equal(x.grad, torch.ones(5))
