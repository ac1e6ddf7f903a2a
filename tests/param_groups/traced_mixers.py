"""Experts, state spaces and what else mixes tokens: cases as traced_blocks.py has them."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.param_groups.traced_blocks import (
    HEAD,
    Apart,
    Mlp,
    Rms,
    attention,
    case,
    linear,
    merged,
    mlp,
)
from tests.param_groups.traced_text import Swiglu
from tests.param_groups.traced_vision import look


@mlp
class Router(nn.Module):
    """Each token's two best of four experts, called one by one.

    router n -1: gate.weight
    mlp_in n -1: experts.*.w1.weight experts.*.w3.weight
    mlp_out 3*n -1: experts.*.w2.weight
    """

    def __init__(self, n):
        super().__init__()
        self.gate, self.experts = linear(n, 4), nn.ModuleList(Swiglu(n) for _ in range(4))

    def forward(self, x):
        flat = x.flatten(0, 1)
        best, which = self.gate(flat).topk(2, dim=-1)
        best, out = best.softmax(dim=-1), torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            row, slot = torch.where(which == i)
            out[row] += best[row, slot, None] * expert(flat[row])
        return out.view_as(x)


@mlp
class Stacked(nn.Module):
    """Experts in one tensor, all of them for all tokens, with biases; (in, out).

    router/transposed n -1: router
    mlp_in/experts_transposed n -1: up
    hidden_bias: up_bias down_bias
    mlp_out/experts_transposed 2*n -1: down
    """

    def __init__(self, n):
        super().__init__()
        self.router = nn.Parameter(torch.randn(n, 4) / n)
        self.up = nn.Parameter(torch.randn(4, n, 2 * n) * n**-0.5)
        self.up_bias = nn.Parameter(torch.zeros(4, 2 * n))
        self.down = nn.Parameter(torch.randn(4, 2 * n, n) * n**-0.5)
        self.down_bias = nn.Parameter(torch.zeros(4, n))

    def forward(self, x):
        flat = x.flatten(0, 1)
        scores, which = torch.topk(flat @ self.router, 2)
        weights = torch.zeros(len(flat), 4).scatter(1, which, scores.softmax(-1))
        every = torch.bmm(flat.expand(4, -1, -1), self.up) + self.up_bias[:, None]
        every = torch.bmm(F.gelu(every), self.down) + self.down_bias[:, None]
        return (every * weights.T[..., None]).sum(0).view_as(x)


@mlp
class Dispatched(nn.Module):
    """As in Switch: rows go to their expert and back by products with zeros and ones.

    narrowing n -1: gate.weight
    mlp_in/experts_transposed n -1: up
    mlp_out/experts_transposed 2*n -1: down
    """

    def __init__(self, n):
        super().__init__()
        self.gate = linear(n, 4)
        self.up = nn.Parameter(torch.randn(4, n, 2 * n) * n**-0.5)
        self.down = nn.Parameter(torch.randn(4, 2 * n, n) * (2 * n) ** -0.5)

    def forward(self, x):
        flat = x.flatten(0, 1)
        best, which = self.gate(flat).softmax(-1).max(-1)
        chosen = F.one_hot(which, 4).type_as(x)
        place = (chosen.cumsum(0) * chosen - 1).clamp(min=0)
        sent = F.one_hot(place.long(), len(flat)).type_as(x) * chosen[..., None]
        y = torch.einsum("tec,tn->ecn", sent, flat)
        y = torch.bmm(F.relu(torch.bmm(y, self.up)), self.down)
        return torch.einsum("tec,ecn->tn", sent * best[:, None, None], y).view_as(x)


@mlp
class AtOnce(Dispatched):
    """All experts for all tokens.

    router n -1: gate.weight
    mlp_in/experts_transposed n -1: up
    mlp_out/experts_transposed 2*n -1: down
    """

    def forward(self, x):
        weights, which = self.gate(x).softmax(-1).topk(2, -1)
        weights = torch.zeros(*x.shape[:2], 4).scatter(-1, which, weights)
        y = F.relu(torch.einsum("btn,enm->btem", x, self.up))
        return (torch.einsum("btem,emn->bten", y, self.down) * weights[..., None]).sum(2)


@mlp
class Hit(Dispatched):
    """As in transformers: outputs first, a loop over the experts that a token chose.

    router n -1: gate.weight
    mlp_in/experts n -1: up
    mlp_out/experts 2*n -1: down
    """

    def __init__(self, n):
        super().__init__(n)
        self.up, self.down = (nn.Parameter(one.detach().mT.clone()) for one in (self.up, self.down))

    def forward(self, x):
        flat = x.flatten(0, 1)
        best, which = self.gate(flat).softmax(-1).topk(2, -1)
        mask, out = F.one_hot(which, 4).permute(2, 1, 0), torch.zeros_like(flat)
        for (i,) in mask.sum((1, 2)).nonzero():
            slot, row = torch.where(mask[i])
            y = F.linear(F.relu(F.linear(flat[row], self.up[i])), self.down[i])
            out.index_add_(0, row, y * best[row, slot, None])
        assert sum(len(torch.where(which == i)[0]) for i in which.unique()) == which.numel()
        return out.view_as(x)


@mlp
class GroupedRows(Dispatched):
    """Rows in the order of their experts, one grouped product for all.

    router n -1: gate.weight
    mlp_in/experts_transposed n -1: up
    mlp_out/experts_transposed 2*n -1: down
    """

    def forward(self, x):
        flat = x.flatten(0, 1)
        best, which = self.gate(flat).softmax(-1).topk(1, -1)
        order, ends = which[:, 0].argsort(), torch.bincount(which[:, 0], minlength=4).cumsum(0)
        y, up, down = (one.bfloat16() for one in (flat[order], self.up, self.down))
        y = F.relu(torch._grouped_mm(y, up, offs=ends.int()))
        y = torch._grouped_mm(y, down, offs=ends.int()).type_as(x) * best[order]
        return torch.zeros_like(flat).index_add(0, order, y).view_as(x)


@mlp
class SoftExperts(nn.Module):
    """Slots that a softmax of a matrix's results fills: Soft MoE's, no attention.

    narrowing/in_outs n -1: slots
    mlp_in n -1: experts.*.up.weight
    mlp_out 4*n -1: experts.*.down.weight
    """

    def __init__(self, n):
        super().__init__()
        self.slots = nn.Parameter(torch.randn(n, 2, 3))
        self.experts = nn.ModuleList(Mlp(n) for _ in range(2))

    def forward(self, x):
        scores = torch.einsum("btn,nes->btes", x, self.slots)
        x = torch.einsum("btn,btes->ebsn", x, scores.softmax(1))
        x = torch.stack([expert(row) for expert, row in zip(self.experts, x, strict=True)])
        weights = scores.flatten(2).softmax(-1).view_as(scores)
        return torch.einsum("ebsn,btes->btn", x, weights)


@attention(None)
class StateSpace(nn.Module):
    """Mamba-2's parts: a convolution per channel, dt_bias, A_log, D, a gated norm.

    mlp_in n -1: wide.weight
    depthwise 4 0: conv.weight
    hidden_bias: conv.bias
    hidden_bias kept: dt_bias
    layer_scale kept: A_log
    layer_scale 0.5: D
    norm_scale: norm.weight
    mlp_out n -1: out.weight
    """

    def __init__(self, n):
        super().__init__()
        self.n, self.state = n, 4
        self.wide = linear(n, 2 * n + 2 * self.state + n // HEAD)
        self.conv = nn.Conv1d(n + 2 * self.state, n + 2 * self.state, 4, groups=n + 8, padding=3)
        dt = torch.exp(torch.rand(n // HEAD) * 3 - 6)
        self.dt_bias = nn.Parameter(dt + torch.log(-torch.expm1(-dt)))
        self.A_log = nn.Parameter(torch.log(torch.arange(1.0, n // HEAD + 1)))
        self.D = nn.Parameter(torch.full((n // HEAD,), 0.5))
        self.norm, self.out = Rms(n), linear(n, n)

    def forward(self, x):
        z, xbc, dt = self.wide(x).split((self.n, self.n + 8, self.n // HEAD), dim=-1)
        xbc = F.silu(self.conv(xbc.mT)[..., : x.shape[1]].mT)
        y, b, c = xbc.split((self.n, 4, 4), dim=-1)
        dt, y = F.softplus(dt + self.dt_bias), y.unflatten(-1, (-1, HEAD))
        decay = torch.exp(-torch.exp(self.A_log) * dt)
        state, outputs = torch.zeros(len(x), y.shape[2], HEAD, 4), []
        for t in range(x.shape[1]):
            entry = torch.einsum("bhd,bs->bhds", y[:, t] * dt[:, t, :, None], b[:, t])
            state = state * decay[:, t, :, None, None] + entry
            outputs.append(torch.einsum("bhds,bs->bhd", state, c[:, t]))
        y = torch.stack(outputs, 1) + y * self.D[:, None]
        return self.out(self.norm(y.flatten(2) * F.silu(z)))


@attention(None)
class Selective(nn.Module):
    """Mamba's: steps, inputs and outputs of the states are made by narrow matrices.

    mlp_in n -1: wide.weight
    depthwise 3 0: conv.weight
    hidden_bias: conv.bias
    narrowing n -1: low.weight
    widening 4 0: high.weight
    hidden_bias kept: high.bias
    layer_scale kept: A_log
    layer_scale: D
    mlp_out n -1: out.weight
    """

    def __init__(self, n):
        super().__init__()
        self.wide, self.conv = linear(n, 2 * n), nn.Conv1d(n, n, 3, groups=n, padding=2)
        self.low, self.high, self.out = linear(n, 4 + 2 * 3), nn.Linear(4, n), linear(n, n)
        nn.init.uniform_(self.high.bias, -6, -3)
        self.A_log = nn.Parameter(torch.arange(1.0, 4.0).log().repeat(n, 1))
        self.D = nn.Parameter(torch.ones(n))

    def forward(self, x):
        x, gate = self.wide(x).chunk(2, dim=-1)
        x = F.silu(self.conv(x.mT)[..., : x.shape[1]].mT)
        low, b, c = self.low(x).split((4, 3, 3), dim=-1)
        dt = F.softplus(self.high(low))[..., None]
        decay = torch.exp(-torch.exp(self.A_log) * dt)
        state, outputs = torch.zeros_like(decay[:, 0]), []
        for t in range(x.shape[1]):
            state = state * decay[:, t] + dt[:, t] * b[:, t, None] * x[:, t, :, None]
            outputs.append((state @ c[:, t, :, None])[..., 0])
        return self.out((torch.stack(outputs, 1) + x * self.D) * F.silu(gate))


@attention(None)
class Weighted(nn.Module):
    """RWKV's: means over the tokens before, with weights that decay and one for the token itself.

    hidden_bias kept: decay first
    mlp_in n -1: key.weight value.weight gate.weight
    mlp_out n -1: out.weight
    """

    def __init__(self, n):
        super().__init__()
        self.decay = nn.Parameter(torch.linspace(-5, 1, n))
        self.first = nn.Parameter(torch.full((n,), -1.2))
        self.key, self.value, self.gate, self.out = (linear(n, n) for _ in range(4))

    def forward(self, x):
        k, v, gate = self.key(x), self.value(x), torch.sigmoid(self.gate(x))
        keep, above, below, outputs = torch.exp(-torch.exp(self.decay)), 0, 0, []
        for t in range(x.shape[1]):
            weight, now = torch.exp(self.first + k[:, t]), torch.exp(k[:, t])
            outputs.append((above + weight * v[:, t]) / (below + weight))
            above, below = keep * above + now * v[:, t], keep * below + now
        return self.out(gate * torch.stack(outputs, 1))


@attention(None)
class LinearAttention(Apart):
    """No softmax, so no attention: nothing is a query.

    mlp_in n -1: a.weight b.weight c.weight
    mlp_out n -1: d.weight
    """

    def forward(self, x):
        q, k, v = self.three(x)
        return self.d(merged((F.elu(q) + 1) @ ((F.elu(k) + 1).mT @ v)))


@mlp
class Spectral(nn.Module):
    """A matrix over its largest singular value, as one step of a power iteration has it.

    mlp_in n -1: weight
    mlp_out n -1: out.weight
    """

    def __init__(self, n):
        super().__init__()
        self.weight, self.out = nn.Parameter(torch.randn(n, n)), linear(n, n)
        self.register_buffer("u", torch.randn(n))

    def forward(self, x):
        u = F.normalize(torch.mv(self.weight, torch.mv(self.weight.mT, self.u)), dim=0)
        v = F.normalize(torch.mv(self.weight.mT, u), dim=0)
        weight = self.weight / torch.dot(u, torch.mv(self.weight, v))
        return self.out(F.relu(F.linear(x, weight)))


@case(run=look)
class Mixer(nn.Module):
    """Tokens are mixed by matrices of a size of their own.

    patch_embedding 48 0: patch.weight
    hidden_bias: patch.bias back.bias
    widening 16 0: mix
    widening 32 0: back.weight
    mlp_in n -1: mlp.up.weight
    mlp_out 4*n -1: mlp.down.weight
    readout n -1: head.weight
    """

    def __init__(self, n):
        super().__init__()
        self.patch, self.head = nn.Conv2d(3, n, 4, 4), linear(n, 5)
        self.mix, self.back = nn.Parameter(torch.randn(32, 16)), nn.Conv1d(32, 16, 1)
        self.mlp = Mlp(n)

    def forward(self, image):
        x = self.patch(image).flatten(2).mT
        x = x + self.back(F.gelu(self.mix @ x))
        return self.head((x + self.mlp(x)).mean(1))


@mlp
class TimeMix(nn.Module):
    """RWKV's: mixes with the token before, by weights between 0 and 1.

    layer_scale kept: mix
    mlp_in n -1: key.weight
    mlp_out n -1: receptance.weight value.weight
    """

    def __init__(self, n):
        super().__init__()
        self.mix = nn.Parameter(torch.linspace(0, 1, n).reshape(1, 1, n))
        self.key, self.receptance, self.value = linear(n, n), linear(n, n), linear(n, n)

    def forward(self, x):
        before = F.pad(x, (0, 0, 1, -1))
        k = self.key(x * self.mix + before * (1 - self.mix))
        return torch.sigmoid(self.receptance(x)) * self.value(F.relu(k).square())


@mlp
class Conformer(nn.Module):
    """A convolution per channel inside a branch, gates by glu, batch norm.

    mlp_in n -1: inner.weight
    hidden_bias: inner.bias depth.bias
    depthwise 3 0: depth.weight
    norm_scale: norm.weight
    norm_bias: norm.bias
    mlp_out n -1: outer.weight
    """

    def __init__(self, n):
        super().__init__()
        self.inner, self.depth = nn.Conv1d(n, 2 * n, 1), nn.Conv1d(n, n, 3, padding=1, groups=n)
        self.norm, self.outer = nn.BatchNorm1d(n), nn.Conv1d(n, n, 1, bias=False)

    def forward(self, x):
        y = F.glu(self.inner(x.mT), dim=1)
        return self.outer(F.silu(self.norm(self.depth(y)))).mT
