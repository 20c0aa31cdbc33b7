"""Phase three, before differentiation: casts are inserted, tidied, and those of weights leave the graph."""
