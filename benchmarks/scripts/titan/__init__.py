"""torchtitan's trainer on two processes, in its own mixed precision and in amp: `python -m benchmarks.scripts.titan`.

The trainer stays in its repository: here are the changes, stand-ins for a GPU, and what was measured.
"""
