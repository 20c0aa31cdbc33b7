"""Triton kernels; the only package that imports triton. What is launched is called `amp_…`, as profiles show it."""
