"""The third phase, before differentiation: casts are inserted and tidied, and those of weights leave the graph."""
