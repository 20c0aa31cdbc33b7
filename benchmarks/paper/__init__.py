"""A GPU on paper: what Inductor would launch for an H200, and what that reads and writes, counted on a machine without.

Training steps and calls are traced for `device="cuda"` on a CPU build of torch, and lowered to Triton and library calls
by Inductor as on a GPU; nothing runs. Every Triton kernel is compiled to machine code. `python -m benchmarks.paper`
starts a process for each model and peer: what these register must never be there where something is measured.
"""
