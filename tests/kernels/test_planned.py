"""Marks of gradients: none is taken for one that was freed, and a few are renewed at once. See test_pending.py, too."""

import gc
import subprocess
import sys
from types import FunctionType

import pytest
import torch

from ampcompile.kernels import planned
from ampcompile.kernels.planned import Marks, PlannedTensors, share_memory

pytestmark = pytest.mark.skipif(not planned.available(), reason="no C++ compiler works here")


def test_noted_tensors_may_be_freed_and_no_other_is_taken_for_one() -> None:
    x = torch.ones(3)
    noted = Marks([x])
    storage = x.untyped_storage()._cdata
    users = torch._C._storage_Use_Count(storage)
    del x
    assert users > torch._C._storage_Use_Count(storage) == 0
    others = [torch.ones(3) for _ in range(100)]
    assert storage not in [other.untyped_storage()._cdata for other in others]
    assert not any(noted.match([other]) for other in others)


def test_marks_are_freed_without_python_which_would_swallow_an_interrupt() -> None:
    param = torch.nn.Parameter(torch.ones(3))
    param.grad, called = torch.ones(3), list[str]()
    held = [Marks([param.grad]), PlannedTensors([{"params": [param]}]), Marks.__new__(Marks)]
    sys.setprofile(lambda frame, event, _: called.append(frame.f_code.co_name) if event == "call" else None)
    held.clear()
    sys.setprofile(None)
    assert not called
    gc.collect()  # pytest makes an error of what is raised then


def test_versions_are_taken_once_more_by_a_function_of_c() -> None:
    flat = torch.ones(6)
    x, y, sparse = flat[:3], flat[3:], torch.eye(2).to_sparse()  # views that share a counter
    marks = Marks([x, sparse, y])
    read = marks.renewal([x, sparse, y])
    torch._foreach_mul_([x, y], 2.0)
    assert not marks.match([x, y]) and not isinstance(read.func, FunctionType)
    read()
    assert marks.match([x, y]) and marks.match([y])
    x.add_(1)
    assert not marks.match([x, y])
    marks.renewal([y.add_(1)])()
    assert marks.match([y]), "one alone, with the version that both have now"
    assert not marks.match([x])


def test_without_a_compiler_gradients_are_recognized_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planned.native, "available", lambda *_: False)
    x, y = torch.ones(3), torch.ones(3)
    noted = Marks([x, y])
    assert noted.match([y]) and noted.match([x, y]) and not noted.match([torch.ones(3)])
    x.add_(1)
    assert not noted.match([x, y]) and noted.match([y])


def test_memory_is_shared_from_one_common_element_on() -> None:
    flat = torch.zeros(10)
    assert not share_memory([flat[6:], flat[:3], flat[3:6], flat[2:2]])
    assert share_memory([flat[5:], flat[:3], flat[3:6]])


@pytest.mark.ci
def test_marks_and_plans_that_outlive_their_module_end_in_silence():
    code = "import torch; from ampcompile.kernels.planned import Marks, PlannedTensors; p = torch.zeros(2)"
    code += "; p.grad = torch.zeros(2); torch.kept = Marks([p.grad]), PlannedTensors([{'params': [p]}])"
    ended = subprocess.run([sys.executable, "-P", "-W", "ignore", "-c", code], capture_output=True, text=True)
    assert ended.returncode == 0 and not ended.stderr
