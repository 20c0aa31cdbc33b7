"""Graph passes, one a file; `pipeline.py` lists them in order."""

from ampcompile.torch_private.sources import tell_sources

tell_sources(__name__, __path__)
