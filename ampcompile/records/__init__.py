"""Plain records of graphs, which hold no tensor and no graph: casts, ops, totals, log lines."""
