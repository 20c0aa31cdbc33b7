"""Kernels, one operation per file: the public function; its C++ is in `kernels/cpp`, its Triton in `kernels/triton`."""

from ampcompile.torch_private.marks import tell_sources

tell_sources(__name__, __path__)
