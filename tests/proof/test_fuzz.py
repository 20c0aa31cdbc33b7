"""Random programs are drawn by seeds, what is wrong with one is told, and it is made shorter."""

from typing import Any

import pytest
import torch

from ampcompile.weights.binding import Binding
from proof.fuzz import __main__ as command
from proof.fuzz import training
from proof.fuzz.sweep import KINDS, PART, PROGRAMS, shared_code
from proof.fuzz.trained import Side


def test_groups_are_blocks_of_seeds_and_all_are_more() -> None:
    few, everything = PART.groups(False), PART.groups(True)
    assert set(few) < set(everything) and {group.rpartition(", ")[0] for group in everything} == set(KINDS)


@pytest.mark.parametrize("kind", ["modules", "training"])
def test_a_seed_gives_the_same_program_always(kind: str) -> None:
    how: Any = KINDS[kind]
    assert how.program(5) == how.program(5) != how.program(6)


def test_training_holds() -> None:
    with shared_code():
        assert [KINDS["training"].judge(training.training(seed))[1] for seed in range(2)] == [[]] * 2


@pytest.mark.parametrize("statement", [*training._CALLS, *training._WRITERS, *training._OTHERS])
def test_every_statement_runs(statement: str) -> None:
    """One that raises tests nothing, but those that are to raise the user's error."""
    side = Side(0, True, "AdamW", torch.bfloat16, lower="eager")
    side.do("s.aliases += [m.first.weight.data]", 0)
    gave = side.do(statement, 1)
    assert [word for word in gave if isinstance(word, str)] == ["the user's error"] * statement.startswith("s.raises")


WRITES = training.Training(
    0, ("s.train_step(4)", "s.evaluate(4, torch.no_grad)", "m.second.weight.data[1, 3] += 1",
        "s.evaluate(4, torch.no_grad)"), False, "SGD",
)  # fmt: skip


def test_a_stale_copy_is_told_by_the_statement_that_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Binding, "copies", stale(Binding.copies))
    outcome, ((word, text),) = KINDS["training"].judge(WRITES)
    assert (outcome, word) == ("fails", "stale") and "evaluate" in text


def stale(copies: Any) -> Any:
    """The copies of the first call, at every call."""
    kept: dict[Any, Any] = {}

    def first(binding: Any, weights: Any) -> Any:
        key = id(binding), len(weights)
        if key not in kept:
            kept[key] = [copy.clone() for copy in copies(binding, weights)]
        return kept[key]

    return first


class Odd:
    """Programs fail that hold a 7."""

    def judge(self, of: training.Training) -> tuple[str, list[tuple[str, str]]]:
        if "no program" in of.lines[:1]:
            raise SyntaxError
        return ("fails", [("odd", "7")]) if "7" in of.lines else ("holds", [])


def test_a_program_is_made_shorter_while_it_fails() -> None:
    of = training.Training(0, ("1", "no program", "7", "2", "3"), False, "SGD")
    assert command.shorter(Odd(), of).lines == ("7",)


def test_the_command_repeats_a_program(capsys: pytest.CaptureFixture) -> None:
    assert command.main(["modules", "1"]) == 0 and PROGRAMS > 1
    assert "def forward" in (said := capsys.readouterr().out) and "holds" in said
    with pytest.raises(SystemExit, match="kinds: modules"):
        command.main(["nothing", "1"])
