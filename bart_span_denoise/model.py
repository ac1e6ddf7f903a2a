"""BART as Dinan, Yaida & Zhang train it (Part II, section 2B): BART-large and R2C2.

An encoder and a decoder of `layers` pre-LayerNorm blocks each, learned positions, exact GELU,
norms (eps 1e-5) without affine parameters, no biases. One word embedding serves encoder, decoder
and output. Beside the norm that opens every residual branch there are four: after the position sum
of either stem, after the last encoder block, and before the output.

Sizes: B batch, S encoder tokens, T decoder tokens, V vocabulary, D width, H heads, K head
dimension.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from param_groups import Role, Rule
from param_groups.layers import Embedding, Linear, Scaled
from training import sharding
from training.errors import UserError
from training.linear_cross_entropy import linear_cross_entropy

PADDING = 1  # fairseq's index of [pad]
POSITION_ROWS = 514  # 512 tokens of content, a start and an end
NORM_EPS = 1e-5

Positions = Literal["paper", "fairseq"]

# The word embedding is one tensor under one name, so the plan has one row for its three uses. Its
# numbers are Dinan's for init="bart"; N_rescale, which the output alone has, goes to the model.
RULES = (
    Rule("word_embedding.weight", Role.TOKEN_EMBEDDING),
    Rule("encoder_positions.weight", Role.POSITION_EMBEDDING),
    Rule("decoder_positions.weight", Role.POSITION_EMBEDDING),
    Rule("*coder_blocks.*.attention.query.weight", Role.QUERY),
    Rule("*coder_blocks.*.attention.key.weight", Role.KEY),
    Rule("*coder_blocks.*.attention.value.weight", Role.VALUE),
    Rule("*coder_blocks.*.attention.output.weight", Role.ATTENTION_OUTPUT),
    Rule("decoder_blocks.*.cross_attention.query.weight", Role.QUERY),
    Rule("decoder_blocks.*.cross_attention.key.weight", Role.KEY),
    Rule("decoder_blocks.*.cross_attention.value.weight", Role.VALUE),
    Rule("decoder_blocks.*.cross_attention.output.weight", Role.ATTENTION_OUTPUT),
    Rule("*coder_blocks.*.mlp.up.weight", Role.MLP_IN),
    Rule("*coder_blocks.*.mlp.down.weight", Role.MLP_OUT),
)


def norm(width: int) -> nn.LayerNorm:
    """Normalisation over the last axis, without parameters."""
    return nn.LayerNorm(width, eps=NORM_EPS, elementwise_affine=False)


def at_least_float32(x: Tensor) -> Tensor:
    """Softmax and loss are computed in float32 also under autocast."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


class _FrozenRow(torch.autograd.Function):
    """A tensor as it is, whose gradient is zero in one row. Costs the forward pass nothing."""

    @staticmethod
    def forward(ctx, weight: Tensor, row: int) -> Tensor:
        ctx.row = row
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx, grad: Tensor):
        index = torch.tensor([ctx.row], device=grad.device)
        return grad.index_fill(0, index, 0.0), None


class WordEmbedding(Embedding):
    """m W[ids], and the same W as the matrix of the output; [pad]'s row gets no gradient.

    Neither from lookups nor from the output, where [pad] takes part in every softmax. A row that
    starts at zero (`zero_padding`) therefore stays zero under any optimiser and weight decay. In
    fairseq the output does train that row; values and all other gradients are equal.
    """

    def __init__(self, vocab_size: int, width: int, padding: int) -> None:
        super().__init__(vocab_size, width)
        self.padding = padding

    def forward(self, ids: Tensor) -> Tensor:
        """ids (...) -> (..., width)."""
        rows = F.embedding(ids, self.weight, padding_idx=self.padding)
        return rows if self.multiplier == 1.0 else rows * self.multiplier

    def output_weight(self) -> Tensor:
        """W (V, D), without the multiplier."""
        return _FrozenRow.apply(self.weight, self.padding)

    @torch.no_grad()
    def zero_padding(self) -> None:
        """Sets [pad]'s row to zero, also of a weight that is sharded."""
        first, _ = sharding.rows(self.weight)
        weight = sharding.local(self.weight)
        if first <= self.padding < first + len(weight):
            weight[self.padding - first] = 0.0


