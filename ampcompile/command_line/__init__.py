"""`python -m ampcompile`: explain, audit, bench and doctor from a shell."""
