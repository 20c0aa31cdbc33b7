"""The fused step as an optimizer: `SGD`, `Adam` and `AdamW`, in place of torch's."""

from .classes import SGD, Adam, AdamW

__all__ = ["SGD", "Adam", "AdamW"]
