"""The page of a report in a real browser: what it shows, and what clicks, searches and filters do."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

import ampcompile
from ampcompile.insight.report import Report
from benchmarks.models import GPT, GPTConfig
from tests.browser import MISSING, opened
from tests.models import Net

if TYPE_CHECKING:
    from playwright.sync_api import Page

in_a_browser = pytest.mark.skipif(bool(MISSING), reason=MISSING)
ROWS = "[...document.querySelectorAll('.row')]"
SHOWN = f"{ROWS}.filter((row) => row.dataset.op).map((row) => row.dataset.op)"
EVIL = "</script><script>document.title = 'broken'</script><!-- /*page.js*/ "


@pytest.fixture(scope="module")
def gpt() -> Report:
    """Twelve layers."""
    model = GPT(GPTConfig(layers=12, width=16, heads=2, vocab=32, context=8))
    tokens = torch.randint(32, (2, 8))
    return ampcompile.explain(model, lower="eager")(tokens, tokens)


@pytest.fixture(scope="module")
def saved(gpt: Report, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "amp.html"
    gpt.save(path)
    return path


@pytest.fixture
def page(saved: Path) -> Iterator["Page"]:
    with opened(saved) as page:
        yield page


def counted(page: "Page") -> str:
    return page.inner_text("#count")


@in_a_browser
def test_it_opens_as_few_rows_and_everything_is_in_it(page: "Page", gpt: Report) -> None:
    assert counted(page) == f"{len(gpt.ops)} of {len(gpt.ops)} ops"
    assert page.evaluate(f"{ROWS}.length") < 15, "modules are folded"
    page.click("#open")
    assert len(page.evaluate(SHOWN)) == len(gpt.ops) + 1
    tags = "[...document.querySelectorAll('#rows .tag')]"
    assert sorted(map(int, page.evaluate(f"{tags}.map((tag) => tag.dataset.cast)"))) == list(range(len(gpt.casts)))
    assert page.evaluate(f"{tags}.filter((tag) => tag.matches('.idle')).length") == sum(
        "hoisted" in cast.fate for cast in gpt.casts
    )
    page.click("#sort")
    sizes = page.evaluate(f"{SHOWN}.map((name) => ops.find((op) => op.name === name)).map((op) => size(op.casts))")
    assert len(sizes) == len(gpt.ops) + 1 and sizes == sorted(sizes, reverse=True) and sizes[0] > 0
    page.click("#sort")
    page.click("#close")
    assert len(page.evaluate(SHOWN)) < 15
    text = page.inner_text("#details")
    assert gpt.about in text and "GPT" in gpt.about and torch.__version__ in gpt.about and "amp removes" in text
    assert "kept for backward: " in text and "blocks.*.mlp_in x 24" in text


@in_a_browser
def test_a_click_tells_the_reason_and_the_line_or_the_casts_of_an_edge(page: "Page", gpt: Report) -> None:
    op = next(op for op in gpt.ops if op.module == "blocks.0.qkv")
    page.click("#open")
    page.click(".row[data-op='linear'] .name")
    assert "#op" in page.evaluate("location.href")
    page.keyboard.press("Escape")
    page.evaluate("chooseLinked()")  # what a page does when it opens
    details = page.inner_text("#details")
    assert op.because in details and op.source in details and op.module in details
    assert "self.qkv(self.attention_norm(x))" in details, "the line itself"
    cast = next(cast for cast in gpt.casts if cast.module == "blocks.0.mlp_out" and cast.shape == (16, 64))
    page.click(f"[data-cast='{gpt.casts.index(cast)}']")
    details = page.inner_text("#details")
    assert "cast of weight" in details and "inserted, hoisted" in details and "6.0 KiB" in details
    assert cast.because in details and cast.source in details
    page.keyboard.press("Escape")
    stages = page.locator("#details td:first-child").all_inner_texts()
    assert stages == ["eager autocast, forward", "amp, every call", "amp, once per update"]
    page.click("#close")
    page.click(".mark:not(.idle)")
    details = page.inner_text("#details")
    assert "cast of" in details or "casts on one edge" in details
    assert page.evaluate("document.querySelectorAll('.mark.chosen').length") >= 1


@in_a_browser
def test_blocks_fold_and_links_unfold_what_they_lead_to(page: "Page") -> None:
    before = len(page.evaluate(SHOWN))
    for module, shown in (("blocks", 0), ("blocks.0", 17), ("blocks.7", 34), ("blocks.0", 17)):
        page.click(f"[data-module='{module}']")
        assert len(page.evaluate(SHOWN)) == before + shown
    page.click("#close")
    page.keyboard.press("Escape")
    page.click(".line.link")  # the largest cast that runs
    assert page.evaluate("document.querySelector('.row.near .tag.chosen').textContent").startswith("activation")
    page.click(".row.near")
    page.keyboard.press("ArrowUp")
    assert page.evaluate("document.querySelector('.row.chosen + .row.near') !== null")


@in_a_browser
def test_searching_and_filtering(page: "Page", gpt: Report) -> None:
    page.fill("#search", "blocks.3 linear weight")
    assert page.evaluate(SHOWN) == ["linear_12", "linear_13", "linear_14", "linear_15"]
    assert counted(page).startswith("4 of ")
    page.fill("#search", "no such op")
    assert page.inner_text("#empty") == "No op matches the search and the filters."
    page.fill("#search", "")
    low = [op for op in gpt.ops if op.dtype == torch.bfloat16]
    assert counted(page).startswith(f"{len(gpt.ops)} of ")
    for pressed in (True, False):
        page.click("#dtypes button:first-child")
        assert counted(page).startswith(f"{len(low) if pressed else len(gpt.ops)} of "), "that type, then all again"
        chips = page.locator("#dtypes button")
        assert [chip.get_attribute("aria-pressed") for chip in chips.all()] == [
            str(pressed).lower(),
            *["false"] * (chips.count() - 1),
        ]
    page.click("#dtypes button:first-child")
    page.click("#dtypes button:nth-child(2)")
    assert counted(page).startswith(f"{sum(op.dtype == torch.float32 for op in gpt.ops)} of ")
    page.click("#dtypes button:nth-child(2)")
    page.focus("#casts")
    page.keyboard.press("ArrowDown")
    cast = {(cast.op, cast.module) for cast in gpt.casts}
    assert counted(page).startswith(f"{len(cast)} of ")
    page.keyboard.press("ArrowDown")
    running = {(cast.op, cast.module) for cast in gpt.casts if cast.fate == ("inserted",)}
    assert counted(page).startswith(f"{len(running)} of ")


@in_a_browser
def test_a_search_lists_the_casts_of_backward_that_it_is_for(tmp_path: Path) -> None:
    def in_two_lines(m: nn.Module, x: torch.Tensor) -> torch.Tensor:  # a search looks at a cast's line of code too
        x = m.first(x)
        return m.last(x)

    model = Net(in_two_lines, first=nn.Linear(4, 4), last=nn.Linear(4, 4))
    ampcompile.explain(model)(torch.randn(2, 4)).save(tmp_path / "amp.html")
    with opened(tmp_path / "amp.html") as page:
        page.click("#open")
        page.click("[data-op=linear]")
        page.fill("#search", "backward mm first /test_page.py")
        details = page.inner_text("#details")
        assert "that match: 1" in details and "first test_page.py:" in details
        page.fill("#search", "no such op")
        assert "amp removes" in page.inner_text("#details")
        page.fill("#search", "")
        assert "in all: 4" in page.inner_text("#details")


@in_a_browser
def test_it_is_a_tree_that_keys_walk(page: "Page") -> None:
    assert page.get_attribute("#rows", "role") == "tree"
    page.click("#close")
    page.keyboard.press("Escape")
    page.focus(".row[tabindex='0']")
    page.keyboard.press("Home")
    walked = "document.activeElement.innerText"
    first = page.evaluate(walked)
    while page.get_attribute(":focus", "aria-expanded") is None:
        page.keyboard.press("ArrowDown")
    assert page.evaluate(walked) != first and page.get_attribute(":focus", "aria-expanded") == "false"
    level, before = int(page.get_attribute(":focus", "aria-level") or 0), page.evaluate(f"{ROWS}.length")
    page.keyboard.press("ArrowRight")
    assert page.get_attribute(":focus", "aria-expanded") == "true" and page.evaluate(f"{ROWS}.length") > before
    page.keyboard.press("ArrowDown")
    assert page.get_attribute(":focus", "aria-level") == str(level + 1)
    page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowLeft")
    assert page.get_attribute(":focus", "aria-expanded") == "false" and page.evaluate(f"{ROWS}.length") == before


@in_a_browser
def test_in_a_narrow_window_names_and_what_was_clicked_stay_in_sight(saved: Path) -> None:
    with opened(saved, width=420, height=900) as page:
        page.click("#open")
        cut = f"{ROWS}.map((row) => row.querySelector('.name')).filter((name) => name.scrollWidth > name.clientWidth)"
        assert page.evaluate(f"{cut}.map((name) => name.innerText)") == []
        page.click("[data-op=linear]")
        box = page.locator("#details h2").bounding_box()
        assert page.inner_text("#details h2") == "linear" and box["y"] + box["height"] < 900
        page.set_viewport_size({"width": 1400, "height": 900})
        assert page.locator(".row").first.bounding_box()["x"] == 132
        page.wait_for_function("document.querySelector('.edge').getBBox().x > 64")  # curves move with the rows


def test_it_holds_no_address_and_forbids_loading(saved: Path) -> None:
    text = saved.read_text(encoding="utf-8")
    assert "default-src 'none'" in text
    assert not re.search(r"https?://|\ssrc=|@import|url\(", text)


@in_a_browser
def test_what_the_program_says_is_shown_not_run(tmp_path: Path) -> None:
    (graph,) = ampcompile.explain(nn.Linear(4, 4))(torch.randn(2, 4)).graphs
    values = tuple(replace(v, because=EVIL, module=f"a{EVIL.replace('.', '_')}", source="") for v in graph.values)
    Report([replace(graph, values=values, precision=EVIL, reason=EVIL), graph]).save(tmp_path / "amp.html")
    with opened(tmp_path / "amp.html") as page:
        page.click("#open")
        page.click("[data-op=linear]")
        assert EVIL.strip() in page.inner_text("#details")
        assert page.title() == "Casts and precisions"
        texts = page.evaluate(f"{ROWS}.map((row) => row.innerText)")
        assert any("graph break" in text for text in texts) and any("graph 1" in text for text in texts)


@in_a_browser
def test_reports_in_one_notebook_have_its_colours_and_leave_each_other_alone(gpt: Report, tmp_path: Path) -> None:
    frames = f"<div>{gpt._repr_html_()}</div>" * 2
    (tmp_path / "notebook.html").write_text(f'<body style="background: rgb(17, 17, 17)">{frames}', encoding="utf-8")
    with opened(tmp_path / "notebook.html") as page:  # the system's colours aren't the notebook's
        first, second = page.frames[1:]
        first.click("#open")
        first.click("[data-op=linear] .name")
        assert first.inner_text("#details h2") == "linear" != second.inner_text("#details h2")
        for frame in (first, second):
            shown = frame.evaluate("getComputedStyle(document.body).backgroundColor")
            assert shown == "rgb(18, 22, 27)"


@pytest.mark.ci
@in_a_browser
def test_two_thousand_ops_open_folded_and_are_quick(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Sequential(*(nn.Linear(2, 2) for _ in range(10))) for _ in range(20)))
    (graph,) = ampcompile.explain(model, lower="eager")(torch.randn(1, 2)).graphs
    Report([graph] * 10).save(tmp_path / "amp.html")
    with opened(tmp_path / "amp.html") as page:
        assert counted(page).endswith(" of 2000 ops")
        assert page.evaluate(f"{ROWS}.length") < 60
        page.click("#open")
        assert len(page.evaluate(SHOWN)) == 2010
        drawing = "(() => { const start = performance.now(); draw(); return performance.now() - start; })()"
        assert min(page.evaluate(drawing) for _ in range(5)) < 1000
