"""Phase four: replace ops, and the casts around them, by fused kernels."""
