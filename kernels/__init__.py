"""Kernels, one operation per file: public function, plain-torch reference, Triton version in `kernels/triton`."""
