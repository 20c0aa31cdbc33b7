"""The site that `make docs` builds: Sphinx reads these pages and fetches nothing."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import ampcompile

if TYPE_CHECKING:
    from sphinx.application import Sphinx

project = "ampcompile"
version = release = ampcompile.__version__

extensions = ["myst_parser", "sphinx_copybutton"]
html_theme = "furo"
html_title = f"ampcompile {version}"
html_show_copyright = False
html_static_path, html_css_files = ["static"], ["site.css"]
html_js_files = [("excerpts.js", {"defer": "defer"})]

highlight_language = "text"  # of blocks that name no language: what a program prints
myst_heading_anchors = 4
copybutton_prompt_text, copybutton_prompt_is_regexp = r">>> |\.\.\. |\$ ", True


README = Path(__file__).parents[1] / "README.md"


def _link_to_pages(app: Sphinx, page: str, source: list[str]) -> None:
    """The home is the README; CONTRIBUTING.md, which is for who has a checkout, is there to download."""
    if page == "index":
        readme = README.read_text(encoding="utf-8").replace("](docs/", "](")
        readme = readme.replace("[CONTRIBUTING](CONTRIBUTING.md)", "{download}`CONTRIBUTING <../CONTRIBUTING.md>`")
        source[0] = re.sub("^<!-- README.*?-->", lambda _: readme, source[0])
        app.env.note_dependency(str(README))
    source[0] = source[0].replace("](../README.md", "](index.md")


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", _link_to_pages)
