"""Proof, case by case, on operators, models, training and random programs: `make proof` tries it and prints tables."""
