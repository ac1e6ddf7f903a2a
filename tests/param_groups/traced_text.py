"""Language models: cases as traced_blocks.py has them."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from tests.param_groups.traced_blocks import (
    HEAD,
    TOKENS,
    Apart,
    Mlp,
    Rms,
    Stack,
    attention,
    case,
    causal,
    heads,
    linear,
    merged,
    mlp,
    root,
)


@case(root)
def matrices_apart(n):
    """ends layer_norms Apart Mlp"""
    return Stack(n, Apart, Mlp)


@attention(norm=nn.LayerNorm)
class Fused(nn.Module):
    """As in nanoGPT: one matrix for three, products by hand, a mask.

    qkv n -1: c_attn.weight
    hidden_bias: c_attn.bias c_proj.bias
    attention_output n -1: c_proj.weight
    """

    power = -0.5

    def __init__(self, n):
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(n, 3 * n), nn.Linear(n, n)

    def forward(self, x):
        q, k, v = map(heads, self.c_attn(x).split(x.shape[-1], dim=2))
        scores = q @ k.transpose(-2, -1) * q.shape[-1] ** self.power
        scores = scores.masked_fill(~causal(x), float("-inf"))
        return self.c_proj(merged(F.softmax(scores, dim=-1) @ v))


@case(root)
def nanogpt(n):
    """ends layer_norms Fused Mlp
    hidden_bias: blocks.*.mlp.up.bias blocks.*.mlp.down.bias
    """
    return Stack(n, Fused, lambda n: Mlp(n, bias=True))


@attention(lambda d: 1 / d, norm=nn.LayerNorm)
class FusedAsInMup(Fused):
    """Fused"""

    power = -1.0


class Turned(nn.Module):
    """GPT-2's own layer, which stores (in, out)."""

    def __init__(self, a, b):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(a, b) * a**-0.5)
        self.bias = nn.Parameter(torch.zeros(b))

    def forward(self, x):
        return torch.addmm(self.bias, x.flatten(0, -2), self.weight).unflatten(0, x.shape[:-1])


@attention(norm=nn.LayerNorm)
class TurnedAttention(Fused):
    """qkv/transposed n -1: c_attn.weight
    hidden_bias: c_attn.bias c_proj.bias
    attention_output/transposed n -1: c_proj.weight
    """

    def __init__(self, n):
        super().__init__(n)
        self.c_attn, self.c_proj = Turned(n, 3 * n), Turned(n, n)


