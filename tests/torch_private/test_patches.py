"""The table of patches is complete, comes and goes as a whole, and is the one that the documentation shows."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ampcompile.torch_private import patches
from ampcompile.torch_private.patches import TABLE, Group

PAGE = Path(__file__).parents[2] / "docs" / "weights.md"


class Base:
    def act(self) -> list[str]:
        return ["act"]


class Thing(Base):
    """What stands for torch."""

    def rest(self) -> list[str]:
        return ["rest"]


PLACES = {f"{__name__}.Thing.{name}": "made up" for name in ("act", "rest")}
WRAPS = {f"Thing.{name}": lambda original: lambda self: ["ours", *original(self)] for name in ("act", "rest")}


@pytest.fixture
def group() -> Iterator[Group]:
    made_up = Group("made up", "a test runs", "when it ends", PLACES)
    yield made_up
    patches.uninstall(made_up)
    assert Thing().act() == ["act"] and "act" not in vars(Thing) and Thing().rest() == ["rest"]


def test_a_group_is_installed_once_and_undone_as_a_whole(group: Group) -> None:
    for _ in range(2):
        patches.install(group, WRAPS)
        assert Thing().act() == ["ours", "act"] and Thing().rest() == ["ours", "rest"]
    assert patches.is_installed(group)
    assert (Thing.act.__module__, Thing.act.__qualname__) == (__name__, "Thing.act")
    patches.uninstall(group)
    assert not patches.is_installed(group)
    assert Thing().act() == ["act"] and "act" not in vars(Thing) and Thing().rest() == ["rest"]
    patches.install(group, WRAPS)
    assert Thing().rest() == ["ours", "rest"]


@pytest.mark.parametrize("absent", ["Thing.sleep", "Nothing.act"])
def test_where_a_place_is_missing_nothing_is_replaced(absent: str) -> None:
    lacking = Group("made up", "never", "never", PLACES | {f"{__name__}.{absent}": "made up"})
    with pytest.raises((AttributeError, ImportError)):
        patches.install(lacking, WRAPS | {absent: WRAPS["Thing.act"]})
    assert Thing().act() == ["act"] and Thing().rest() == ["rest"]


def test_what_a_failure_left_is_undone_first(group: Group) -> None:
    def fail(_: Any) -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        patches.install(group, WRAPS | {"Thing.rest": fail})
    patches.install(group, WRAPS)
    assert Thing().act() == ["ours", "act"] and Thing().rest() == ["ours", "rest"]


def test_the_installed_torch_has_every_place(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not patches.missing()
    gone = ["torch.Tensor.no_such_method", "torch.no_such_module.act"]
    monkeypatch.setattr(patches, "TABLE", (group, Group("gone", "", "", dict.fromkeys(gone, ""))))
    assert patches.missing() == gone


SCALER = """
import sys, torch, ampcompile
ampcompile.GradScaler
assert "torch._dynamo" not in sys.modules, "touching it loads Dynamo"
p = torch.nn.Parameter(torch.ones(3))
s, o = ampcompile.GradScaler("cpu"), torch.optim.SGD([p], lr=0.1)
s.scale(p.sum()).backward()
s.clip_grad_norm_(o, 1.0)
s.step(o)
s.update()
from ampcompile.torch_private import patches
from torch.optim import optimizer
print(sorted(group.name for group in patches._installed))
print(len(optimizer._global_optimizer_pre_hooks), len(optimizer._global_optimizer_post_hooks))
"""


@pytest.mark.ci
def test_a_scaler_patches_nothing() -> None:
    run = subprocess.run([sys.executable, "-P", "-c", SCALER], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines() == ["[]", "0 0"]


def page() -> str:
    """docs/weights.md, which ends with the table."""
    text, heading, _ = PAGE.read_text().partition("\n| patch of torch | why |\n")
    rows = [heading.strip(), "|---|---|"]
    for group in TABLE:
        rows.append(f"| **{group.name}** | made {group.when}, undone {group.undone} |")
        for reason in dict.fromkeys(group.patches.values()):
            places = (f"`{place}`" for place, why in group.patches.items() if why == reason)
            rows.append(f"| {', '.join(places)} | {reason} |")
    return "\n".join([text, *rows, ""])


def test_the_documentation_shows_the_table() -> None:
    assert PAGE.read_text() == page(), f"write what `{__name__}.page()` returns to {PAGE}"
