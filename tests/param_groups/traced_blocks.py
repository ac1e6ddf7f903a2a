"""What small models in the manner of many authors are put together from, and how a case is written.

A case is a function of the width, or the class of an attention or an MLP in a stack. The end of its
docstring says what must be read of it, a line for each kind of tensor:
`role[/layout] [fan-in power] [start]: names`. The fan-in is in n, the width, and the power is that
of the rate under Adam (Everett et al., Table 1, full alignment); left out, they are 1 and 0. A
start is a number or `kept`, where it is not the role's. A line without a colon has names of lines.
"""

import functools
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
    expected: list  # (pattern, role and layout, fan-in, power, start)
    attention: Callable | None = None  # from the head dimension to the factor
    head_dim: Callable = lambda n: HEAD
    refused: str = ""  # what the error of `rules` says, where a trace cannot know


CASES, LINES = {}, {}


def text(model):
    return model(IDS)


def root(d):
    return d**-0.5


def lines(docstring, prefix=""):
    """What the last paragraph of a docstring says."""
    found = []
    for line in (docstring or "").rpartition("\n\n")[2].splitlines():
        head, colon, names = line.partition(":")
        if not colon:
            found += [one for name in line.split() for one in LINES[name]]
            continue
        role, *numbers = head.split()
        start = numbers.pop() if len(numbers) % 2 else "1"
        fan_in, power = numbers or ("1", "0")
        found += [(prefix + name, role, fan_in, int(power), start) for name in names.split()]
    return found


def case(attention=None, run=text, refused=""):
    """Adds a case under the name of the function or class that builds it."""

    def add(build):
        expected = [] if refused else lines(build.__doc__)
        CASES[build.__name__] = Case(build, run, expected, attention, refused=refused)
        return build

    return add


def attention(factor=root, norm=None, refused="", **more):
    """Adds a stack with a class as its attention; its norms are Rms if no other kind is named."""

    def add(kind):
        LINES[kind.__name__] = [] if refused else lines(kind.__doc__, "blocks.*.attn.")
        around = lines(f"ends {'layer_norms' if norm else 'gains'} Mlp")
        build, more["refused"] = stack(kind, norm=norm or Rms), refused
        CASES[kind.__name__] = Case(build, text, around + LINES[kind.__name__], factor, **more)
        return kind

    return add


def mlp(kind):
    """Adds a stack with a class as its MLP."""
    LINES[kind.__name__] = lines(kind.__doc__, "blocks.*.mlp.")
    expected = lines("ends gains Apart") + LINES[kind.__name__]
    CASES[kind.__name__] = Case(stack(mlp=kind), text, expected, root)
    return kind


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


class Scaled(Stack):
    """What is done to activations in four places: a number or a function."""

    def __init__(self, n, embed=1.0, branch=1.0, into=1.0, logits=1.0):
        super().__init__(n, Apart, Mlp, Rms)
        self.by = embed, branch, into, logits

    def forward(self, ids):
        embed, branch, into, logits = (
            by if callable(by) else lambda x, by=by: by * x for by in self.by
        )
        x = embed(self.wte(ids))
        for block in self.blocks:
            x = x + branch(block.attn(block.n1(x)))
            x = x + branch(block.mlp(block.n2(x)))
        return logits(self.head(into(self.final(x))))


@functools.cache
def stack(attention=Apart, mlp=Mlp, norm=Rms):
    return lambda n: Stack(n, attention, mlp, norm)


@functools.cache
def read(build, run=text, **more):
    """A trace, one for all tests that ask for the same."""
    return traced(build, run, (BASE, WIDE), **more)


LINES["ends"] = lines("""token_embedding: wte.weight
readout n -1: head.weight""")
LINES["layer_norms"] = lines("""norm_scale: blocks.*.n1.weight blocks.*.n2.weight
norm_bias: blocks.*.n1.bias blocks.*.n2.bias final.bias
final_norm_scale: final.weight""")
LINES["gains"] = lines("""norm_scale: blocks.*.n1.weight blocks.*.n2.weight
final_norm_scale: final.weight""")
LINES["Mlp"] = lines("""mlp_in n -1: blocks.*.mlp.up.weight
mlp_out 4*n -1: blocks.*.mlp.down.weight""")
LINES["Apart"] = lines("""query n -1: blocks.*.attn.a.weight
key n -1: blocks.*.attn.b.weight
value n -1: blocks.*.attn.c.weight
attention_output n -1: blocks.*.attn.d.weight""")
