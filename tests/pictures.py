"""python -m tests.pictures   writes docs/pictures/casts.png: the page of casts of a GPT; needs Chromium."""

import tempfile
from io import BytesIO
from pathlib import Path

import torch
from PIL import Image

import ampcompile
from benchmarks.models import GPT, GPT_23M
from tests.browser import opened
from tests.test_layout import ROOT

PICTURE = ROOT / "docs" / "pictures" / "casts.png"


def main() -> None:
    """A block of the model, and why the input of its first layer is cast."""
    model, tokens = GPT(GPT_23M), torch.randint(GPT_23M.vocab, (1, 16))
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder, "amp.html")
        with torch.no_grad():
            ampcompile.explain(model)(tokens).save(page)
        page.write_text(page.read_text().replace(f"{ROOT}/", ""))  # lines of the repository, wherever it lies
        with opened(page, width=1200, height=560) as shown:
            for place in ("[data-module='blocks']", "[data-module='blocks.0']", "#rows .tag:not(.idle)"):
                shown.click(place)
            Image.open(BytesIO(shown.screenshot())).quantize().save(PICTURE, optimize=True)


if __name__ == "__main__":
    main()
