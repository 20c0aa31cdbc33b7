"""PyTorch's own benchmark scripts, run with amp and with Inductor: `python -m proof dashboard`."""
