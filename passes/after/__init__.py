"""The fourth phase, after differentiation: passes on the joint graph of forward and backward."""
