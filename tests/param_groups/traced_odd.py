"""Adapters, gates and odd models: cases as traced_blocks.py has them."""

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
    heads,
    linear,
    merged,
    mlp,
    root,
)
from tests.param_groups.traced_vision import IMAGE, Cross, look, patches

few = lambda model: model(IMAGE.flatten()[:24].reshape(4, 6))


@case(root)
def factorised_embeddings(n):
    """layer_norms Apart Mlp
    token_embedding: wte.0.weight
    widening 6 0: wte.1.weight head.1.weight
    narrowing n -1: head.0.weight
    """
    model = Stack(n, Apart, Mlp)
    model.wte = nn.Sequential(nn.Embedding(TOKENS, 6), linear(6, n))
    model.head = nn.Sequential(linear(n, 6), linear(6, TOKENS))
    return model


@mlp
class Adapted(nn.Module):
    """A bottleneck of 4 after the MLP, closed at first.

    mlp_in n -1: mlp.up.weight
    mlp_out 4*n -1: mlp.down.weight
    narrowing n -1: low.weight
    hidden_bias: low.bias high.bias
    widening 4 0 0: high.weight
    """

    def __init__(self, n):
        super().__init__()
        self.mlp, self.low, self.high = Mlp(n), nn.Linear(n, 4), nn.Linear(4, n)
        nn.init.zeros_(self.high.weight)

    def forward(self, x):
        x = self.mlp(x)
        return x + self.high(F.gelu(self.low(x)))


class Lora(nn.Module):
    def __init__(self, n, merge=False):
        super().__init__()
        self.base, self.merge = linear(n, n), merge
        self.one, self.two = nn.Parameter(torch.randn(4, n)), nn.Parameter(torch.zeros(n, 4))

    def forward(self, x):
        if self.merge:
            return F.linear(x, self.base.weight + self.two @ self.one)
        return self.base(x) + x @ self.one.T @ self.two.T * 0.5


@attention()
class WithLora(Apart):
    """query n -1: a.base.weight
    key n -1: b.weight
    value n -1: c.weight
    attention_output n -1: d.weight
    narrowing n -1: a.one
    widening 4 0 0: a.two
    """

    def __init__(self, n, merge=False):
        super().__init__(n)
        self.a = Lora(n, merge)


@case(refused="'blocks.0.attn.a.(one|two)' goes into a product of parameters")
def lora_merged(n):
    return Stack(n, lambda n: WithLora(n, merge=True), Mlp, Rms)


class Gamma(nn.Module):
    """x-transformers' norm, and its LayerScale: gamma starts at 0 and is called gamma."""

    def __init__(self, n):
        super().__init__()
        self.gamma = nn.Parameter(torch.zeros(n))

    def forward(self, x):
        return F.layer_norm(x, x.shape[-1:]) * (self.gamma + 1)


@attention()
class OneKey(nn.Module):
    """One key and value for all heads; a gate and a gain that starts at 0 close the branch.

    query n -1: to_q.weight
    key n -1: to_k.weight
    value n -1: to_v.weight
    hidden n -1 0: to_gate.weight
    hidden_bias kept: to_gate.bias
    attention_output n -1: to_out.weight
    layer_scale 0: gain
    """

    def __init__(self, n):
        super().__init__()
        self.to_q, self.to_k, self.to_v = linear(n, n), linear(n, HEAD), linear(n, HEAD)
        self.to_gate, self.to_out = nn.Linear(n, n), linear(n, n)
        self.gain = nn.Parameter(torch.zeros(n))
        nn.init.zeros_(self.to_gate.weight)
        nn.init.constant_(self.to_gate.bias, 10.0)

    def forward(self, x):
        q, k, v = heads(self.to_q(x)), self.to_k(x), self.to_v(x)
        dots = torch.einsum("bhid,bjd->bhij", q, k) / HEAD**0.5
        y = merged(torch.einsum("bhij,bjd->bhid", dots.softmax(dim=-1), v))
        return self.to_out(y * self.to_gate(x).sigmoid()) * self.gain