class Attention(Scaled):
    """Multi-head attention; logits are q.k times `attention_scale`; dropout on probabilities."""

    factors = ("attention_scale",)

    def __init__(self, width: int, heads: int, attention_scale: float, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.head_dim = width // heads
        self.attention_scale = attention_scale
        self.dropout = dropout
        self.query = Linear(width, width)
        self.key = Linear(width, width)
        self.value = Linear(width, width)
        self.output = Linear(width, width)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(
        self,
        x_BxTxD: Tensor,
        source_BxSxD: Tensor,
        mask_Bx1x1xS: Tensor | None = None,
        causal: bool = False,
    ) -> Tensor:
        """Queries from x, keys and values from the source; True in the mask may be attended to."""
        y_BxHxTxK = F.scaled_dot_product_attention(
            self._heads(self.query(x_BxTxD)),
            self._heads(self.key(source_BxSxD)),
            self._heads(self.value(source_BxSxD)),
            attn_mask=mask_Bx1x1xS,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=causal,
            scale=self.attention_scale,
        )
        return self.output(y_BxHxTxK.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Two dense layers with exact GELU between."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = Linear(width, hidden)
        self.down = Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) -> (..., D)."""
        return self.down(F.gelu(self.up(x)))


class EncoderBlock(nn.Module):
    """Self-attention over all tokens that are not [pad], then MLP."""

    def __init__(self, width: int, hidden: int, attention: dict, dropout: float) -> None:
        super().__init__()
        self.attention_norm = norm(width)
        self.attention = Attention(width, **attention)
        self.mlp_norm = norm(width)
        self.mlp = MLP(width, hidden)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BxSxD: Tensor, mask_Bx1x1xS: Tensor) -> Tensor:
        """(B, S, D) -> (B, S, D)."""
        y = self.attention_norm(x_BxSxD)
        x_BxSxD = x_BxSxD + self.dropout(self.attention(y, y, mask_Bx1x1xS))
        return x_BxSxD + self.dropout(self.mlp(self.mlp_norm(x_BxSxD)))


class DecoderBlock(nn.Module):
    """Causal self-attention, attention to the encoder's output, then MLP."""

    def __init__(self, width: int, hidden: int, attention: dict, dropout: float) -> None:
        super().__init__()
        self.attention_norm = norm(width)
        self.attention = Attention(width, **attention)
        self.cross_attention_norm = norm(width)
        self.cross_attention = Attention(width, **attention)
        self.mlp_norm = norm(width)
        self.mlp = MLP(width, hidden)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BxTxD: Tensor, source_BxSxD: Tensor, mask_Bx1x1xS: Tensor) -> Tensor:
        """(B, T, D) and the encoder's normalised output (B, S, D) -> (B, T, D)."""
        y = self.attention_norm(x_BxTxD)
        x_BxTxD = x_BxTxD + self.dropout(self.attention(y, y, causal=True))
        y = self.cross_attention_norm(x_BxTxD)
        x_BxTxD = x_BxTxD + self.dropout(self.cross_attention(y, source_BxSxD, mask_Bx1x1xS))
        return x_BxTxD + self.dropout(self.mlp(self.mlp_norm(x_BxTxD)))