def rotated(x, by=1.0):
    """Rotary positions; `by` stands in the cosines and sines, as YaRN has it."""
    angles = torch.arange(x.shape[-2])[:, None] * 100.0 ** -torch.linspace(0, 1, HEAD // 2)
    cos, sin = by * angles.cos().repeat(1, 2), by * angles.sin().repeat(1, 2)
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin


@attention()
class Grouped(nn.Module):
    """Rotary positions; two heads share a key; softmax in eager products.

    query n -1: wq.weight
    key n -1: wk.weight
    value n -1: wv.weight
    attention_output n -1: wo.weight
    """

    def __init__(self, n):
        super().__init__()
        self.wq, self.wo = linear(n, n), linear(n, n)
        self.wk, self.wv = linear(n, n // 2), linear(n, n // 2)

    def three(self, x):
        k, v = (heads(part(x)).repeat_interleave(2, dim=1) for part in (self.wk, self.wv))
        return heads(self.wq(x)), k, v

    def forward(self, x):
        q, k, v = self.three(x)
        scores = torch.matmul(rotated(q), rotated(k).transpose(2, 3)) / math.sqrt(HEAD)
        scores = scores + torch.zeros(causal(x).shape).masked_fill(~causal(x), -1e30)
        return self.wo(merged(F.softmax(scores.float(), dim=-1).type_as(q) @ v))


@mlp
class Swiglu(nn.Module):
    """mlp_in n -1: w1.weight w3.weight
    mlp_out 3*n -1: w2.weight
    """

    def __init__(self, n):
        super().__init__()
        self.w1, self.w2, self.w3 = linear(n, 3 * n), linear(3 * n, n), linear(n, 3 * n)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


@attention()
class Interleaved(nn.Module):
    """As in litgpt: one matrix of groups, each two queries, a key and a value.

    qkv n -1: qkv.weight
    attention_output n -1: proj.weight
    """

    def __init__(self, n):
        super().__init__()
        self.qkv, self.proj = linear(n, 2 * n), linear(n, n)

    def forward(self, x):
        groups = self.qkv(x).unflatten(-1, (-1, 4, HEAD)).permute(0, 2, 3, 1, 4)
        q, k, v = groups.split((2, 1, 1), dim=2)
        k, v = k.expand(q.shape), v.expand(q.shape)
        q, k, v = (t.flatten(1, 2) for t in (q, k, v))
        return self.proj(merged(F.scaled_dot_product_attention(q, k, v, is_causal=True)))


@mlp
class GateUp(nn.Module):
    """As in Phi-3: gate and up in one.

    mlp_in n -1: both.weight
    mlp_out 2*n -1: down.weight
    """

    def __init__(self, n):
        super().__init__()
        self.both, self.down = linear(n, 4 * n), linear(2 * n, n)

    def forward(self, x):
        gate, up = self.both(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class SoftCapped(Grouped):
    """Gemma 2's: a cap on scores."""

    def forward(self, x):
        q, k, v = self.three(x)
        scores = torch.tanh(q @ k.mT * 0.25 / 50) * 50
        return self.wo(merged(F.softmax(scores, dim=-1) @ v))


@case(lambda d: 0.25)
def gemma_with_norms_of_one_plus_gamma(n):
    """ends Grouped Mlp
    norm_scale 0: blocks.*.n1.weight blocks.*.n2.weight
    final_norm_scale 0: final.weight
    """
    return Stack(n, SoftCapped, Mlp, lambda n: Rms(n, offset=1.0))


@case(root)
class Bank(nn.Module):
    """Layers of one kind in one tensor.

    ends
    hidden/experts n -1: attn mlp
    norm_scale: gains
    """

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


@attention(lambda d: 0.3)
class Latent(nn.Module):
    """Latent queries, keys and values of DeepSeek's kind in a class of another name.

    narrowing n -1: wq_a.weight
    norm_scale: q_norm.weight kv_norm.weight
    widening 6 0: wq_b.weight wkv_b.weight
    key n -1: wkv_a.weight
    attention_output n -1: wo.weight
    """

    def __init__(self, n, rank=6):
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


@attention(refused="wkv_b.weight' is summed over in two ways")
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


@case(lambda d: 1.44 * d**-0.5)
class NanoChat(nn.Module):
    """Normed queries and keys times 1.2, gains per layer, gated values, a soft cap on logits.

    token_embedding: wte.weight
    readout n -1: lm_head.weight
    layer_scale 1.15: resid
    layer_scale 0.1: skip
    query n -1: h.*.attn.a.weight
    key n -1: h.*.attn.b.weight
    value n -1: h.*.attn.c.weight
    attention_output n -1 0: h.*.attn.d.weight
    mlp_in n -1: h.*.mlp.up.weight
    mlp_out 4*n -1 0: h.*.mlp.down.weight
    hidden n -1: h.*.gate.weight
    """

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


@case()
class Lstm(nn.Module):
    """token_embedding: emb.weight
    hidden n -1: layers.weight_ih_l0 layers.weight_hh_l0
    hidden_bias: layers.bias_ih_l0 layers.bias_hh_l0
    readout n -1: head.weight
    readout_bias: head.bias
    """

    def __init__(self, n):
        super().__init__()
        self.emb, self.head = nn.Embedding(TOKENS, n), nn.Linear(n, TOKENS)
        self.layers = nn.LSTM(n, n, batch_first=True)

    def forward(self, ids):
        return self.head(self.layers(self.emb(ids))[0])


@case()
class OneHot(nn.Module):
    """token_embedding: first
    readout n -1: head.weight
    """

    def __init__(self, n):
        super().__init__()
        self.first, self.head = nn.Parameter(torch.randn(TOKENS, n)), linear(n, TOKENS)

    def forward(self, ids):
        return self.head(F.relu(F.one_hot(ids, TOKENS).float() @ self.first))


@attention()
class Sinks(Apart):
    """As in gpt-oss: a number per head beside the scores, off which a softmax may drain.

    Apart
    relative_position/vector: sinks
    """

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


@attention(head_dim=lambda n: n // 4)
class Talking(Apart):
    """Four heads that grow and are mixed before and after the softmax.

    Apart
    widening/transposed 4 0: before after
    """

    def __init__(self, n):
        super().__init__(n)
        self.before, self.after = (nn.Parameter(torch.randn(4, 4)) for _ in range(2))

    def forward(self, x):
        q, k, v = (
            one(x).unflatten(-1, (4, -1)).transpose(1, 2) for one in (self.a, self.b, self.c)
        )
        scores = torch.einsum("bhij,hg->bgij", q @ k.mT * q.shape[-1] ** -0.5, self.before)
        return self.d(merged(torch.einsum("bhij,hg->bgij", scores.softmax(-1), self.after) @ v))
