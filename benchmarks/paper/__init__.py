"""A GPU on paper: count Inductor's launches for an H200, and their memory traffic, on a machine without a GPU.

Training steps and calls are traced for `device="cuda"` on a CPU build of torch, and lowered to Triton and library calls
by Inductor as on a GPU; nothing runs. Every Triton kernel is compiled to machine code. `python -m benchmarks.paper`
starts a process for each model and peer: their fake device must never be registered in a process that measures.
"""
