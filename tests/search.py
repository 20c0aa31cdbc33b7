"""python -m tests.search [build/docs]   asks the site's own search questions: the right page has to come first."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

QUESTIONS = {
    "which gpu": "hardware",
    "h100": "hardware",
    "fp8 memory": "fp8",
    "which layers fp8": "fp8",
    "optimizer": "optimizer",
    "nan": "troubleshooting",
    "loss nan": "troubleshooting",
    "notebook": "tutorials/from_float32_to_amp",
    "save": "migration",
    "load checkpoint": "migration",
    "export": "migration",
    "turn off": "migration",
    "is it faster": "performance",
    "lightning": "integrations",
    "trainer": "integrations",
    "fsdp": "several_devices",
    "cuda graphs": "captured_steps",
    "gradscaler": "scaler",
    "keep a module in float32": "options",
    "which ops run in fp32": "explain",
    "what works together": "together",
    "memory": "memory",
    "out of memory": "memory",
    "8-bit adam": "memory",
    "larger batch": "memory",
    "larger model": "memory",
}
"""What a reader types → the page that answers."""


def first(site: str, queries: list[str]) -> list[str]:
    """The first page that the search finds for each query."""
    command = ["node", str(Path(__file__).with_suffix(".js")), site, *queries]
    found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return [pages[0] if pages else "" for pages in json.loads(found.stdout)]


def main() -> int:
    """Print what comes first where another page should."""
    if shutil.which("node") is None:
        print("the site's search wasn't asked: that needs node (Debian: apt install nodejs)")
        return 0
    site = sys.argv[1] if len(sys.argv) > 1 else "build/docs"
    answers = dict(zip(QUESTIONS, first(site, [*QUESTIONS]), strict=True))
    wrong = {query: page for query, page in answers.items() if page != QUESTIONS[query]}
    for query, page in wrong.items():
        print(f"a search for {query!r} has {page or 'nothing'} first, expected {QUESTIONS[query]}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
