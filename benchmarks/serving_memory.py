"""Memory of serving GPT 124M, 1 x 16 tokens, before and after `release_masters`: `python -m benchmarks.serving_memory`.

Each way runs in a process of its own. The three columns are MiB resident on the CPU, or allocated on a GPU: held
between calls once the graphs are compiled, the most held in later calls, and the most held since the process began.
"""

import subprocess
import sys

import torch

import ampcompile
from benchmarks.architectures import build
from benchmarks.memory import forget_peak, held_bytes, peak_bytes
from benchmarks.peers import AMP, BASELINE, LIMIT, PEERS
from benchmarks.steps import inference

RELEASED = f"{AMP}, masters released"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def serve(way: str, model: str = "GPT 124M") -> tuple[int, int, int]:
    """The three figures of one way, in bytes."""
    peer = PEERS[AMP if way == RELEASED else way]
    network, inputs = build(model, 1, 16, False)
    network.to(DEVICE, torch.bfloat16 if peer.precision == "converted" else None)
    run = peer.compiled(network, torch.bfloat16)
    call = inference(run, tuple(value.to(DEVICE) for value in inputs), lambda: peer.around(DEVICE, torch.bfloat16))
    for _ in range(4):
        result = call()
    if way == RELEASED:
        ampcompile.release_masters(network)
        assert torch.equal(call(), result)
    whole = peak_bytes(DEVICE)
    forget_peak(DEVICE)
    held = held_bytes(DEVICE)
    for _ in range(4):
        call()
    return held, peak_bytes(DEVICE), whole


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(*serve(sys.argv[1]))
        raise SystemExit
    print("|  | held between calls | peak of calls | peak since the start |\n|---|--:|--:|--:|")
    for way in (BASELINE, LIMIT, AMP, RELEASED):
        command = [sys.executable, "-m", "benchmarks.serving_memory", way]
        figures = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.split()
        print(f"| {way} |", " | ".join(f"{int(figure) / 2**20:.0f}" for figure in figures), "|", flush=True)
