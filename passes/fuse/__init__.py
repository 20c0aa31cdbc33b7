"""Phase four: fused kernels take the place of ops and the casts around them."""
