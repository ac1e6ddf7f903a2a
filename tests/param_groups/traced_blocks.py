"""What small models in the manner of many authors are put together from, and how a case is written.

A case is build(width), run(model) and a line per kind of tensor: its pattern, its role, its fan-in
(n is the width), the power of the width in its rate under Adam (Everett et al., Table 1, full
alignment), and its start where that is not the role's: a number, or "kept".
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from param_groups import traced

BASE, WIDE = 32, 64
TOKENS, STEPS, HEAD = 20, 12, 8
IDS = torch.arange(2 * STEPS).reshape(2, STEPS) % TOKENS


@dataclass(frozen=True)
class Case:
    build: Callable
    run: Callable
    expected: str
    attention: Callable | None = None  # from the head dimension to the factor
    head_dim: Callable = lambda n: HEAD
    refused: str = ""  # what the error of `rules` says, where a trace cannot know


CASES = {}


def text(model):
    return model(IDS)


def case(expected, attention=None, run=text, **more):
    """Adds a case under the name of the function that builds it."""

    def add(build):
        CASES[build.__name__] = Case(build, run, expected, attention, **more)
        return build

    return add


def root(d):
    return d**-0.5


def linear(a, b):
    return nn.Linear(a, b, bias=False)


def heads(x):
    return x.unflatten(-1, (-1, HEAD)).transpose(1, 2)


def merged(x):
    return x.transpose(1, 2).flatten(2)


def causal(x):
    return torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()


class Rms(nn.Module):
    """x / rms(x), times a gain that is `weight`, or 1 more than it."""

    def __init__(self, n, offset=0.0):
        super().__init__()
        self.weight, self.offset = nn.Parameter(torch.full((n,), 1.0 - offset)), offset

    def forward(self, x):
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return x * (self.weight + self.offset) if self.offset else x * self.weight


class Stack(nn.Module):
    """Words, blocks of two branches, a norm and a readout."""

    def __init__(self, n, attention, mlp, norm=nn.LayerNorm, layers=2):
        super().__init__()
        self.wte = nn.Embedding(TOKENS, n)
        parts = lambda: {"n1": norm(n), "attn": attention(n), "n2": norm(n), "mlp": mlp(n)}
        self.blocks = nn.ModuleList(nn.ModuleDict(parts()) for _ in range(layers))
        self.final, self.head = norm(n), linear(n, TOKENS)

    def forward(self, ids):
        x = self.wte(ids)
        for block in self.blocks:
            x = x + block.attn(block.n1(x))
            x = x + block.mlp(block.n2(x))
        return self.head(self.final(x))


class Mlp(nn.Module):
    def __init__(self, n, bias=False):
        super().__init__()
        self.up, self.down = nn.Linear(n, 4 * n, bias=bias), nn.Linear(4 * n, n, bias=bias)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Apart(nn.Module):
    """Queries, keys and values apart; torch's own attention."""

    def __init__(self, n):
        super().__init__()
        self.a, self.b, self.c, self.d = (linear(n, n) for _ in range(4))

    def three(self, x):
        """Queries, keys and values by head."""
        return heads(self.a(x)), heads(self.b(x)), heads(self.c(x))

    def forward(self, x):
        q, k, v = self.three(x)
        return self.d(merged(F.scaled_dot_product_attention(q, k, v, is_causal=True)))


def stack(attention=Apart, mlp=Mlp, norm=Rms):
    return lambda n: Stack(n, attention, mlp, norm)


def read(build, **more):
    return traced(build, text, (BASE, WIDE), **more)


ENDS = """
wte.weight token_embedding 1 0
head.weight readout n -1
"""
LAYER_NORMS = """
blocks.*.n1.weight norm_scale 1 0
blocks.*.n1.bias norm_bias 1 0
blocks.*.n2.weight norm_scale 1 0
blocks.*.n2.bias norm_bias 1 0
final.weight final_norm_scale 1 0
final.bias norm_bias 1 0
"""
GAINS = """
blocks.*.n1.weight norm_scale 1 0
blocks.*.n2.weight norm_scale 1 0
final.weight final_norm_scale 1 0
"""
MLP = """
blocks.*.mlp.up.weight mlp_in n -1
blocks.*.mlp.down.weight mlp_out 4*n -1
"""
APART = """
blocks.*.attn.a.weight query n -1
blocks.*.attn.b.weight key n -1
blocks.*.attn.c.weight value n -1
blocks.*.attn.d.weight attention_output n -1
"""
