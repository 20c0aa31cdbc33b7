"""Proof, case by case, on everything that PyTorch brings: `make proof` tries it, docs/proof.md tells."""
