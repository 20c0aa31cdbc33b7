"""The second phase: which dtype each op runs in, and why. Writes decisions, changes nothing else."""
