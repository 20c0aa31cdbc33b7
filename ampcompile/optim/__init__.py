"""The fused step: its plan, its conditions, clipping, and masters of 16-bit parameters."""
