"""Kernels, one operation a file: public function, plain-torch reference, Triton version in `kernels/triton`."""
