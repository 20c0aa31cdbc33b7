"""Tutorials: scripts in the percent format, which `python -m examples.tutorials` runs and renders."""
