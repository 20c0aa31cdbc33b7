"""The page in a real browser: what it shows, and what clicks, searches and filters do."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import ampcompile
from ampcompile.explaining.report import Report
from benchmarks.models import GPT, GPTConfig
from tests import browser
from tests.browser import Browser

in_a_browser = pytest.mark.skipif(browser.PATH is None, reason=browser.MISSING)
ROWS = "[...document.querySelectorAll('.row')]"
SHOWN = f"{ROWS}.filter((row) => row.dataset.op).map((row) => row.dataset.op)"
DETAILS = "document.getElementById('details').innerText"
EVIL = "</script><script>document.title = 'broken'</script><!-- /*page.js*/ "


@pytest.fixture(scope="module")
def gpt() -> Report:
    """Twelve layers."""
    model = GPT(GPTConfig(layers=12, width=16, heads=2, vocab=32, context=8))
    tokens = torch.randint(32, (2, 8))
    return ampcompile.explain(model)(tokens, tokens)


@pytest.fixture
def page(gpt: Report, tmp_path: Path) -> Iterator[Browser]:
    yield from opened(gpt, tmp_path)


def opened(report: Report, folder: Path) -> Iterator[Browser]:
    report.save(folder / "amp.html")
    with browser.browser(folder / "profile") as page:
        page.open(folder / "amp.html")
        yield page
        assert not page.complaints, "nothing is loaded, nothing fails"


def counted(page: Browser) -> str:
    return page.evaluate("document.getElementById('count').textContent")


@in_a_browser
def test_it_opens_as_few_rows_and_everything_is_in_it(page: Browser, gpt: Report) -> None:
    assert counted(page) == f"{len(gpt.ops) + 1} of {len(gpt.ops) + 1} ops"  # and what is returned
    assert page.evaluate(f"{ROWS}.length") < 60
    page.click("#open")
    assert len(page.evaluate(SHOWN)) == len(gpt.ops) + 1
    tags = "[...document.querySelectorAll('.tag')]"
    assert sorted(map(int, page.evaluate(f"{tags}.map((tag) => tag.dataset.cast)"))) == list(range(len(gpt.casts)))
    assert page.evaluate(f"{tags}.filter((tag) => tag.matches('.idle')).length") == sum(
        "hoisted" in cast.fate for cast in gpt.casts
    )
    page.click("#close")
    assert len(page.evaluate(SHOWN)) < 15


@in_a_browser
def test_a_click_tells_the_reason_and_the_line(page: Browser, gpt: Report) -> None:
    op = next(op for op in gpt.ops if op.module == "blocks.0.qkv")
    page.click("[data-op=linear]")
    details = page.evaluate(DETAILS)
    assert op.because in details and op.source in details and op.module in details
    assert "self.qkv(self.attention_norm(x))" in details, "the line itself"
    cast = next(cast for cast in gpt.casts if cast.module == "blocks.0.mlp_out" and cast.shape == (16, 64))
    page.click(f"[data-cast='{gpt.casts.index(cast)}']")
    details = page.evaluate(DETAILS)
    assert "cast of weight" in details and "inserted, hoisted" in details and "6.0 KiB" in details
    assert cast.because in details and cast.source in details
    page.press("Escape")
    assert "insert_casts" in page.evaluate(DETAILS), "the totals"


@in_a_browser
def test_a_click_on_the_mark_of_an_edge_tells_of_its_casts(page: Browser, gpt: Report) -> None:
    page.click("#close")
    page.click(".mark:not(.idle)")
    details = page.evaluate(DETAILS)
    assert "cast of" in details or "casts on one edge" in details
    assert page.evaluate("document.querySelectorAll('.mark.chosen').length") >= 1


@in_a_browser
def test_blocks_fold_and_links_unfold_what_they_lead_to(page: Browser) -> None:
    before = len(page.evaluate(SHOWN))
    page.click("[data-module='blocks.0']")
    assert len(page.evaluate(SHOWN)) == before - 17
    page.click("[data-module='blocks.7']")
    assert len(page.evaluate(SHOWN)) == before
    page.click("#close")
    page.press("Escape")
    page.click(".line.link")  # the largest cast that runs
    assert page.evaluate("document.querySelector('.row.near .tag.chosen').textContent").startswith("activation")
    page.click(".row.near")
    page.press("ArrowUp")
    assert page.evaluate("document.querySelector('.row.chosen + .row.near') !== null")


@in_a_browser
def test_searching_and_filtering(page: Browser, gpt: Report) -> None:
    page.click("#search")
    page.type("blocks.3 linear weight")
    assert page.evaluate(SHOWN) == ["linear_12", "linear_13", "linear_14", "linear_15"]
    assert counted(page).startswith("4 of ")
    for _ in "blocks.3 linear weight":
        page.press("Backspace")
    low = [op for op in gpt.ops if op.dtype == torch.bfloat16]
    assert counted(page).startswith(f"{len(gpt.ops) + 1} of ")
    page.click("#dtypes button:first-child")
    assert counted(page).startswith(f"{len(gpt.ops) + 1 - len(low)} of ")
    page.click("#dtypes button:first-child")
    page.evaluate("document.getElementById('casts').focus()")
    page.press("ArrowDown")
    cast = {(cast.op, cast.module) for cast in gpt.casts}
    assert counted(page).startswith(f"{len(cast)} of ")
    page.press("ArrowDown")
    running = {(cast.op, cast.module) for cast in gpt.casts if cast.fate == ("inserted",)}
    assert counted(page).startswith(f"{len(running)} of ")


@in_a_browser
@pytest.mark.parametrize("dark", [False, True])
def test_text_stands_out(gpt: Report, tmp_path: Path, dark: bool) -> None:
    gpt.save(tmp_path / "amp.html")
    with browser.browser(tmp_path / "profile") as page:
        page.open(tmp_path / "amp.html", dark=dark)
        for selector in ("body", ".dim", ".chip", ".tag:not(.idle)", "aside th"):
            assert page.evaluate(CONTRAST.replace("SELECTOR", selector)) >= 4.5, selector


# By the definition of WCAG 2: of an element's colour on the page's; chips lie on a light wash of their own colour.
CONTRAST = """(() => {
  const light = (colour) => {
    const canvas = document.createElement("canvas").getContext("2d");
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3).map((v) => v / 255)
      .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ink = light(getComputedStyle(document.querySelector("SELECTOR")).color);
  const page = light(getComputedStyle(document.body).backgroundColor);
  return (Math.max(ink, page) + 0.05) / (Math.min(ink, page) + 0.05);
})()"""


def test_it_holds_no_address_and_forbids_loading(gpt: Report, tmp_path: Path) -> None:
    gpt.save(tmp_path / "amp.html")
    text = (tmp_path / "amp.html").read_text(encoding="utf-8")
    assert "default-src 'none'" in text
    assert not re.search(r"https?://|\ssrc=|@import|url\(", text)


@in_a_browser
def test_what_the_program_says_is_shown_not_run(tmp_path: Path) -> None:
    report = ampcompile.explain(nn.Linear(4, 4))(torch.randn(2, 4))
    (graph,) = report.graphs
    nodes = tuple(replace(n, because=EVIL, module=f"a{EVIL.replace('.', '_')}", source="") for n in graph.nodes)
    evil = Report([replace(graph, nodes=nodes, precision=EVIL, reason=EVIL)])
    for page in opened(evil, tmp_path):
        page.click("[data-op=linear]")
        assert EVIL.strip() in page.evaluate(DETAILS)
        assert page.evaluate("document.title") == "Casts and precisions"


@in_a_browser
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_several_graphs_stand_below_one_another(tmp_path: Path) -> None:
    def f(x: Tensor) -> Tensor:
        y = x @ x
        torch._dynamo.graph_break()
        return y @ y

    for page in opened(ampcompile.explain(f)(torch.randn(4, 4)), tmp_path):
        texts = page.evaluate(f"{ROWS}.map((row) => row.innerText)")
        assert any("graph 0" in text and "cpu in bf16" in text for text in texts)
        assert any("graph break" in text for text in texts) and any("graph 1" in text for text in texts)


@in_a_browser
def test_two_thousand_ops_open_folded_and_are_quick(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Sequential(*(nn.Linear(2, 2) for _ in range(10))) for _ in range(20)))
    (graph,) = ampcompile.explain(model, lower="eager")(torch.randn(1, 2)).graphs
    many = Report([graph] * 10)
    for page in opened(many, tmp_path):
        assert counted(page).endswith(" of 2010 ops")
        assert page.evaluate(f"{ROWS}.length") < 60
        page.click("#open")
        assert len(page.evaluate(SHOWN)) == 2010
        drawing = "(() => { const start = performance.now(); draw(); return performance.now() - start; })()"
        assert min(page.evaluate(drawing) for _ in range(5)) < 1000
