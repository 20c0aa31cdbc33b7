"""A device "cuda" made of the CPU: `start.begin()`, called before torch is imported.

Ops run the CPU's kernels (`cpp/`), Triton's kernels the PTX that the compiler made of them, in the emulator of
`softgpu.ptx`. It changes `torch._C`, so it lives in processes of its own; `softgpu.choice` says which.
"""
