"""Kernels, one operation per file: public function, C++ version in `kernels/cpp`, Triton version in `kernels/triton`."""

from ampcompile.torch_private.sources import tell_sources

tell_sources(__name__, __path__)
