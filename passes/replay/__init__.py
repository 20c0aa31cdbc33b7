"""Phase six: prepare graphs that autograd itself differentiates, for gradients of gradients."""
