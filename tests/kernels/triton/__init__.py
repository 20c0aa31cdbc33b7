"""Kernels as Triton compiles them for an H100, sm_90; the least of them that other generations run is marked `ci`."""

OTHERS = (80, 100, "machine code")
"""Generations by their numbers; machine code is that of sm_90, run beside its PTX."""
