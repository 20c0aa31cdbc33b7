"""Scripts that train real models on real input."""
