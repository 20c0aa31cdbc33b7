"""`ampcompile.GradScaler`: torch's, with a step of a few fused kernels that never waits for the host."""

from .captured_step import capture_step
from .grad_scaler import GradScaler

__all__ = ["GradScaler", "capture_step"]
