"""python -m tests.wheel   builds dist/*.whl of what git tracks, and tries it in an environment of its own.

The environment has the packages of this Python by links, torch among them, but nothing of this checkout.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.test_layout import ROOT

QUICKSTART = """
import torch, ampcompile
from torch import nn
assert "bare" in ampcompile.__file__, ampcompile.__file__
model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4))
x, y = torch.randn(8, 64), torch.randint(4, (8,))
compiled = torch.compile(model, backend="amp", options={"dtype": torch.bfloat16})
optimizer = ampcompile.optim.AdamW(model.parameters(), lr=1e-2)
losses = []
for _ in range(5):
    loss = nn.functional.cross_entropy(compiled(x), y)
    loss.backward()
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
assert losses[-1] < losses[0], losses
assert ampcompile.weight_stats().copies, "not compiled by amp"
assert str(ampcompile.explain(model)(x)).startswith("amp removes")
"""


def copy_tracked(folder: Path) -> None:
    """Copy what git tracks, as it is now, into a folder."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)


def build(folder: Path) -> Path:
    """A wheel in a folder, of what git tracks: builds leave files in their sources."""
    with tempfile.TemporaryDirectory() as source:
        copy_tracked(Path(source))
        how = ("-q", "--no-deps", "--no-build-isolation")
        command = [sys.executable, "-m", "pip", "wheel", *how, "-w", folder, source]
        subprocess.run(command, check=True, timeout=300)
    return next(folder.glob("*.whl"))


def bare(folder: Path) -> Path:
    """The Python of a new environment with links to this Python's packages, pip among them, but nothing of ours."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=60)
    python = folder / "bin" / "python"
    (links := folder / "links").mkdir()
    for place in (Path(entry) for entry in sys.path if entry.endswith("site-packages")):
        for package in place.iterdir():
            ours = package.name.startswith(("ampcompile", "__editable__")) or package.suffix == ".pth"
            if not ours and not (links / package.name).exists():
                (links / package.name).symlink_to(package)
    packages = next(folder.glob("lib/python3*/site-packages"))
    (packages / "links.pth").write_text(f"{links}\n")
    return python


def main() -> None:
    """Build, install, train a few steps, ask the doctor."""
    dist = ROOT / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    wheel = build(dist)
    with tempfile.TemporaryDirectory() as folder:
        python = bare(Path(folder) / "bare")
        install = ["-m", "pip", "install", "-q", "--no-deps", "--no-index", wheel]
        for arguments in (install, ["-c", QUICKSTART], ["-m", "ampcompile", "doctor"]):
            subprocess.run([python, "-P", *arguments], cwd=folder, check=True, timeout=600)
    print(f"{wheel.relative_to(ROOT)} works where it is installed")


if __name__ == "__main__":
    main()
