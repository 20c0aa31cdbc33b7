"""What the page about other people's loops shows runs as it stands, but for the compiler below."""

import pytest
import torch

for name in ("accelerate", "lightning", "peft"):
    pytest.importorskip(name, reason=f"{name} is not installed")

from tests import pages  # noqa: E402
from tests.integrations.compare import QUIET  # noqa: E402

pytestmark = QUIET


@pytest.mark.ci
def test_its_python_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lower = 'options={"lower": "aot_eager"}'

    def quicker(page, blocks=pages.blocks):
        codes = [
            b.code.replace('"amp")', f'"amp", {lower})').replace("AmpPlugin()", f"AmpPlugin({lower})")
            for b in blocks(page)
        ]
        return [block._replace(code=code) for block, code in zip(blocks(page), codes, strict=True)]

    monkeypatch.setattr(pages, "blocks", quicker)
    found = pages.run("docs/integrations.md")
    assert type(found["trainer"].model_wrapped) is torch._dynamo.OptimizedModule
    assert (tmp_path / "saved" / "model.safetensors").exists()
