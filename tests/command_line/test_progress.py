"""Steps are lines where nobody watches, and a status on a terminal."""

import io

from rich.console import Console

from ampcompile.command_line.progress import saying


def said(**about: bool) -> str:
    console = Console(file=io.StringIO(), **about)
    with saying(console, "auditing") as say:
        say("searching: [3] modules")
    return console.file.getvalue()


def test_each_step_is_a_line_when_piped() -> None:
    assert said() == "auditing\nsearching: [3] modules\n"


def test_a_terminal_gets_a_status_and_a_quiet_console_nothing() -> None:
    assert "searching: [3] modules" in said(force_terminal=True) and "\x1b[" in said(force_terminal=True)
    assert said(quiet=True) == ""
