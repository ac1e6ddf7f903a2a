"""Adapters, gates and odd models: cases as traced_blocks.py has them."""

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
    heads,
    linear,
    merged,
    root,
)
from tests.param_groups.traced_vision import IMAGE, Cross, look, patches


@case(
    LAYER_NORMS
    + APART
    + MLP
    + """
wte.0.weight token_embedding 1 0
wte.1.weight widening 6 0
head.0.weight narrowing n -1
head.1.weight widening 6 0
""",
    root,
)
def factorised_embeddings(n):
    model = Stack(n, Apart, Mlp)
    model.wte = nn.Sequential(nn.Embedding(TOKENS, 6), linear(6, n))
    model.head = nn.Sequential(linear(n, 6), linear(6, TOKENS))
    return model


class Adapted(nn.Module):
    """A bottleneck of 4 after the MLP, closed at first."""

    def __init__(self, n):
        super().__init__()
        self.mlp, self.low, self.high = Mlp(n), nn.Linear(n, 4), nn.Linear(4, n)
        nn.init.zeros_(self.high.weight)

    def forward(self, x):
        x = self.mlp(x)
        return x + self.high(F.gelu(self.low(x)))


@case(
    ENDS
    + GAINS
    + APART
    + """
blocks.*.mlp.mlp.up.weight mlp_in n -1
blocks.*.mlp.mlp.down.weight mlp_out 4*n -1
blocks.*.mlp.low.weight narrowing n -1
blocks.*.mlp.low.bias hidden_bias 1 0
blocks.*.mlp.high.weight widening 4 0 0
blocks.*.mlp.high.bias hidden_bias 1 0
""",
    root,
)
def adapters(n):
    return Stack(n, Apart, Adapted, Rms)


class Lora(nn.Module):
    def __init__(self, n, merge=False):
        super().__init__()
        self.base, self.merge = linear(n, n), merge
        self.one, self.two = nn.Parameter(torch.randn(4, n)), nn.Parameter(torch.zeros(n, 4))

    def forward(self, x):
        if self.merge:
            return F.linear(x, self.base.weight + self.two @ self.one)
        return self.base(x) + x @ self.one.T @ self.two.T * 0.5


def with_lora(n, merge):
    model = Stack(n, Apart, Mlp, Rms)
    for block in model.blocks:
        block.attn.a = Lora(n, merge)
    return model


LORA = APART.replace("attn.a.weight", "attn.a.base.weight")


@case(
    ENDS
    + GAINS
    + LORA
    + MLP
    + """
blocks.*.attn.a.one narrowing n -1
blocks.*.attn.a.two widening 4 0 0
""",
    root,
)
def lora_beside(n):
    return with_lora(n, merge=False)


@case("", refused="'blocks.0.attn.a.(one|two)' goes into a product of parameters")
def lora_merged(n):
    return with_lora(n, merge=True)


class Gamma(nn.Module):
    """x-transformers' norm, and its LayerScale: gamma starts at 0 and is called gamma."""

    def __init__(self, n):
        super().__init__()
        self.gamma = nn.Parameter(torch.zeros(n))

    def forward(self, x):
        return F.layer_norm(x, x.shape[-1:]) * (self.gamma + 1)


class OneKey(nn.Module):
    """One key and value for all heads; a gate and a gain that starts at 0 close the branch."""

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


@case(
    ENDS
    + MLP
    + """
blocks.*.n1.gamma norm_scale 1 0 0
blocks.*.n2.gamma norm_scale 1 0 0
final.gamma final_norm_scale 1 0 0
blocks.*.attn.to_q.weight query n -1
blocks.*.attn.to_k.weight key n -1
blocks.*.attn.to_v.weight value n -1
blocks.*.attn.to_gate.weight hidden n -1 0
blocks.*.attn.to_gate.bias hidden_bias 1 0 kept
blocks.*.attn.to_out.weight attention_output n -1
blocks.*.attn.gain layer_scale 1 0 0
""",
    root,
)
def gamma_gates_and_one_key(n):
    return Stack(n, OneKey, Mlp, Gamma)


class Pooled(nn.Module):
    """Learned queries gather a sequence (Perceiver's, attention pooling)."""

    def __init__(self, n):
        super().__init__()
        self.patch, self.head = linear(48, n), linear(n, 5)
        self.latents, self.attn = nn.Parameter(torch.randn(1, 3, n)), Cross(n, bias=False)
        self.norm = nn.LayerNorm(n)

    def forward(self, image):
        x = self.patch(patches(image))
        return self.head(self.attn(self.norm(self.latents).expand(len(x), -1, -1), x).mean(1))


