"""Machine code of sm_90, as `nvdisasm` writes it: what NVIDIA's assembler made of the PTX, run beside it.

Nothing official says what its instructions do: each row here is what its name says and what the kernels show. So a
difference from the PTX is first a question to the row; one that is left is the assembler's.
"""
