"""The encoder of Dinan, Yaida & Zhang (2023), Part I: nothing added, nothing left out.

One residual path per block, each behind its own LayerNorm without parameters; no biases but the
head's. Matrices are (out, in) and have the names of the groups in InitConfig and RatesConfig.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from effective_theory.dinan.config import Config, block_names, group
from effective_theory.dinan.gaussian import ACTIVATIONS
from param_groups.roles import Role, fans
from training.errors import UserError


class Use(NamedTuple):
    """One use of a tensor in a forward pass: output = inputs @ tensor.T, before any factor."""

    inputs: Tensor
    """(D, T, fan_in); what multiplies an embedding or a bias is one-hot or one."""
    output: Tensor
    """(D, T, fan_out), or anything with its gradient."""


Trace = dict[str, Use]


class Attention(nn.Module):
    """The residual path (1.13)-(1.19); head h has rows h C to (h + 1) C of Q, K and V."""

    def __init__(self, width: int, heads: int, causal: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        for name in ("query", "key", "value", "attention_output"):
            setattr(self, name, _tensor(width, width, dtype=dtype))

    def forward(self, s: Tensor, trace: Trace) -> Tensor:
        """Signals (D, T, n) -> residual (D, T, n)."""
        query, key, value = (
            _linear(self, name, s, trace).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for name in ("query", "key", "value")
        )
        mixed = self.weights(query, key) @ value
        return _linear(self, "attention_output", mixed.transpose(1, 2).flatten(2), trace)

    def weights(self, query: Tensor, key: Tensor) -> Tensor:
        """The self-attention matrix (D, H, T, T) of (1.17) or (1.18), from (D, H, T, C) twice."""
        products = query @ key.mT * query.shape[-1] ** -0.5
        if self.causal:
            later = torch.ones(products.shape[-2:], dtype=torch.bool).triu(1)
            products = products.masked_fill(later, -torch.inf)
        return products.softmax(-1)


class Mlp(nn.Module):
    """The residual path (1.20)-(1.21)."""

    def __init__(self, width: int, ratio: int, activation: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[activation]
        self.mlp_in = _tensor(ratio * width, width, dtype=dtype)
        self.mlp_out = _tensor(width, ratio * width, dtype=dtype)

    def forward(self, s: Tensor, trace: Trace) -> Tensor:
        """Signals (D, T, n) -> residual (D, T, n)."""
        hidden = self.activation(_linear(self, "mlp_in", s, trace))
        return _linear(self, "mlp_out", hidden, trace)


class Encoder(nn.Module):
    """(1.1)-(1.4) at one width; `initialise` draws its values.

    A word embedding is (n_vocab, n), and `readout` is then another name of it. UserError if the
    width is not a multiple of model.heads.
    """

    def __init__(self, config: Config, width: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        model = config.model
        if width % model.heads:
            raise UserError(f"width {width} is not a multiple of model.heads {model.heads}")
        self.config, self.width, self.tied = config, width, model.stem == "language"
        size = model.outputs if self.tied else config.data.patch_size**2
        self.stem = _tensor(*((size, width) if self.tied else (width, size)), dtype=dtype)
        self.position = _tensor(config.tokens, width, dtype=dtype)
        attention = partial(Attention, width, model.heads, model.causal, dtype)
        mlp = partial(Mlp, width, model.mlp_ratio, model.activation, dtype)
        self.attention = nn.ModuleList(attention() for _ in range(model.depth))
        self.mlp = nn.ModuleList(mlp() for _ in range(model.depth))
        self.readout = self.stem if self.tied else _tensor(model.outputs, width, dtype=dtype)
        self.readout_bias = None if self.tied else _tensor(model.outputs, dtype=dtype)

    @torch.no_grad()
    def initialise(self, generator: torch.Generator) -> Encoder:
        """Draws every tensor in the order of its name in `named_parameters`; returns itself."""
        for name, parameter in self.named_parameters():
            parameter.normal_(0, self.init_std(name), generator=generator)
        return self

    def init_std(self, name: str) -> float:
        """Standard deviation of a tensor's entries, (1.25)-(1.34); 0 for the head's bias."""
        role = self.role(name)
        if role is Role.READOUT_BIAS:
            return 0.0
        variance = getattr(self.config.init, group(name)) / self.fans(name)[0]
        if role is Role.READOUT:
            variance *= self.width**-self.config.model.s
        return variance**0.5

    def role(self, name: str) -> Role:
        """What a tensor does, in the words of param_groups."""
        if name == "stem" or (name == "readout" and self.tied):
            return Role.TOKEN_EMBEDDING if self.tied else Role.PATCH_EMBEDDING
        return Role.POSITION_EMBEDDING if name == "position" else Role(group(name))

    def fans(self, name: str) -> tuple[int, int]:
        """(fan_in, fan_out) of a tensor, 1 and n for embeddings of words and positions."""
        return fans(name, self.get_parameter(name).shape, self.role(name).facts.layout)

    def forward(self, x: Tensor, trace: Trace | None = None) -> dict[str, Tensor]:
        """Inputs (D, T, n_patch) or ids (D, T) -> z of every block, (D, T, n) or (D, T, n_out).

        With pooling the head's are (D, n_out), (1.23). `trace` receives every use of a tensor,
        those of the word embedding as "stem" and "readout", with a graph to differentiate.
        """
        differentiate = trace is not None
        trace = {} if trace is None else trace
        z = {"stem": self._stem(x, trace, differentiate)}
        signal = z["stem"]
        for name in block_names(self.config.model.depth)[1:-1]:
            block, own = self.get_submodule(name), Trace()
            signal = signal + block(self.norm(signal), own)
            trace.update({f"{name}.{tensor}": use for tensor, use in own.items()})
            z[name] = signal
        z["head"] = self._head(self.norm(signal), trace)
        return z

    def norm(self, z: Tensor) -> Tensor:
        """LayerNorm (1.11)."""
        return F.layer_norm(z, z.shape[-1:], eps=self.config.model.norm_eps)

    def _stem(self, x: Tensor, trace: Trace, differentiate: bool) -> Tensor:
        """(1.7) or (1.9)."""
        if self.tied:  # one-hot in a form that torch.vmap can map
            x = x[..., None] == torch.arange(len(self.stem))
        x = x.to(self.stem.dtype)
        z = x @ (self.stem if self.tied else self.stem.T) + self.position
        if differentiate:
            z.requires_grad_()
        tokens = torch.eye(len(self.position), dtype=x.dtype).expand(len(x), -1, -1)
        trace.update(stem=Use(x, z), position=Use(tokens, z))
        return z

    def _head(self, s: Tensor, trace: Trace) -> Tensor:
        """(1.22), pooled as (1.23), or (1.24) with the N_rescale of (1.34)."""
        z = _linear(self, "readout", s, trace)
        if self.readout_bias is None:  # a tied head
            return z * self.width ** (-(1 + self.config.model.s) / 2)
        z = z + self.readout_bias
        trace["readout_bias"] = Use(torch.ones_like(z[..., :1]), z)
        return z.mean(1) if self.config.model.pooling else z


def _tensor(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape, dtype=dtype))


def _linear(module: nn.Module, name: str, inputs: Tensor, trace: Trace) -> Tensor:
    output = inputs @ getattr(module, name).T
    trace[name] = Use(inputs, output)
    return output
