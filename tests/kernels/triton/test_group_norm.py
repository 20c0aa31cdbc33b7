"""The Triton kernels of group norm: their numbers in Triton's interpreter, their machine code."""

from pathlib import Path

import pytest

pytest.importorskip("triton")
from tests.kernels.triton.test_step import python

HERE = Path(__file__).parent


def test_numbers_in_the_interpreter():
    python("-m", "pytest", "-p", "no:cacheprovider", str(HERE / "interpreted_group_norm.py"), TRITON_INTERPRET="1")


@pytest.mark.parametrize("capability", ["80", "90", "100"])
def test_machine_code(capability):
    python("-m", "tests.kernels.triton.compiled_group_norm", capability, TRITON_INTERPRET="0")