class Bart(Scaled):
    """The encoder-decoder: V D + 2 R D + (12 + 16) L D^2 parameters at mlp_ratio 4, R positions.

    The plan sets `attention_scale` and `logit_multiplier` (N_rescale). `positions`
    "paper": token t uses row t, so R = 514 rows hold 512 tokens of content, a start and an end;
    "fairseq": token t uses row t + padding + 1, and 514 rows hold 512 tokens, those two included.
    `dropout` acts where fairseq's BART has it, on both stems and on every residual branch, and
    `attention_dropout` on attention probabilities; both in training only.

    [pad] tokens stand at the end of a row. As keys they are masked in the encoder and in attention
    to its output. The decoder's self-attention needs no such mask: only later positions see a
    [pad], and these are [pad]s, too, whose targets carry no loss.

    After the plan has initialised it, call `zero_padding`.
    """

    factors = ("logit_multiplier",)

    def __init__(
        self,
        *,
        vocab_size: int,
        width: int,
        heads: int,
        layers: int,
        attention_scale: float = math.nan,
        logit_multiplier: float = math.nan,
        mlp_ratio: int = 4,
        position_rows: int = POSITION_ROWS,
        positions: Positions = "paper",
        padding: int = PADDING,
        dropout: float = 0.1,
        attention_dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.heads = heads
        self.logit_multiplier = logit_multiplier
        self.padding = padding
        self.positions = positions
        self.first_position = 0 if positions == "paper" else padding + 1
        self.word_embedding = WordEmbedding(vocab_size, width, padding)
        attention = {
            "heads": heads,
            "attention_scale": attention_scale,
            "dropout": attention_dropout,
        }
        shape = (width, mlp_ratio * width, attention, dropout)
        self.encoder_positions = Embedding(position_rows, width)
        self.encoder_stem_norm = norm(width)
        self.encoder_blocks = nn.ModuleList(EncoderBlock(*shape) for _ in range(layers))
        self.encoder_final_norm = norm(width)
        self.decoder_positions = Embedding(position_rows, width)
        self.decoder_stem_norm = norm(width)
        self.decoder_blocks = nn.ModuleList(DecoderBlock(*shape) for _ in range(layers))
        self.decoder_final_norm = norm(width)
        self.dropout = nn.Dropout(dropout)

    def zero_padding(self) -> None:
        """Sets the word embedding's row of [pad] to zero, where it then stays."""
        self.word_embedding.zero_padding()

    @property
    def longest(self) -> int:
        """The most tokens that the positions have rows for."""
        return self.encoder_positions.num_embeddings - self.first_position

    def forward(
        self,
        encoder_ids_BxS: Tensor,
        decoder_ids_BxT: Tensor,
        targets_BxT: Tensor | None = None,
    ) -> Tensor:
        """Logits (B, T, V), or with targets the summed cross-entropy in nats.

        Targets of -100 carry no loss; divide by the number of the others for the mean. The loss
        never holds all logits at once. Raises UserError for rows that are too long.
        """
        source_BxSxD, mask_Bx1x1xS = self.encode(encoder_ids_BxS)
        x_BxTxD = self.decode(decoder_ids_BxT, source_BxSxD, mask_Bx1x1xS)
        weight_VxD = self.word_embedding.output_weight()
        if targets_BxT is None:
            return at_least_float32(F.linear(x_BxTxD * self.logit_multiplier, weight_VxD))
        return linear_cross_entropy(
            x_BxTxD.flatten(0, 1), weight_VxD, targets_BxT.flatten(), self.logit_multiplier
        )

    def encode(self, ids_BxS: Tensor) -> tuple[Tensor, Tensor]:
        """The encoder's normalised output (B, S, D), and its mask (B, 1, 1, S) without [pad]s."""
        mask_Bx1x1xS = self._attendable(ids_BxS)
        x_BxSxD = self._stem(ids_BxS, self.encoder_positions, self.encoder_stem_norm)
        for block in self.encoder_blocks:
            x_BxSxD = block(x_BxSxD, mask_Bx1x1xS)
        return self.encoder_final_norm(x_BxSxD), mask_Bx1x1xS

    def decode(self, ids_BxT: Tensor, source_BxSxD: Tensor, mask_Bx1x1xS: Tensor) -> Tensor:
        """The signal s (B, T, D) that the output multiplies with N_rescale and W."""
        x_BxTxD = self._stem(ids_BxT, self.decoder_positions, self.decoder_stem_norm)
        for block in self.decoder_blocks:
            x_BxTxD = block(x_BxTxD, source_BxSxD, mask_Bx1x1xS)
        return self.decoder_final_norm(x_BxTxD)

    def _attendable(self, ids_BxS: Tensor) -> Tensor:
        """True at tokens other than [pad]; all True in an all-[pad] row, which could give NaN."""
        token_BxS = ids_BxS != self.padding
        return (token_BxS | ~token_BxS.any(1, keepdim=True))[:, None, None, :]

    def _stem(self, ids: Tensor, positions: Embedding, stem_norm: nn.Module) -> Tensor:
        length = ids.shape[1]
        if length > self.longest:
            raise UserError(
                f"a row of {length} tokens is longer than the {self.longest} that "
                f"{positions.num_embeddings} position rows hold with positions: {self.positions}; "
                "make the samples shorter or model.position_rows larger"
            )
        rows = torch.arange(length, device=ids.device) + self.first_position
        return self.dropout(stem_norm(self.word_embedding(ids) + positions(rows)))
