"""FSDP2's gathers in 16 bits, for the weights that all readers read in 16 bits."""
