"""The tests. Their GPU is chosen before any of them imports torch."""

from .softgpu import choice

choice.choose()
