"""Proof, case by case, on operators, on models and in training: `make proof` tries it and prints tables."""
