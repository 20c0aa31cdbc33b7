"""python -m benchmarks.paper [--jobs N] [--only TEXT] [--all] [--options]   what a GPU would run, for docs/gpu_paper.md

Each case is counted for each peer in a process of its own. What was counted with the same code is not counted again.
Exits with 1 if a kernel can't be compiled, or one of ours spills registers.
"""

import argparse
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from threading import Lock

from benchmarks.paper import device, estimate, page, results
from benchmarks.paper.cases import AMP, DEFAULT, MORE, OPTIONS, PEERS, Case

FOLDER = results.ROOT / ".paper"


def main() -> int:
    """Count all cases and write the pages; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", default="", help="cases whose name holds this text")
    parser.add_argument("--all", action="store_true", help="more models, too: half an hour on two cores")
    parser.add_argument("--options", action="store_true", help="options of amp that claim to save, in training")
    arguments = parser.parse_args()
    FOLDER.mkdir(exist_ok=True)
    built, keeping = device.build(FOLDER), Lock()
    codes = {peer: results.code(peer) for peer in (*PEERS, *OPTIONS)}
    failed = []

    def count(case: Case, peer: str) -> None:
        command = [sys.executable, "-m", "benchmarks.paper.one", str(built), json.dumps(asdict(case)), peer]
        run = subprocess.run(command, capture_output=True, text=True, cwd=results.ROOT)
        with keeping:
            print(f"{case}: {peer}", flush=True)
            if run.returncode:
                failed.append(run.stderr)
                print(run.stderr[-3000:], flush=True)
            else:
                results.keep(case, peer, {"code": codes[peer], **json.loads(run.stdout.splitlines()[-1])})

    todo = [(case, peer) for case in (*DEFAULT, *(MORE if arguments.all else ())) for peer in PEERS]
    if arguments.options:
        todo += [(case, peer) for case in DEFAULT if case.training for peer in OPTIONS if peer != AMP]
    todo = [each for each in todo if arguments.only in str(each[0]) and results.counted_with(*each) != codes[each[1]]]
    with ThreadPoolExecutor(arguments.jobs) as pool:
        list(pool.map(lambda each: count(*each), todo))
    page.write()
    estimate.write()
    for each in (bad := list(results.bad())):
        print(each)
    return int(bool(bad or failed))


if __name__ == "__main__":
    sys.exit(main())
