"""Compare where training in 16 bits and in float32 end: five small models on made-up data, paired by seed."""
