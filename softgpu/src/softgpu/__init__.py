"""A GPU without a GPU: what a GPU would run, run on the CPU; README.md says what this sees and what it can't.

Files here are what every kind of code shares: numbers, memory, threads. `ptx/` and `machine_code/` know instructions.
"""
