"""The page of a comparison in a real browser: what it shows, and what clicks, searches, filters and keys do."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

import ampcompile
from ampcompile.insight.compare import Comparison
from ampcompile.insight.recording import Recording
from tests.browser import MISSING, opened
from tests.insight.test_compare import Net, record

if TYPE_CHECKING:
    from playwright.sync_api import Page

in_a_browser = pytest.mark.skipif(bool(MISSING), reason=MISSING)
EVIL = "</script><script>document.title = 'broken'</script><!-- <img src=x> /*compare.js*/ "
ROWS = "#rows tbody tr"


@pytest.fixture(scope="module")
def runs() -> tuple[Recording, Recording]:
    """The second run has another epsilon in `second.norm`, and casts of its own."""
    x = torch.randn(8, 16)
    return record(Net(), x, eager=True), record(Net(eps=1e-4), x)


@pytest.fixture(scope="module")
def comparison(runs: tuple[Recording, Recording], tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    files = [tmp_path_factory.mktemp("runs") / name for name in ("eager.json", "compiled.json")]
    for run, file in zip(runs, files, strict=True):
        run.save(file)
    return ampcompile.compare(*files)


@pytest.fixture(scope="module")
def saved(comparison: Comparison, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "compared.html"
    comparison.save(path)
    return path


@pytest.fixture
def page(saved: Path) -> Iterator["Page"]:
    with opened(saved) as page:
        yield page


@in_a_browser
def test_every_op_is_a_row_and_the_panel_says_what_was_compared(page: "Page", comparison: Comparison) -> None:
    assert page.locator(ROWS).count() == len(comparison.rows)
    assert page.inner_text("#count") == f"{len(comparison.rows)} of {len(comparison.rows)} ops"
    text = page.inner_text("#details")
    assert all(line in text for line in comparison.headlines)
    assert "eager.json" in text and "compiled.json" in text and "eager autocast" in text
    assert torch.__version__ in text and "Net" in text and "recorded" in text and "legend" in text


@in_a_browser
def test_the_first_difference_is_marked_and_linked(page: "Page", comparison: Comparison) -> None:
    assert comparison.first is not None
    page.click("#first")
    assert page.get_attribute("tr.first", "id") == f"op{comparison.first.row}" == page.get_attribute(":focus", "id")
    assert page.locator("tr.first").is_visible() and "first difference" in page.inner_text("tr.first")
    assert page.inner_text("#details h2") == "native_layer_norm"
    assert comparison.first.why in page.inner_text("#details")
    assert page.evaluate("location.hash") == f"#op{comparison.first.row}"
    row = comparison.rows[comparison.first.row]
    assert row.a is not None and row.b is not None and row.limits is not None
    texts = [
        "f32",
        *(f"{each.fingerprint[0]:.4g}" for each in (row.a, row.b)),
        f"{row.apart:.1e} > {row.limits[0]:.1e}",
    ]
    assert all(text in page.inner_text("tr.first") for text in texts)


@in_a_browser
def test_an_address_opens_its_row(saved: Path) -> None:
    with opened(saved) as page:
        page.evaluate("location.hash = '#op7'")
        page.evaluate("chooseLinked()")  # what a page does when it opens
        assert page.get_attribute("tr.chosen", "id") == "op7"


@in_a_browser
def test_searching_and_filtering(page: "Page", comparison: Comparison) -> None:
    page.focus("#which")
    page.keyboard.press("ArrowDown")
    differing = sum(bool(row.why) for row in comparison.rows)
    assert page.locator(ROWS).count() == differing and page.inner_text("#count").startswith(f"{differing} of ")
    page.focus("#which")
    page.keyboard.press("ArrowDown")
    assert page.locator(ROWS).count() == comparison.only_a + comparison.only_b > 0
    page.select_option("#which", "all")
    page.fill("#search", "second.norm native_layer_norm backward")
    assert page.locator(ROWS).count() == 1
    page.fill("#search", "no such op")
    assert page.inner_text("#empty") == "No op matches the search and the filter."
    page.click("#first")
    assert page.locator(ROWS).count() == len(comparison.rows), "a link shows what a search hides"


@in_a_browser
def test_keys_walk_the_rows(page: "Page", comparison: Comparison) -> None:
    page.focus(f"{ROWS}[tabindex='0']")
    page.keyboard.press("Enter")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    assert page.get_attribute(":focus", "id") == page.get_attribute("[aria-selected=true]", "id") == "op2"
    page.keyboard.press("End")
    assert page.get_attribute(":focus", "id") == f"op{len(comparison.rows) - 1}"
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Home")
    assert page.get_attribute(":focus", "id") == "op0" and page.locator(f"{ROWS}[tabindex='0']").count() == 1
    page.keyboard.press("Escape")
    assert page.locator(".chosen").count() == 0 and "legend" in page.inner_text("#details")


@in_a_browser
@pytest.mark.parametrize("dark", [False, True])
def test_in_a_narrow_window_nothing_is_cut_off(saved: Path, dark: bool) -> None:
    with opened(saved, width=420, height=900, dark=dark) as page:
        for part in ("html", "#graph", "#details"):
            assert page.evaluate(
                f"(({{ scrollWidth: a, clientWidth: b }}) => a <= b)(document.querySelector('{part}'))"
            )
        page.click("#first")
        box = page.locator("#details h2").bounding_box()
        assert box["y"] + box["height"] < 900 and page.locator("tr.first").bounding_box()["y"] < 540
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == (
            "rgb(18, 22, 27)" if dark else "rgb(255, 255, 255)"
        )


def test_it_holds_no_address_and_forbids_loading(saved: Path) -> None:
    text = saved.read_text(encoding="utf-8")
    assert "default-src 'none'" in text
    assert not re.search(r"https?://|\ssrc=|@import|url\(", text)


@in_a_browser
def test_what_a_file_says_is_shown_not_run_and_no_file_that_it_names_is_read(
    runs: tuple[Recording, Recording], tmp_path: Path
) -> None:
    (tmp_path / "secret.py").write_text("a secret")
    evil = []
    for run in runs:
        steps = [
            replace(
                step,
                op=f"{step.op}{EVIL}",
                module=EVIL,
                source=f"{tmp_path}/secret.py:1",
                fingerprint=(float("nan"), *step.fingerprint[1:]),
                numbers=replace(step.numbers, local=float("inf")),
            )
            for step in run.steps
        ]
        evil.append(Recording({name: EVIL for name in (*run.about, EVIL)}, steps, run.results))
    ampcompile.compare(*evil).save(tmp_path / "compared.html")
    assert "a secret" not in (tmp_path / "compared.html").read_text(encoding="utf-8")
    with opened(tmp_path / "compared.html") as page:
        assert EVIL.strip() in page.inner_text("#details")
        page.click(f"{ROWS}:first-child")
        assert EVIL.strip() in page.inner_text("#details") and EVIL.strip() in page.inner_text(ROWS)
        assert page.title() == "Two runs compared" and page.locator("img").count() == 0


@in_a_browser
def test_runs_that_agree_have_no_first_difference(runs: tuple[Recording, Recording], tmp_path: Path) -> None:
    ampcompile.compare(runs[0], runs[0]).save(tmp_path / "compared.html")
    with opened(tmp_path / "compared.html") as page:
        assert page.is_hidden("#first") and page.locator("tr.differs").count() == 0
        assert page.inner_text("#details h2") == "The runs agree but for rounding"


def test_a_notebook_shows_it_in_a_frame(comparison: Comparison) -> None:
    assert comparison._repr_html_().startswith("<iframe srcdoc=") and len(repr(comparison)) < 2000
