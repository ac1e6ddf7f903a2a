"""A decoder of plain torch modules under muP, with its own rules, on the bytes of real text.

python examples/plain_torch.py
param-groups check examples/plain_torch.py
"""

import sys
from pydoc_data.topics import topics  # Python's own manual: text that needs no download

import torch
from torch import nn

sys.path.insert(0, ".")  # the repository's root, which is not installed
from param_groups import Everett, Role, Rule, plan
from param_groups.check import Check

TEXT = torch.tensor(list("".join(topics.values()).encode())).unfold(0, 65, 65)  # passages
RULES = (
    Rule("0.weight", Role.TOKEN_EMBEDDING),
    Rule("?.qkv.weight", Role.QKV),
    Rule("?.out.weight", Role.ATTENTION_OUTPUT),
    Rule("?.up.weight", Role.MLP_IN),
    Rule("?.down.weight", Role.MLP_OUT),
    Rule("?.norm?.weight", Role.NORM_SCALE),
    Rule("3.weight", Role.NORM_SCALE),
    Rule("4.weight", Role.READOUT),
)


class Block(nn.Module):
    def __init__(self, width, scale):
        super().__init__()
        self.norm1, self.norm2, self.scale = nn.RMSNorm(width), nn.RMSNorm(width), scale
        self.qkv, self.out = nn.Linear(width, 3 * width, False), nn.Linear(width, width, False)
        self.up, self.down = nn.Linear(width, 4 * width, False), nn.Linear(4 * width, width, False)

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, -1, 16)).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


def task(width, seed):
    """What the coordinate check trains; few tokens show how updates align, thousands hide it."""
    rule = Everett("mup", width=width, base_width=64)  # lr is the rate before absorption at 64
    options = {"absorb_multipliers": True, "applied": {"attention_scale": 1 / 16}, "head_dim": 16}
    blocks = [Block(width, 1 / 16) for _ in range(2)] + [nn.RMSNorm(width)]
    model = nn.Sequential(nn.Embedding(256, width), *blocks, nn.Linear(width, 256, False))
    numbers = plan(model, RULES, rule, lr=2**-7, **options)
    loss = lambda model, ids: nn.functional.cross_entropy(model(ids[:, :-1]).mT, ids[:, 1:])
    return Check(model, numbers, [TEXT[:1]], loss)


if __name__ == "__main__":
    run = task(width=128, seed=0)
    run.plan.initialise(run.model, seed=0)
    optimizer = torch.optim.AdamW(run.plan.groups(run.model), betas=(0.9, 0.95))
    for step, rows in enumerate(torch.randperm(len(TEXT))[: 8 * 76].split(8)):
        (loss := run.loss(run.model, TEXT[rows])).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 25 == 0:
            print(f"step {step}: {loss.item():.3f} nats per byte")
