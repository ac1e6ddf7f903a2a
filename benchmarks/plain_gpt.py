"""The yardstick of throughput.py: the shortest GPT one would write by hand, trained plainly.

The decoder of nanolm_c4 without multipliers, plan, loop or anything of this repository: torch's
layers, all logits at once, torch's cross-entropy, torch's fused AdamW on one group.
"""

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width, bias=False)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.proj = nn.Linear(width, width, bias=False)
        self.norm2 = nn.LayerNorm(width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, context, width = x.shape
        q, k, v = (
            part.view(rows, context, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).split(width, dim=-1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class PlainGPT(nn.Module):
    def __init__(self, vocab: int, context: int, layers: int, heads: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width, bias=False)
        self.readout = nn.Linear(width, vocab, bias=False)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        logits = self.readout(self.norm(self.blocks(x)))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def train(model, batches, *, bf16: bool, compiled: bool, device: str) -> None:
    """One AdamW step per batch until the batches end."""
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.98), fused=True)
    forward = torch.compile(model) if compiled else model
    for ids, targets in batches:
        with torch.autocast(device, torch.bfloat16, enabled=bf16):
            loss = forward(ids.to(device), targets.to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
