"""Measurements, and the models they are made on."""