@case(root)
def gamma_gates_and_one_key(n):
    """ends OneKey Mlp
    norm_scale 0: blocks.*.n1.gamma blocks.*.n2.gamma
    final_norm_scale 0: final.gamma
    """
    return Stack(n, OneKey, Mlp, Gamma)


@case(root, look)
class Pooled(nn.Module):
    """Learned queries gather a sequence (Perceiver's, attention pooling).

    patch_embedding 48 0: patch.weight
    position_embedding: latents
    query n -1: attn.query.weight
    key n -1: attn.key.weight
    value n -1: attn.value.weight
    attention_output n -1: attn.out.weight
    readout n -1: head.weight
    """

    def __init__(self, n):
        super().__init__()
        self.patch, self.head = linear(48, n), linear(n, 5)
        self.latents, self.attn = nn.Parameter(torch.randn(1, 3, n)), Cross(n, bias=False)

    def forward(self, image):
        x = self.patch(patches(image))
        return self.head(self.attn(self.latents.expand(len(x), -1, -1), x).mean(1))


class Parallel(nn.Module):
    """PaLM's: attention and MLP side by side, and all that reads the stream in one matrix."""

    def __init__(self, n):
        super().__init__()
        self.n, self.all = n, linear(n, n + 2 * HEAD + 8 * n)
        self.attn_out, self.ff_out = linear(n, n), linear(4 * n, n)

    def forward(self, x):
        q, k, v, gate, up = self.all(x).split((self.n, HEAD, HEAD, *[4 * self.n] * 2), dim=-1)
        scores = torch.einsum("bhid,bjd->bhij", heads(q) * HEAD**-0.5, k)
        y = merged(torch.einsum("bhij,bjd->bhid", scores.softmax(-1), v))
        return self.attn_out(y) + self.ff_out(F.silu(gate) * up)


@case(root)
class Palm(nn.Module):
    """ends
    final_norm_scale: final.weight
    norm_scale: blocks.*.0.weight
    qkv n -1: blocks.*.1.all.weight
    attention_output n -1: blocks.*.1.attn_out.weight
    mlp_out 4*n -1: blocks.*.1.ff_out.weight
    """

    def __init__(self, n):
        super().__init__()
        self.wte, self.head, self.final = nn.Embedding(TOKENS, n), linear(n, TOKENS), Rms(n)
        self.blocks = nn.ModuleList(nn.Sequential(Rms(n), Parallel(n)) for _ in range(2))

    def forward(self, ids):
        x = self.wte(ids)
        for block in self.blocks:
            x = block(x) + x
        return self.head(self.final(x))


