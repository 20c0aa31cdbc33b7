"""What a step sends, on paper: `python -m tests.sharding.paper` prints the table of docs/several_devices.md."""

from math import prod

RANKS = (8, 64, 512, 1024)
LLAMA = {"8 B": (32, 4096, 14336, 128256, 1024), "70 B": (80, 8192, 28672, 128256, 1024)}
"""Layers, width, inner width, vocabulary, width of keys."""
DEBUG = 6, 256, 768, 2048, 256
"""torchtitan's debug model."""
WAYS = {
    # bytes of a weight of each kind: of a block's products, of the head, others; of a gradient; gathers of each weight
    "FSDP2": ((4, 4, 4), 4, 2),
    "FSDP2 with `shard_policy`": ((2, 2, 4), 4, 2),
    "FSDP2 with `shard_policy`, blocks in fp8": ((1, 2, 4), 4, 2),
    "FSDP2, `param_dtype=bfloat16, reduce_dtype=float32`": ((2, 2, 2), 4, 2),
    "the same with torchao's fp8 gathers": ((1, 2, 2), 4, 2),
    "FSDP2, `param_dtype=bfloat16`": ((2, 2, 2), 2, 2),
    "Megatron's distributed optimizer": ((2, 2, 2), 4, 1),
}


def shard(shape, ranks):
    """How many numbers each rank holds of a weight, padded as FSDP2 pads."""
    return -(-shape[0] // ranks) * prod(shape[1:])


def llama(layers, width, inner, vocabulary, keys):
    """The shapes of the weights, and the kind of each, as in `WAYS`."""
    block = [(width, width)] * 2 + [(keys, width)] * 2 + [(inner, width)] * 2 + [(width, inner)]
    ends = [((vocabulary, width), 1), ((vocabulary, width), 2)]
    return [(shape, 0) for shape in block * layers] + ends + [((width,), 2)] * (2 * layers + 1)


def sent(weights, ranks, sizes, gradient, gathers):
    """The bytes that each rank sends in a step: of rings, in which a shard passes all ranks but one."""
    found = ((shard(shape, ranks), sizes[kind]) for shape, kind in weights)
    return (ranks - 1) * sum(numbers * (gathers * size + gradient) for numbers, size in found)


def part_of_float32(model, way):
    """The bytes of one gather of all weights, in parts of those in float32."""
    weights = llama(*model)
    one, wide = (sent(weights, 2, sizes, 0, 1) for sizes in (WAYS[way][0], (4, 4, 4)))
    return one / wide


def table():
    """In GB."""
    lines = ["| GB that each rank sends in a step, on ranks: | " + " | ".join(f"{n:,}" for n in RANKS) + " |"]
    lines.append("|---|" + "--:|" * len(RANKS))
    for name, sizes in LLAMA.items():
        weights = llama(*sizes)
        for way, numbers in WAYS.items():
            found = " | ".join(f"{sent(weights, ranks, *numbers) / 1e9:.1f}" for ranks in RANKS)
            lines.append(f"| {name}, {way} | {found} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
