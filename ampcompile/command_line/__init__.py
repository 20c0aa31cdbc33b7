"""What `python -m ampcompile` runs: `bench`, and `doctor`."""
