"""`python -m benchmarks [NAME ...] [--device cpu]`: run the named measurements, or all."""

import argparse
import importlib

NAMES = ("compile_time",)


def main() -> None:
    """Runs each named module's `main(device)`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    options = parser.parse_args()
    if unknown := set(options.names) - set(NAMES):
        parser.error(f"no measurement is called {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")
    for name in options.names or NAMES:
        print(f"{name} on {options.device}")
        importlib.import_module(f"benchmarks.{name}").main(options.device)


if __name__ == "__main__":
    main()
