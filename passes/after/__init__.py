"""Phase five: passes on the joint graph of forward and backward."""

from ampcompile.torch_private.sources import tell_sources

tell_sources(__name__, __path__)
