"""Language models: cases as traced_blocks.py has them."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from tests.param_groups.traced_blocks import (
    APART,
    ENDS,
    GAINS,
    HEAD,
    LAYER_NORMS,
    MLP,
    TOKENS,
    Apart,
    Mlp,
    Rms,
    Stack,
    case,
    causal,
    heads,
    linear,
    merged,
    root,
)


@case(ENDS + LAYER_NORMS + APART + MLP, root)
def matrices_apart(n):
    return Stack(n, Apart, Mlp)


class Fused(nn.Module):
    """As in nanoGPT: one matrix for three, products by hand, a mask."""

    def __init__(self, n, power=-0.5, bias=True):
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(n, 3 * n, bias=bias), nn.Linear(n, n, bias=bias)
        self.power = power

    def forward(self, x):
        q, k, v = map(heads, self.c_attn(x).split(x.shape[-1], dim=2))
        scores = q @ k.transpose(-2, -1) * q.shape[-1] ** self.power
        scores = scores.masked_fill(~causal(x), float("-inf"))
        return self.c_proj(merged(F.softmax(scores, dim=-1) @ v))


FUSED = """
blocks.*.attn.c_attn.weight qkv n -1
blocks.*.attn.c_attn.bias hidden_bias 1 0
blocks.*.attn.c_proj.weight attention_output n -1
blocks.*.attn.c_proj.bias hidden_bias 1 0
"""
MLP_BIAS = """
blocks.*.mlp.up.bias hidden_bias 1 0
blocks.*.mlp.down.bias hidden_bias 1 0
"""


@case(ENDS + LAYER_NORMS + FUSED + MLP + MLP_BIAS, root)
def nanogpt(n):
    return Stack(n, Fused, lambda n: Mlp(n, bias=True))


@case(ENDS + LAYER_NORMS + FUSED + MLP, lambda d: 1 / d)
def nanogpt_with_mup_s_attention(n):
    return Stack(n, lambda n: Fused(n, power=-1.0), Mlp)


class Turned(nn.Module):
    """GPT-2's own layer, which stores (in, out)."""

    def __init__(self, a, b):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(a, b) * a**-0.5)
        self.bias = nn.Parameter(torch.zeros(b))

    def forward(self, x):
        return torch.addmm(self.bias, x.flatten(0, -2), self.weight).unflatten(0, x.shape[:-1])


class TurnedAttention(Fused):
    def __init__(self, n):
        super().__init__(n)
        self.c_attn, self.c_proj = Turned(n, 3 * n), Turned(n, n)


TURNED = FUSED.replace("qkv n", "qkv/transposed n").replace("output n", "output/transposed n")


@case(ENDS + LAYER_NORMS + TURNED + MLP, root)
def gpt2_with_turned_matrices(n):
    return Stack(n, TurnedAttention, Mlp)


