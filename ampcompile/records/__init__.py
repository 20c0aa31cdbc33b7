"""Plain records of rewritten graphs: casts, ops, totals, nodes, log lines. They hold no tensor and no graph."""
