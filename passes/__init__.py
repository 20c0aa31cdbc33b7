"""Graph passes, one a file; `pipeline.py` lists them in order."""

from ampcompile.torch_private.marks import tell_sources

tell_sources(__name__, __path__)
