"""nanoGPT under muP, from plan to check to training, on the bytes of real text.

python examples/nanogpt.py                 # prints the plan and trains
param-groups check examples/nanogpt.py     # do changes stay of one size as the width grows?
"""

import sys
from pydoc_data.topics import topics  # Python's own manual: text that needs no download

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, ".")  # the repository's root, which is not installed
from param_groups import Everett, plan, traced
from param_groups.check import Check

HEAD, CONTEXT, LAYERS = 16, 64, 2
TEXT = torch.tensor(list("".join(topics.values()).encode())).unfold(0, CONTEXT + 1, CONTEXT + 1)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(width), nn.Module()
        self.attn.c_attn, self.attn.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.ln_2, self.mlp = nn.LayerNorm(width), nn.Module()
        self.mlp.c_fc, self.mlp.c_proj = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        q, k, v = self.attn.c_attn(self.ln_1(x)).unflatten(-1, (3, -1, HEAD)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # 1/sqrt(HEAD), as always
        x = x + self.attn.c_proj(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp.c_proj(F.gelu(self.mlp.c_fc(self.ln_2(x))))


class GPT(nn.Module):
    """nanoGPT's tensors and names, untied, drawn as nanoGPT draws them."""

    def __init__(self, width, letters=256):
        super().__init__()
        tables = {"wte": nn.Embedding(letters, width), "wpe": nn.Embedding(CONTEXT, width)}
        blocks = nn.ModuleList(Block(width) for _ in range(LAYERS))
        self.transformer = nn.ModuleDict({**tables, "h": blocks, "ln_f": nn.LayerNorm(width)})
        self.lm_head = nn.Linear(width, letters, bias=False)
        for name, tensor in self.named_parameters():
            if tensor.dim() == 2:
                nn.init.normal_(tensor, std=0.02 / (2 * LAYERS) ** (0.5 * ("c_proj" in name)))

    def forward(self, ids):
        x = self.transformer.wte(ids) + self.transformer.wpe(torch.arange(CONTEXT))
        for block in self.transformer.h:
            x = block(x)
        return self.lm_head(self.transformer.ln_f(x))


RULES = traced(GPT, lambda model: model(TEXT[:2, :-1])).rules  # of two small ones, at any width


def task(width, seed):
    """What the check trains; few tokens show how updates align, thousands hide it."""
    model, rule = GPT(width), Everett("mup", width=width, base_width=64, qk_exponent=-0.5)
    recipe = {"lr": 2**-8, "weight_decay": 0.1, "decay_mode": "per_group"}  # 0.1 as torch means it
    numbers = plan(model, RULES, rule, absorb_multipliers=True, **recipe)
    loss = lambda model, rows: F.cross_entropy(model(rows[:, :-1]).mT, rows[:, 1:])
    return Check(model, numbers, [TEXT[:1]], loss)


if __name__ == "__main__":
    run = task(width=128, seed=0)
    print(run.plan.table())
    run.plan.initialise(run.model, seed=0)
    optimizer = torch.optim.AdamW(run.plan.groups(run.model), betas=(0.9, 0.95))
    for step, rows in enumerate(torch.randperm(len(TEXT))[: 8 * 76].split(8)):
        (loss := run.loss(run.model, TEXT[rows])).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 25 == 0:
            print(f"step {step}: {loss.item():.3f} nats per byte")
