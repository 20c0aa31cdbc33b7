"""Phase six: graphs that autograd itself differentiates, when a gradient of a gradient is asked for."""
