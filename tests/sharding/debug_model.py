"""The shape of torchtitan's debug model, a small Llama, sharded as there.

`torchrun --nproc-per-node 2 -m tests.sharding.debug_model` trains it in several ways and prints the table of
docs/several_devices.md; with torchao's float8 if that is installed. `ONEDNN_MAX_CPU_ISA=AVX512_CORE` makes it fast
where oneDNN has slow products of 8 bits.
"""

import importlib.util

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F

import ampcompile
from tests.compiling import LOW, error
from tests.ranks import ROOT, leave
from tests.sharding.gathers import full, gathered
from tests.sharding.paper import DEBUG

LAYERS, WIDTH, INNER, VOCABULARY, _ = DEBUG
HEADS, ROWS, LENGTH, STEPS, WARMUP, RATE = 16, 4, 128, 10, 2, 8e-4
FP8 = "op linear=fp8"


def turned(x, rope):
    """Pairs of numbers, turned by the angle of their place."""
    a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([a * rope[0] - b * rope[1], a * rope[1] + b * rope[0]], -1).flatten(-2).type_as(x)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(WIDTH, eps=1e-5), nn.RMSNorm(WIDTH, eps=1e-5)
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.w1, self.w3 = (nn.Linear(WIDTH, INNER, bias=False) for _ in range(2))
        self.w2 = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x, rope):
        h = self.attention_norm(x)
        q, k, v = (w(h).unflatten(-1, (HEADS, -1)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        mixed = F.scaled_dot_product_attention(turned(q, rope), turned(k, rope), v, is_causal=True)
        x = x + self.wo(mixed.transpose(1, 2).flatten(-2))
        h = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


class Llama(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.tok_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.output = nn.RMSNorm(WIDTH, eps=1e-5), nn.Linear(WIDTH, VOCABULARY, bias=False)
        for p in self.parameters():
            if p.dim() == 2:
                nn.init.trunc_normal_(p, std=0.02)

    def forward(self, tokens):
        pairs = torch.arange(0, WIDTH // HEADS, 2) / (WIDTH // HEADS)
        angles = torch.outer(torch.arange(tokens.shape[1]), 5e5**-pairs)
        x, rope = self.tok_embeddings(tokens), (angles.cos(), angles.sin())
        for block in self.blocks:
            x = block(x, rope)
        return self.output(self.norm(x))


def shard(model, **options):
    """As torchtitan: the embedding and each block by themselves, the head with its norm kept until backward."""
    for part in (model.tok_embeddings, *model.blocks):
        fully_shard(part, **options)
    fully_shard([model.norm, model.output], reshard_after_forward=False, **options)
    return fully_shard(model, **options)


def batch(step, rows=ROWS, length=LENGTH):
    """Inputs and targets, letters of the project's own pages."""
    text = (ROOT / "docs" / "optimizer.md").read_bytes()
    g = torch.Generator().manual_seed(10 * step + dist.get_rank())
    starts = torch.randint(len(text) - length - 1, (rows,), generator=g).tolist()
    found = torch.tensor([list(text[start : start + length + 1]) for start in starts])
    return found[:, :-1], found[:, 1:]


def train(model, steps=STEPS, after=lambda: None, **sizes):
    """The last loss, the bytes that this rank's last step gave to gathers, the weights."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.1)
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARMUP))
    for step in range(steps):
        gathered.clear()
        inputs, targets = batch(step, **sizes)
        loss = F.cross_entropy(model(inputs).flatten(0, 1).float(), targets.flatten())
        loss.backward()
        optimizer.step()
        rates.step()
        optimizer.zero_grad()
        after()
    dist.all_reduce(loss := loss.detach().clone())
    return loss.item() / dist.get_world_size(), sum(gathered), [full(p) for p in model.parameters()]


def by_amp(policy="default", head=False, lower="inductor"):
    """Blocks compiled one by one, and the head if asked; what `shard_policy` decided."""
    model, options = Llama(), {"policy": policy, "products": "torch", "lower": lower}
    for part in (*model.blocks, *([model.output] if head else [])):
        part.forward = torch.compile(part.forward, backend="amp", options=options)
    shard(model)
    forward, decided = model.forward, ampcompile.shard_policy(model, LOW)

    def call(tokens):
        with torch.autocast("cpu", LOW):
            return forward(tokens)

    model.forward = call
    return model, decided


def by_torchao(gathers):
    """torchtitan's float8: FSDP's bfloat16, the blocks' layers replaced by torchao's, whose `gathers` may be in fp8.

    A CPU multiplies emulated. What is to be called after each step.
    """
    from torchao import float8

    model = Llama()
    config = float8.Float8LinearConfig(enable_fsdp_float8_all_gather=gathers, emulate=True)
    float8.convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: name != "output")
    for block in model.blocks:
        block.compile(backend="inductor")
    shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=LOW, reduce_dtype=torch.float32))
    return model, (lambda: float8.precompute_float8_dynamic_scale_for_fsdp(model)) if gathers else lambda: None


def ways():
    """The rows of the table: a model, and what is to be called after each step."""
    yield "float32", shard(Llama()), lambda: None
    plain = MixedPrecisionPolicy(param_dtype=LOW, reduce_dtype=torch.float32)
    yield "FSDP2's bfloat16", shard(Llama(), mp_policy=plain), lambda: None
    for name, policy in (("amp", "default"), ("amp, blocks in fp8", FP8)):
        yield name, by_amp(policy)[0], lambda: None
        yield f"{name}, the head compiled too", by_amp(policy, head=True)[0], lambda: None
    for gathers in (False, True) if importlib.util.find_spec("torchao") else ():
        yield f"torchao's float8, gathers in {'fp8' if gathers else '16 bits'}", *by_torchao(gathers)


def main():
    dist.init_process_group("gloo")
    exact = start = None
    for name, model, after in ways():
        start = start or [full(p) for p in model.parameters()]
        loss, size, weights = train(model, after=after)
        exact = exact or weights
        moved = [w - s for w, s in zip(exact, start, strict=True)]
        apart = error([w - s for w, s in zip(weights, start, strict=True)], moved)
        if dist.get_rank() == 0:
            print(f"| {name} | {loss:.4f} | {size / 1e6:.2f} | {apart:.2g} |", flush=True)
        torch._dynamo.reset()
    leave()


if __name__ == "__main__":
    main()