class WeightNorm(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.v, self.g = nn.Parameter(torch.randn(n, n)), nn.Parameter(torch.ones(n, 1))

    def forward(self, x):
        return F.linear(x, self.g * self.v / self.v.norm(dim=1, keepdim=True))


@case(run=few)
class Plain(nn.Module):
    """patch_embedding 6 0: first.weight
    hidden_bias: first.bias
    hidden n -1: mid.v
    layer_scale: mid.g
    readout n -1: last.weight
    readout_bias: last.bias
    """

    def __init__(self, n):
        super().__init__()
        self.first, self.mid, self.last = nn.Linear(6, n), WeightNorm(n), nn.Linear(n, 3)

    def forward(self, x):
        return self.last(F.relu(self.mid(F.relu(self.first(x)))))


@attention()
class PerHead(nn.Module):
    """Projections by head as flax has them: (n, heads, d).

    query/in_outs n -1: q
    key/in_outs n -1: k
    value/in_outs n -1: v
    attention_output/ins_out n -1: o
    """

    into, out = "nhd", "hdn"

    def __init__(self, n):
        super().__init__()
        sizes = {"n": n, "h": n // HEAD, "d": HEAD}
        made = lambda axes: nn.Parameter(torch.randn([sizes[axis] for axis in axes]))
        self.q, self.k, self.v = (made(self.into) for _ in range(3))
        self.o = made(self.out)

    def forward(self, x):
        q, k, v = (torch.einsum(f"btn,{self.into}->bhtd", x, w) for w in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v)
        return torch.einsum(f"bhtd,{self.out}->btn", y, self.o)


@attention()
class PerHeadOutputsFirst(PerHead):
    """query/outs_in n -1: q
    key/outs_in n -1: k
    value/outs_in n -1: v
    attention_output n -1: o
    """

    into, out = "hdn", "nhd"


@attention()
class Sliced(Apart):
    """One matrix of which rows are taken before use.

    qkv n -1: all
    attention_output n -1: d.weight
    """

    def __init__(self, n):
        super().__init__(n)
        del self.a, self.b, self.c
        self.n, self.all = n, nn.Parameter(torch.randn(3 * n, n))

    def three(self, x):
        rows = (self.all[i * self.n : (i + 1) * self.n] for i in range(3))
        return [heads(F.linear(x, w)) for w in rows]


class Kernel(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v):
        q, k, v = (t.detach().numpy() for t in (q, k, v))
        return torch.from_numpy(q * k + v)

    @staticmethod
    def backward(ctx, grad):
        return grad, grad, grad


@attention(refused="takes the result of a function that was not seen")
class Unseen(Apart):
    """A kernel that torch does not see."""

    def forward(self, x):
        with torch._C.DisableTorchFunction():
            y = Kernel.apply(self.a(x), self.b(x), self.c(x))
        return self.d(y)


@attention(head_dim=lambda n: n // 4)
class Expanding(nn.Module):
    """Heads that grow with the width, and torch's own attention module.

    qkv n -1: inner.in_proj_weight
    hidden_bias: inner.in_proj_bias inner.out_proj.bias
    attention_output n -1: inner.out_proj.weight
    """

    def __init__(self, n):
        super().__init__()
        self.inner = nn.MultiheadAttention(n, 4, batch_first=True)

    def forward(self, x):
        return self.inner(x, x, x, need_weights=False)[0]


@attention()
class Wide(nn.Module):
    """torch's attention with values of another size: matrices apart, one more key and value.

    query n -1: inner.q_proj_weight
    key n -1: inner.k_proj_weight
    value 2*n -1: inner.v_proj_weight
    position_embedding: inner.bias_k inner.bias_v
    attention_output n -1: inner.out_proj.weight
    """

    def __init__(self, n):
        super().__init__()
        more = {"vdim": 2 * n, "add_bias_kv": True, "batch_first": True, "bias": False}
        self.inner = nn.MultiheadAttention(n, n // HEAD, **more)

    def forward(self, x):
        return self.inner(x, x, torch.cat((x, x), dim=-1))[0]


@attention(lambda d: 1.0)
class Relative(Apart):
    """T5's: no factor at all, a table of buckets.

    Apart
    relative_position: bias.weight
    """

    def __init__(self, n):
        super().__init__(n)
        self.bias = nn.Embedding(8, n // HEAD)

    def forward(self, x):
        q, k, v = self.three(x)
        at = torch.arange(x.shape[1])
        near = self.bias((at[:, None] - at).clamp(-4, 3) + 4).permute(2, 0, 1)
        scores = torch.matmul(q, k.transpose(3, 2))
        scores += near[None]
        return self.d(merged(torch.matmul(F.softmax(scores, dim=-1), v)))


@case(run=few, refused="'rows' is normalised before use")
class Cosine(nn.Module):
    """A head of unit rows on unit activations, times 10."""

    def __init__(self, n):
        super().__init__()
        self.first, self.rows = linear(6, n), nn.Parameter(torch.randn(3, n))

    def forward(self, x):
        x = F.normalize(F.relu(self.first(x)), dim=-1)
        return 10 * F.linear(x, F.normalize(self.rows, dim=-1))


def numbers(model):
    return model(IMAGE.flatten()[:30].reshape(5, 6))


@case(run=numbers)
class ProductsByHand(nn.Module):
    """patch_embedding 6 0: first
    hidden/transposed n -1: second
    readout n -1: third
    narrowing/experts n/4 -1: mixed
    layer_scale 0.5: chosen
    """

    def __init__(self, n):
        super().__init__()
        sizes = {"first": (n, 6), "second": (n, n), "third": (3, n), "mixed": (1, 4, n // 4)}
        for key, size in sizes.items():
            setattr(self, key, nn.Parameter(torch.randn(size)))
        self.chosen = nn.Parameter(torch.full((2, 1), 0.5))

    def forward(self, x):
        x = F.linear(x, self.first)
        x = torch.relu((x[:, :, None] * self.second).sum(-2))
        parts = (x.unflatten(-1, (4, -1)) * self.mixed).sum(dim=-1).sigmoid()
        x = x + (torch.stack([x, x.abs()], 1) * self.chosen).sum(1) * parts.repeat_interleave(
            x.shape[1] // 4, 1
        )
        return (self.third * x[:, None]).sum(2)


@case(run=numbers, refused="'w' sums over axes .* for which there is no layout")
class InnerProduct(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.first, self.w = linear(6, n), nn.Parameter(torch.ones(n))

    def forward(self, x):
        return (self.first(x) * self.w).sum(-1)


@case()
class HyperConnections(nn.Module):
    """Four streams that a few numbers mix.

    token_embedding: wte.weight
    layer_scale: mix out
    readout n -1: head.weight
    mlp_out n -1: mid.weight
    """

    def __init__(self, n):
        super().__init__()
        self.wte, self.mid, self.head = nn.Embedding(TOKENS, n), linear(n, n), linear(n, TOKENS)
        self.mix, self.out = (nn.Parameter(torch.ones(4)) for _ in range(2))

    def forward(self, ids):
        x = self.wte(ids).expand(4, -1, -1, -1)
        y = self.mid(F.relu(torch.einsum("sbtn,s->btn", x, self.mix)))
        return self.head((x + torch.einsum("btn,s->sbtn", y, self.out)).sum(0))


@attention(refused="'blocks.0.attn.one' counts 16 times where it is used, 8 times at the")
class Difference(nn.Module):
    """A difference of two attentions, by a number that a growing product of vectors makes."""

    def __init__(self, n):
        super().__init__()
        self.qkv, self.out = linear(n, 3 * n), linear(n, n)
        self.one, self.two = (nn.Parameter(0.1 * torch.randn(n // 4)) for _ in range(2))

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, -1)).transpose(1, 3).unbind(2)
        y = F.scaled_dot_product_attention(q, k, v)
        by = torch.exp((self.one * self.two).sum())
        return self.out(merged(torch.cat([y[:, :2], y[:, 2:] - by * y[:, :2]], 1)))


@case(root, run=look)
class PooledByAQuery(nn.Module):
    """A query that no matrix makes, and gates that are one number each.

    patch_embedding 48 0: first.weight
    hidden_bias: first.bias
    position_embedding: query
    key n -1: key.weight
    value n -1: value.weight
    layer_scale 0.5: gate
    layer_scale 0: closed
    mlp_in n -1: mlp.up.weight
    mlp_out 4*n -1: mlp.down.weight
    readout n -1: head.weight
    """

    def __init__(self, n):
        super().__init__()
        self.first, self.query = nn.Conv2d(3, n, 4, 4), nn.Parameter(torch.randn(1, 1, n))
        self.key, self.value, self.mlp, self.head = linear(n, n), linear(n, n), Mlp(n), linear(n, 7)
        self.gate, self.closed = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.zeros(()))

    def forward(self, x):
        x = torch.tanh(self.gate * self.first(x).flatten(2).mT)
        x = x + self.closed * self.mlp(x)
        places = (self.query.expand(len(x), -1, -1), self.key(x), self.value(x))
        return self.head(merged(F.scaled_dot_product_attention(*map(heads, places)))[:, 0])


@case(root, run=numbers)
class OneAsks(nn.Module):
    """A single row, without a batch, asks all others.

    patch_embedding 6 0: first.weight
    query n -1: query.weight
    key n -1: key.weight
    value n -1: value.weight
    readout n -1: head.weight
    """

    def __init__(self, n):
        super().__init__()
        self.first, self.query, self.key, self.value = linear(6, n), *(linear(n, n) for _ in "qkv")
        self.head = linear(n, 3)

    def forward(self, x):
        x = self.first(x)
        q, k, v = self.query(x[0])[None], self.key(x), self.value(x)
        q, k, v = (one.unflatten(-1, (-1, HEAD)).transpose(0, 1) for one in (q, k, v))
        return self.head(F.scaled_dot_product_attention(q, k, v).flatten())
