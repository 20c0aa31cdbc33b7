"""python -m benchmarks.scripts.titan CHECKOUT   train with FSDP2 in each way, and write figures.json and the table

CHECKOUT is a clone of pytorch/torchtitan, bare or not, which holds the pinned commit. Nothing is downloaded. The Python
that runs this needs what torchtitan imports: torchdata, datasets, tokenizers, tyro, tensorboard, einops, pillow.
"""

import io
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import machine
from benchmarks.records import Records
from benchmarks.report.tables import table
from examples import stdlib_text

COMMIT = "73a0e6979dd10b6b1904098eb3c8f62c18ab87ce"
"""torchtitan 0.2.2."""
TAKEN = ("torchtitan", "tests/assets/tokenizer")
RANKS = 2
FIGURES = Path(__file__).with_name("figures.json")
PAGE = Path(__file__).parents[3] / "docs" / "several_devices.md"
TABLE = re.compile(
    r"(?<=<!-- Written by `python -m benchmarks.scripts.titan`. -->\n\n).*?(?=<!-- The table ends. -->)", re.DOTALL
)
ARGUMENTS = (
    "--job.config_file torchtitan/models/llama3/train_configs/debug_model.toml --training.local_batch_size 2"
    " --training.seq_len 256 --debug.seed 0"
)
COMPILED = "--compile.enable --compile.components model --compile.backend"
FLOAT32 = "--training.mixed_precision_param float32"


@dataclass(frozen=True)
class Way:
    """Its settings of torchtitan, the changes to it, and options of torch.compile."""

    arguments: str = ""
    diffs: tuple[str, ...] = ()
    options: str = "{}"


WAYS = {
    "float32": Way(FLOAT32),
    "torchtitan's bfloat16": Way(),
    "the same, `--compile.backend inductor`": Way(f"{COMPILED} inductor"),
    "eager autocast": Way(FLOAT32, ("autocast",)),
    "amp": Way(f"{FLOAT32} {COMPILED} amp", ("autocast", "amp")),
    'amp, `lower="aot_eager", products="torch"`': Way(
        f"{FLOAT32} {COMPILED} amp", ("autocast", "amp"), '{"lower": "aot_eager", "products": "torch"}'
    ),
    "amp, the head compiled too": Way(f"{FLOAT32} {COMPILED} amp", ("autocast", "amp", "head")),
}


def take(checkout: Path, folder: Path, diffs: tuple[str, ...]) -> None:
    """torchtitan and its tokenizer at the pinned commit, changed, and text of the standard library as its test data."""
    command = ["git", "-C", str(checkout), "archive", COMMIT, *TAKEN]
    packed = subprocess.run(command, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(folder, filter="data")
    for name in diffs:
        diff = Path(__file__).with_name(f"{name}.diff")
        subprocess.run(["git", "apply", "--unidiff-zero", diff], check=True, cwd=folder)
    data = folder / "tests" / "assets" / "c4_test"
    data.mkdir()
    text = bytes(stdlib_text.read(limit=1_000_000)[0].tolist()).decode("utf-8", "ignore")
    pieces = [json.dumps({"text": text[begin : begin + 2000]}) for begin in range(0, len(text), 2000)]
    (data / "data.json").write_text("\n".join(pieces))


def run(way: Way, checkout: Path) -> dict[str, Any]:
    """The notes of rank.py, of rank 0. Raises CalledProcessError where a rank fails, and prints what it printed."""
    with tempfile.TemporaryDirectory() as name:
        folder, figures = Path(name), Path(name) / "figures.pt"
        take(checkout, folder, way.diffs)
        paths = os.pathsep.join([name, str(Path(__file__).parents[3])])
        caches = {"HF_HUB_OFFLINE": "1", "HF_HOME": f"{name}/hub", "TORCHINDUCTOR_CACHE_DIR": f"{name}/inductor"}
        environment = os.environ | caches | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
        command += ["-m", "benchmarks.scripts.titan.rank", str(figures), way.options]
        command += f"{ARGUMENTS} {way.arguments}".split()
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        if done.returncode:
            print(done.stdout[-2000:], done.stderr[-6000:], file=sys.stderr)
        done.check_returncode()
        found: dict[str, Any] = torch.load(figures)
    return found


def distance(found: dict[str, Any], other: dict[str, Any]) -> float:
    """How far weights are from those of `other` after training, in parts of how far training moved those."""
    (_, ours), (before, theirs) = found["weights"], other["weights"]
    apart = sum((ours[name] - theirs[name]).double().square().sum() for name in theirs)
    moved = sum((before[name] - theirs[name]).double().square().sum() for name in theirs)
    return float((apart / moved).sqrt())


def summary(found: dict[str, Any], exact: dict[str, Any], autocast: dict[str, Any] | None) -> dict[str, Any]:
    """Figures of a way: losses, bytes that each rank sent in the first and the last step, distances of weights."""
    assert all(torch.equal(found["weights"][0][name], value) for name, value in exact["weights"][0].items())
    return {
        "losses": [round(float(loss), 5) for loss in found["losses"]],
        "gathered": [found["gathered"][step] * (RANKS - 1) for step in (0, -2)],
        "reduced": found["reduced"][-2] * (RANKS - 1) // RANKS,
        "from float32": distance(found, exact),
        "from eager autocast": distance(found, autocast) if autocast else None,
    }


def page_table(ways: dict[str, Any]) -> str:
    """Markdown: one row for each way."""
    rows = []
    for way, found in ways.items():
        first, last = (f"{losses:.4f}" for losses in (found["losses"][0], found["losses"][-1]))
        sizes = [f"{size / 1e6:.2f}" for size in (found["gathered"][1], found["reduced"])]
        near = [f"{found[name]:.2g}" if found[name] is not None else "" for name in found if name.startswith("from ")]
        rows.append((way, first, last, *sizes, *near))
    head = ["way", "loss, step 1", "step 10", "MB gathered", "MB reduced", "from float32", "from eager autocast"]
    return table(head, rows)


def main() -> None:
    """See above."""
    if len(sys.argv) > 1:
        found = {}
        records = Records(FIGURES, machine.about("cpu"))
        for name, way in WAYS.items():
            found[name] = run(way, Path(sys.argv[1]))
            records.add("debugmodel", name, **summary(found[name], found["float32"], found.get("eager autocast")))
            print(name, records.stages["debugmodel"][name], flush=True)
    PAGE.write_text(TABLE.sub(lambda _: page_table(Records.load(FIGURES).stages["debugmodel"]), PAGE.read_text()))


if __name__ == "__main__":
    main()
