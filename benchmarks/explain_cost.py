"""What explaining costs where nobody asks for it: nothing, and what it costs where one does. Processor time.

python -m benchmarks.explain_cost [--rounds 5]
"""

import argparse
import json
import subprocess
import sys
from statistics import median, quantiles

WAYS = ("not loaded", "loaded", "asked")

# In a process of its own: the rewriting and Dynamo's tracing, without a code generator's seconds; then many calls.
MEASURE = """
import json, sys, time, torch
from benchmarks.models import GPT, GPTConfig

model = GPT(GPTConfig(layers=4, width=128, heads=4, vocab=256, context=64)).eval()
tokens = torch.randint(256, (1, 64))
warm = torch.compile(torch.nn.Linear(4, 4), backend="amp", options={"lower": "aot_eager"})
with torch.no_grad():
    warm(torch.randn(2, 4))  # what is imported and probed at the first compilation
    explained = 0.0
    if sys.argv[1] != "not loaded":
        import ampcompile.explaining.recorder
    if sys.argv[1] == "asked":
        start = time.process_time()
        str(ampcompile.explain(model)(tokens))
        explained = time.process_time() - start
    run = torch.compile(model, backend="amp", options={"lower": "aot_eager"})
    start = time.process_time()
    run(tokens)
    compiled = time.process_time() - start
    run(tokens)
    start = time.process_time()
    for _ in range(300):
        run(tokens)
    call = (time.process_time() - start) / 300
assert ("ampcompile.explaining.recorder" in sys.modules) == (sys.argv[1] != "not loaded")
print(json.dumps([compiled, call, explained]))
"""


def measured(way: str) -> tuple[float, float, float]:
    """Seconds of compiling, of a call (mean), and of explaining, in a new process. `way`: one of WAYS."""
    found = subprocess.run([sys.executable, "-c", MEASURE, way], capture_output=True, text=True, check=True)
    compiled, call, explained = json.loads(found.stdout)
    return compiled, call, explained


def spread(seconds: list[float]) -> str:
    """Median and quartiles, in milliseconds."""
    low, _, high = quantiles(seconds, method="inclusive")
    return f"{1e3 * median(seconds):.2f} ms [{1e3 * low:.2f}, {1e3 * high:.2f}]"


def main(rounds: int) -> None:
    """Prints the times of each way; the ways take turns."""
    ways: dict[str, list[tuple[float, float, float]]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way, found in ways.items():
            found.append(measured(way))
    for way, found in ways.items():
        compiled, call, explained = (list(column) for column in zip(*found, strict=True))
        print(f"explain {way}: compile {spread(compiled)}, call {spread(call)}, explaining {spread(explained)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    main(parser.parse_args().rounds)
