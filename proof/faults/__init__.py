"""Faults: what goes wrong around a model, and whether numbers, memory and messages are right afterwards."""
