"""Kernels: a file for each operation, and for what they share; C++ in `kernels/cpp`, Triton in `kernels/triton`."""

from ampcompile.torch_private.marks import tell_sources

tell_sources(__name__, __path__)