def rotated(x):
    angles = torch.arange(x.shape[-2])[:, None] * 100.0 ** -torch.linspace(0, 1, HEAD // 2)
    cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin


class Grouped(nn.Module):
    """Rotary positions; two heads share a key; softmax in eager products."""

    def __init__(self, n):
        super().__init__()
        self.wq, self.wo = linear(n, n), linear(n, n)
        self.wk, self.wv = linear(n, n // 2), linear(n, n // 2)

    def forward(self, x):
        q, k, v = rotated(heads(self.wq(x))), rotated(heads(self.wk(x))), heads(self.wv(x))
        k, v = (t.repeat_interleave(2, dim=1) for t in (k, v))
        scores = torch.matmul(q, k.transpose(2, 3)) / math.sqrt(HEAD)
        scores = scores + torch.zeros(causal(x).shape).masked_fill(~causal(x), -1e30)
        return self.wo(merged(F.softmax(scores.float(), dim=-1).type_as(q) @ v))


class Swiglu(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.w1, self.w2, self.w3 = linear(n, 3 * n), linear(3 * n, n), linear(n, 3 * n)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


GROUPED = """
blocks.*.attn.wq.weight query n -1
blocks.*.attn.wk.weight key n -1
blocks.*.attn.wv.weight value n -1
blocks.*.attn.wo.weight attention_output n -1
"""
SWIGLU = """
blocks.*.mlp.w1.weight mlp_in n -1
blocks.*.mlp.w2.weight mlp_out 3*n -1
blocks.*.mlp.w3.weight mlp_in n -1
"""


@case(ENDS + GAINS + GROUPED + SWIGLU, root)
def llama_with_grouped_keys(n):
    return Stack(n, Grouped, Swiglu, Rms)


class Interleaved(nn.Module):
    """As in litgpt: one matrix of groups, each two queries, a key and a value."""

    def __init__(self, n):
        super().__init__()
        self.qkv, self.proj = linear(n, 2 * n), linear(n, n)

    def forward(self, x):
        groups = self.qkv(x).unflatten(-1, (-1, 4, HEAD)).permute(0, 2, 3, 1, 4)
        q, k, v = groups.split((2, 1, 1), dim=2)
        k, v = k.expand(q.shape), v.expand(q.shape)
        q, k, v = (t.flatten(1, 2) for t in (q, k, v))
        return self.proj(merged(F.scaled_dot_product_attention(q, k, v, is_causal=True)))


class GateUp(nn.Module):
    """As in Phi-3: gate and up in one."""

    def __init__(self, n):
        super().__init__()
        self.both, self.down = linear(n, 4 * n), linear(2 * n, n)

    def forward(self, x):
        gate, up = self.both(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


@case(
    ENDS
    + GAINS
    + """
blocks.*.attn.qkv.weight qkv n -1
blocks.*.attn.proj.weight attention_output n -1
blocks.*.mlp.both.weight mlp_in n -1
blocks.*.mlp.down.weight mlp_out 2*n -1
""",
    root,
)
def groups_interleaved(n):
    return Stack(n, Interleaved, GateUp, Rms)


class SoftCapped(Grouped):
    """Gemma 2's: a cap on scores."""

    def forward(self, x):
        q, k, v = heads(self.wq(x)), heads(self.wk(x)), heads(self.wv(x))
        k, v = (t.repeat_interleave(2, dim=1) for t in (k, v))
        scores = torch.tanh(q @ k.mT * 0.25 / 50) * 50
        return self.wo(merged(F.softmax(scores, dim=-1) @ v))


@case(
    ENDS + "".join(f"{line} 0\n" for line in GAINS.split("\n") if line) + GROUPED + SWIGLU,
    lambda d: 0.25,
)
def gemma_with_norms_of_one_plus_gamma(n):
    return Stack(n, SoftCapped, Swiglu, lambda n: Rms(n, offset=1.0))


class Bank(nn.Module):
    """Layers of one kind in one tensor."""

    def __init__(self, n, layers=3):
        super().__init__()
        self.wte, self.head = nn.Embedding(TOKENS, n), linear(n, TOKENS)
        self.attn = nn.Parameter(torch.randn(layers, 4, n, n) * n**-0.5)
        self.mlp = nn.Parameter(torch.randn(layers, 2, n, n) * n**-0.5)
        self.gains = nn.Parameter(torch.ones(layers, n))

    def forward(self, ids):
        x = self.wte(ids)
        for i, gain in enumerate(self.gains):
            y = F.rms_norm(x, x.shape[-1:], gain)
            q, k, v = (heads(F.linear(y, w)) for w in self.attn[i, :3])
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + F.linear(merged(y), self.attn[i][3])
            up, down = self.mlp[i].unbind()
            x = x + F.linear(F.relu(F.linear(x, up)).square(), down)
        return self.head(F.rms_norm(x, x.shape[-1:]))


@case(
    ENDS
    + """
attn hidden/experts n -1
mlp hidden/experts n -1
gains norm_scale 1 0
""",
    root,
)
def banks_of_layers(n):
    return Bank(n)


class Latent(nn.Module):
    """Latent queries, keys and values of DeepSeek's kind in a class of another name."""

    def __init__(self, n, rank):
        super().__init__()
        self.wq_a, self.q_norm, self.wq_b = linear(n, rank), Rms(rank), linear(rank, n)
        self.wkv_a, self.kv_norm = linear(n, rank + 4), Rms(rank)
        self.wkv_b, self.wo, self.rank = linear(rank, n + n // 2), linear(n, n), rank

    def forward(self, x):
        q = heads(self.wq_b(self.q_norm(self.wq_a(x))))
        latent, shared = self.wkv_a(x).split((self.rank, 4), dim=-1)
        both = self.wkv_b(self.kv_norm(latent)).unflatten(-1, (-1, 12)).transpose(1, 2)
        k, v = both.split((4, 8), dim=-1)
        k = torch.cat((k, shared[:, None].expand(k.shape)), dim=-1)
        scores = torch.einsum("bhsd,bhtd->bhst", q, k) * 0.3
        return self.wo(merged(torch.einsum("bhst,bhtd->bhsd", scores.softmax(-1), v)))


@case(
    ENDS
    + GAINS
    + MLP
    + """
blocks.*.attn.wq_a.weight narrowing n -1
blocks.*.attn.q_norm.weight norm_scale 1 0
blocks.*.attn.wq_b.weight widening 6 0
blocks.*.attn.wkv_a.weight key n -1
blocks.*.attn.kv_norm.weight norm_scale 1 0
blocks.*.attn.wkv_b.weight widening 6 0
blocks.*.attn.wo.weight attention_output n -1
""",
    lambda d: 0.3,
)
def latent_attention(n):
    return Stack(n, lambda n: Latent(n, 6), Mlp, Rms)


class Absorbed(nn.Module):
    """One matrix is used as itself for values and turned round for queries: no trace can say."""

    def __init__(self, n):
        super().__init__()
        self.wq, self.wkv_a, self.wo = linear(n, n), linear(n, 6), linear(n, n)
        self.wkv_b = linear(6, 2 * n)

    def forward(self, x):
        latent, (up, down) = self.wkv_a(x), self.wkv_b.weight.view(-1, 2, HEAD, 6).unbind(1)
        q = torch.einsum("bhsd,hdc->bhsc", heads(self.wq(x)), up)
        scores = torch.einsum("bhsc,btc->bhst", q, latent) * HEAD**-0.5
        mixed = torch.einsum("bhst,btc->bhsc", scores.softmax(-1), latent)
        return self.wo(merged(torch.einsum("bhsc,hdc->bhsd", mixed, down)))


@case("", refused="wkv_b.weight' is summed over in two ways")
def absorbed_latent_attention(n):
    return Stack(n, Absorbed, Mlp, Rms)


class NanoChat(nn.Module):
    """Normed queries and keys times 1.2, gains per layer, gated values, a soft cap on logits."""

    def __init__(self, n, layers=2):
        super().__init__()
        self.wte, self.lm_head = nn.Embedding(TOKENS, n), linear(n, TOKENS)
        self.resid = nn.Parameter(torch.full((layers,), 1.15))
        self.skip = nn.Parameter(torch.full((layers,), 0.1))
        parts = lambda: {"attn": Apart(n), "mlp": Mlp(n), "gate": linear(n, n // HEAD)}
        self.h = nn.ModuleList(nn.ModuleDict(parts()) for _ in range(layers))
        for block in self.h:
            nn.init.zeros_(block.attn.d.weight)
            nn.init.zeros_(block.mlp.down.weight)

    def forward(self, ids):
        norm = lambda x: F.rms_norm(x, x.shape[-1:])
        x = first = norm(self.wte(ids))
        for i, block in enumerate(self.h):
            x = self.resid[i] * x + self.skip[i] * first
            y, attn = norm(x), block.attn
            q, k = 1.2 * norm(heads(attn.a(y))), 1.2 * norm(heads(attn.b(y)))
            v = heads(attn.c(y)) * (2 * torch.sigmoid(block.gate(y))).transpose(1, 2)[..., None]
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + attn.d(merged(y))
            x = x + block.mlp.down(F.relu(block.mlp.up(norm(x))).square())
        return 15 * torch.tanh(self.lm_head(norm(x)) / 15)


@case(
    """
wte.weight token_embedding 1 0
lm_head.weight readout n -1
resid layer_scale 1 0 1.15
skip layer_scale 1 0 0.1
h.*.attn.a.weight query n -1
h.*.attn.b.weight key n -1
h.*.attn.c.weight value n -1
h.*.attn.d.weight attention_output n -1 0
h.*.mlp.up.weight mlp_in n -1
h.*.mlp.down.weight mlp_out 4*n -1 0
h.*.gate.weight hidden n -1
""",
    lambda d: 1.44 * d**-0.5,
)
def nanochat(n):
    return NanoChat(n)


@case(
    """
emb.weight token_embedding 1 0
layers.weight_ih_l0 hidden n -1
layers.weight_hh_l0 hidden n -1
layers.bias_ih_l0 hidden_bias 1 0
layers.bias_hh_l0 hidden_bias 1 0
head.weight readout n -1
head.bias readout_bias 1 0
"""
)
def recurrent(n):
    class Lstm(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb, self.head = nn.Embedding(TOKENS, n), nn.Linear(n, TOKENS)
            self.layers = nn.LSTM(n, n, batch_first=True)

        def forward(self, ids):
            return self.head(self.layers(self.emb(ids))[0])

    return Lstm()


@case(
    """
first token_embedding 1 0
head.weight readout n -1
"""
)
def one_hot_words(n):
    class OneHot(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.head = nn.Parameter(torch.randn(TOKENS, n)), linear(n, TOKENS)

        def forward(self, ids):
            return self.head(F.relu(F.one_hot(ids, TOKENS).float() @ self.first))

    return OneHot()


class Sinks(Apart):
    """As in gpt-oss: a number per head beside the scores, off which a softmax may drain."""

    def __init__(self, n):
        super().__init__(n)
        self.sinks = nn.Parameter(torch.zeros(n // HEAD))

    def forward(self, x):
        q, k, v = self.three(x)
        scores = (q @ k.mT) * HEAD**-0.5
        sinks = self.sinks.view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, sinks), dim=-1)
        weights = torch.softmax(scores - scores.amax(-1, keepdim=True), dim=-1)[..., :-1]
        return self.d(merged(weights @ v))


@case(
    ENDS + GAINS + APART + MLP + "blocks.*.attn.sinks relative_position/vector 1 0\n",
    root,
)
def sinks_beside_scores(n):
    return Stack(n, Sinks, Mlp, Rms)
