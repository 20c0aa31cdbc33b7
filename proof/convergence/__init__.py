"""Whether training in 16 bits ends where float32 does: five small models on made-up data, paired by seed."""
