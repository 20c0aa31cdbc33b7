"""Where autograd records."""

import torch

from ampcompile.passes.analysis.gradients import recorded_by_autograd
from tests.passes.captured import captured


def names(f, *args, enabled=True):
    return {node.name for node in recorded_by_autograd(captured(f, *args, dtype=None).graph, enabled)}


def test_integers_and_what_comes_of_them_want_no_gradient():
    def f(x, i):
        return x.sin() + i.float(), i.float().cos(), x.argmax()

    found = names(f, torch.randn(3), torch.arange(3))
    assert {"l_x_", "sin", "add"} <= found and not found & {"l_i_", "cos", "argmax"}


def test_nothing_is_recorded_where_grad_mode_is_off():
    def f(x):
        with torch.no_grad():
            y = x.sin()
        return y.cos(), x.exp()

    assert names(f, torch.randn(3)) == {"l_x_", "exp"}
    assert names(lambda x: x.sin(), torch.randn(3), enabled=False) == {"l_x_"}
