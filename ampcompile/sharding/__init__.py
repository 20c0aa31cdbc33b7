"""FSDP2's gathers in 16 or 8 bits, for the weights that all readers read so."""
