"""Analyses of a graph that passes use: aliases, gradients, sizes, ops that commute with casts. Changes nothing."""
