"""Triton kernels; the only package that imports triton. Names of launched kernels start with `amp_`, for profiles."""