@case(
    """
patch.weight patch_embedding 48 0
latents position_embedding 1 0
norm.weight norm_scale 1 0
norm.bias norm_bias 1 0
attn.query.weight query n -1
attn.key.weight key n -1
attn.value.weight value n -1
attn.out.weight attention_output n -1
head.weight readout n -1
""",
    root,
    run=look,
)
def learned_queries(n):
    return Pooled(n)


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


class Palm(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.wte, self.head, self.final = nn.Embedding(TOKENS, n), linear(n, TOKENS), Rms(n)
        self.blocks = nn.ModuleList(nn.Sequential(Rms(n), Parallel(n)) for _ in range(2))

    def forward(self, ids):
        x = self.wte(ids)
        for block in self.blocks:
            x = block(x) + x
        return self.head(self.final(x))


@case(
    ENDS
    + """
final.weight final_norm_scale 1 0
blocks.*.0.weight norm_scale 1 0
blocks.*.1.all.weight qkv n -1
blocks.*.1.attn_out.weight attention_output n -1
blocks.*.1.ff_out.weight mlp_out 4*n -1
""",
    root,
)
def all_in_one_matrix(n):
    return Palm(n)


class WeightNorm(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.v, self.g = nn.Parameter(torch.randn(n, n)), nn.Parameter(torch.ones(n, 1))

    def forward(self, x):
        return F.linear(x, self.g * self.v / self.v.norm(dim=1, keepdim=True))


class Plain(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.first, self.mid, self.last = nn.Linear(6, n), WeightNorm(n), nn.Linear(n, 3)

    def forward(self, x):
        return self.last(F.relu(self.mid(F.relu(self.first(x)))))


@case(
    """
first.weight patch_embedding 6 0
first.bias hidden_bias 1 0
mid.v hidden n -1
mid.g layer_scale 1 0
last.weight readout n -1
last.bias readout_bias 1 0
""",
    run=lambda model: model(IMAGE.flatten()[:24].reshape(4, 6)),
)
def weight_norm(n):
    return Plain(n)


class PerHead(nn.Module):
    """Projections by head as flax has them: (n, heads, d), and outputs first: (heads, d, n)."""

    def __init__(self, n, turned=False):
        super().__init__()
        shape = (n // HEAD, HEAD, n) if turned else (n, n // HEAD, HEAD)
        self.how = "hdn" if turned else "nhd"
        self.q, self.k, self.v = (nn.Parameter(torch.randn(shape)) for _ in range(3))
        self.o = nn.Parameter(torch.randn((n, n // HEAD, HEAD) if turned else (n // HEAD, HEAD, n)))

    def forward(self, x):
        q, k, v = (torch.einsum(f"btn,{self.how}->bhtd", x, w) for w in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v)
        return torch.einsum("bhtd,nhd->btn" if self.how == "hdn" else "bhtd,hdn->btn", y, self.o)


PER_HEAD = """
blocks.*.attn.q query/in_outs n -1
blocks.*.attn.k key/in_outs n -1
blocks.*.attn.v value/in_outs n -1
blocks.*.attn.o attention_output/ins_out n -1
"""


@case(ENDS + GAINS + MLP + PER_HEAD, root)
def projections_by_head(n):
    return Stack(n, PerHead, Mlp, Rms)


@case(ENDS + GAINS + MLP + PER_HEAD.replace("in_outs", "outs_in").replace("/ins_out", ""), root)
def projections_by_head_outputs_first(n):
    return Stack(n, lambda n: PerHead(n, turned=True), Mlp, Rms)


class Sliced(Apart):
    """One matrix of which rows are taken before use."""

    def __init__(self, n):
        super().__init__(n)
        del self.a, self.b, self.c
        self.n, self.all = n, nn.Parameter(torch.randn(3 * n, n))

    def forward(self, x):
        rows = (self.all[i * self.n : (i + 1) * self.n] for i in range(3))
        q, k, v = (heads(F.linear(x, w)) for w in rows)
        return self.d(merged(F.scaled_dot_product_attention(q, k, v, is_causal=True)))


SLICED = "blocks.*.attn.all qkv n -1\nblocks.*.attn.d.weight attention_output n -1\n"


@case(ENDS + GAINS + MLP + SLICED, root)
def rows_of_a_fused_matrix(n):
    return Stack(n, Sliced, Mlp, Rms)


class Unseen(Apart):
    """A kernel that torch does not see."""

    def forward(self, x):
        class Kernel(torch.autograd.Function):
            @staticmethod
            def forward(ctx, q, k, v):
                q, k, v = (t.detach().numpy() for t in (q, k, v))
                return torch.from_numpy(q * k + v)

            @staticmethod
            def backward(ctx, grad):
                return grad, grad, grad

        with torch._C.DisableTorchFunction():
            y = Kernel.apply(self.a(x), self.b(x), self.c(x))
        return self.d(y)


@case("", refused="takes the result of a function that was not seen")
def unseen_kernel(n):
    return Stack(n, Unseen, Mlp, Rms)


class Expanding(nn.Module):
    """Heads that grow with the width, and torch's own attention module."""

    def __init__(self, n):
        super().__init__()
        self.inner = nn.MultiheadAttention(n, 4, batch_first=True)

    def forward(self, x):
        return self.inner(x, x, x, need_weights=False)[0]


@case(
    ENDS
    + GAINS
    + MLP
    + """
blocks.*.attn.inner.in_proj_weight qkv n -1
blocks.*.attn.inner.in_proj_bias hidden_bias 1 0
blocks.*.attn.inner.out_proj.weight attention_output n -1
blocks.*.attn.inner.out_proj.bias hidden_bias 1 0
""",
    root,
    head_dim=lambda n: n // 4,
)
def torch_attention_of_growing_heads(n):
    return Stack(n, Expanding, Mlp, Rms)


class Wide(nn.Module):
    """torch's attention with values of another size: matrices apart, biases of keys and values."""

    def __init__(self, n):
        super().__init__()
        more = {"vdim": 2 * n, "add_bias_kv": True, "batch_first": True, "bias": False}
        self.inner = nn.MultiheadAttention(n, n // HEAD, **more)

    def forward(self, x):
        return self.inner(x, x, torch.cat((x, x), dim=-1))[0]


@case(
    ENDS
    + GAINS
    + MLP
    + """
blocks.*.attn.inner.q_proj_weight query n -1
blocks.*.attn.inner.k_proj_weight key n -1
blocks.*.attn.inner.v_proj_weight value 2*n -1
blocks.*.attn.inner.bias_k hidden_bias 1 0
blocks.*.attn.inner.bias_v hidden_bias 1 0
blocks.*.attn.inner.out_proj.weight attention_output n -1
""",
    root,
)
def torch_attention_with_matrices_apart(n):
    return Stack(n, Wide, Mlp, Rms)


class Relative(nn.Module):
    """T5's: no factor at all, a table of buckets."""

    def __init__(self, n):
        super().__init__()
        self.q, self.k, self.v, self.o = (linear(n, n) for _ in range(4))
        self.bias = nn.Embedding(8, n // HEAD)

    def forward(self, x):
        at = torch.arange(x.shape[1])
        near = self.bias((at[:, None] - at).clamp(-4, 3) + 4).permute(2, 0, 1)
        scores = torch.matmul(heads(self.q(x)), heads(self.k(x)).transpose(3, 2))
        scores += near[None]
        return self.o(merged(torch.matmul(F.softmax(scores, dim=-1), heads(self.v(x)))))


@case(
    ENDS
    + GAINS
    + MLP
    + """
blocks.*.attn.q.weight query n -1
blocks.*.attn.k.weight key n -1
blocks.*.attn.v.weight value n -1
blocks.*.attn.o.weight attention_output n -1
blocks.*.attn.bias.weight relative_position 1 0
""",
    lambda d: 1.0,
)
def t5_without_a_factor(n):
    return Stack(n, Relative, Mlp, Rms)


class Cosine(nn.Module):
    """A head of unit rows on unit activations, times 10."""

    def __init__(self, n):
        super().__init__()
        self.first, self.rows = linear(6, n), nn.Parameter(torch.randn(3, n))

    def forward(self, x):
        x = F.normalize(F.relu(self.first(x)), dim=-1)
        return 10 * F.linear(x, F.normalize(self.rows, dim=-1))


@case(
    "",
    run=lambda model: model(IMAGE.flatten()[:24].reshape(4, 6)),
    refused="'rows' is normalised before use",
)
def cosine_head(n):
    return Cosine(n)
