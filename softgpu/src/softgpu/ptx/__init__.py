"""PTX: what Triton's compiler writes for a GPU, before NVIDIA's assembler makes machine code of it."""
