"""Analyses of a graph that passes use: aliases, gradients, products, ops that commute with casts. Changes nothing."""
