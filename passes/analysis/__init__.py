"""What passes ask about a graph: aliases, gradients, sizes, what commutes with a cast. Changes nothing."""
