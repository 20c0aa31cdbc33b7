"""Training scripts that others wrote, as they are and with two lines changed: `python -m benchmarks.scripts`.

The scripts stay in their repositories: here are what is changed in them, what they read, and what was measured.
"""
