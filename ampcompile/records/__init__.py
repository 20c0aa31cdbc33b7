"""Plain records of what a graph became: casts, ops, totals, pictures, log lines. They hold no tensor and no graph."""
