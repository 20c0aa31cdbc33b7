"""Tables of addresses: written when they change, a new one for each captured graph; every element in one chunk."""

import itertools
import random

import numpy as np
import pytest
import torch

from ampcompile.errors import OptimizerError
from ampcompile.kernels import tables
from ampcompile.kernels.native import group_values
from ampcompile.kernels.sgd import SgdGroup, SgdTensors
from ampcompile.kernels.step import table_of
from ampcompile.kernels.tables import (
    CHUNK,
    CHUNK_TABLES,
    SPARE_HOST_BUFFERS,
    DeviceTable,
    chunks,
    kept_in,
    step_words,
)

CPU = torch.device("cpu")


def words(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def test_words_follow_in_place_and_are_copied_only_when_they_change():
    table = DeviceTable()
    first = table.upload(words(1, 2), CPU)
    version = first._version
    assert table.upload(words(1, 2), CPU) is first and first._version == version
    assert table.upload(words(1, 3), CPU) is first and first.tolist() == [1, 3]
    assert table.upload(words(1, 2, 3), CPU).tolist() == [1, 2, 3]


def test_the_learning_rates_on_the_device_are_those_of_this_step():
    """A rate is a number, which is a word, or a tensor, which overwrites its word on the device."""
    params = [torch.zeros(3), torch.zeros(2)]
    states = {name: [None, None] for name in ("copies", "kept", "checksums", "momentum_buffers")}
    rates = [0.0, 0.5, torch.tensor(0.5), torch.tensor(0.25)]
    workspace, before = {}, None
    for pair in random.sample(list(itertools.product(rates, rates)), 16) * 2:
        groups = [SgdGroup(rate, 0.9, 0.0, False, 0.0, False) for rate in pair]
        table = table_of(SgdTensors(groups, params=params, grads=params, group_of=[0, 1], **states))
        found = step_words(table, group_values(groups), pair, workspace)[-12:].view(torch.float64).view(2, 6)
        assert found[:, 0].tolist() == list(map(float, pair)), f"after {before}: {pair}"
        before = pair


def test_the_words_of_the_caller_may_change_afterwards():
    table, mine = DeviceTable(), words(1, 2)
    table.upload(mine.copy(), CPU)
    mine[0] = 9
    assert table.upload(mine, CPU).tolist() == [9, 2]


@pytest.fixture
def capturing(monkeypatch):
    """Says from then on whether launches go into a CUDA graph."""
    return lambda captures: monkeypatch.setattr(tables, "capturing", lambda device: captures)


def test_each_captured_graph_has_a_table_of_its_own(capturing):
    table, kept = DeviceTable(), []
    eager = table.upload(words(1, 2), CPU)
    captured = []
    with kept_in(kept):
        for value in (3, 4):
            capturing(True)
            captured.append(table.upload(words(value, value), CPU))
            capturing(False)
            table.upload(words(5, value), CPU)
    assert [t.tolist() for t in (eager, *captured)] == [[5, 4], [3, 3], [4, 4]]
    assert [t.tolist() for t in kept] == [[3, 3], [4, 4]], "what replays copy from"


def test_one_graph_may_hold_several_steps_of_an_optimizer(capturing):
    table = DeviceTable()
    for count in (1, SPARE_HOST_BUFFERS):  # the next eager step makes up for what a capture took
        capturing(False)
        table.upload(words(1, 2), CPU)
        capturing(True)
        with kept_in(kept := []):
            captured = [table.upload(words(i, i), CPU) for i in range(count)]
        assert [t.tolist() for t in captured] == [t.tolist() for t in kept] == [[i, i] for i in range(count)]
    capturing(False)
    table.upload(words(1, 2), CPU)
    capturing(True)
    with pytest.raises(OptimizerError, match="at most 4 steps of an optimizer in one capture"):
        for i in range(SPARE_HOST_BUFFERS + 1):
            table.upload(words(1, i), CPU)


def test_a_capture_without_a_step_before_it_is_refused(capturing):
    capturing(True)
    with pytest.raises(OptimizerError, match=r"found a CUDA graph capture, expected a step .* just before it, and"):
        DeviceTable().upload(words(1), CPU)
    with pytest.raises(OptimizerError, match=r"found parameters of new sizes in a CUDA graph capture"):
        chunks(words(5), words(0), CPU, {})


@pytest.mark.parametrize("sizes", [(0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 3), (2**33 + 5, 7), (0,), (CHUNK,)])
def test_chunks_cover_every_element_once_whole_ones_first(sizes):
    numels, chosen = words(*sizes), np.arange(len(sizes))
    pairs = chunks(numels, chosen, CPU, {}).long().numpy()
    begin = pairs[:, 1] * CHUNK
    covered = np.minimum(numels[pairs[:, 0]] - begin, CHUNK)
    assert (covered > 0).all() and covered.sum() == numels.sum()
    assert len(np.unique(pairs, axis=0)) == len(pairs)
    assert (np.diff((covered == CHUNK).astype(int)) <= 0).all()


def test_chunk_tables_of_the_sets_of_gradients_seen_last_are_kept_and_captured_ones_for_good(capturing):
    workspace, numels = {}, words(*range(1, 40))
    first, captured = (chunks(numels, words(i), CPU, workspace) for i in range(2))
    with kept_in(kept := []):
        capturing(True)
        assert chunks(numels, words(1), CPU, workspace) is captured
        capturing(False)
    for i in range(2, 39):
        assert chunks(numels, words(0), CPU, workspace) is first, "used all along"
        chunks(numels, words(i), CPU, workspace)
        assert len(workspace["chunks"]) <= CHUNK_TABLES
    assert chunks(numels, words(1), CPU, workspace) is not captured
    assert any(each is captured for each in kept)
