"""What a user outside of the clone writes: a model of other people's, its plan, a check of both.

`MODEL=nanogpt param-groups check models_of_users.py` checks, `MODEL=nanogpt python
models_of_users.py` trains; nanogpt, llama (two heads share a key) or vit (timm's). ONE_RATE=1 is
what everybody does without a plan, which the check has to refuse.
"""

import os

import torch
import torch.nn.functional as F
from torch import nn

from param_groups import Everett, plan, rules_for
from param_groups.check import Check

NAME, BASE, HEAD, TOKENS = os.environ.get("MODEL", "nanogpt"), 64, 16, 32


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        q, k, v = self.c_attn(x).unflatten(-1, (3, -1, HEAD)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.c_fc, self.c_proj = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return self.c_proj(F.gelu(self.c_fc(x)))


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(width), Attention(width)
        self.ln_2, self.mlp = nn.LayerNorm(width), Mlp(width)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class NanoGPT(nn.Module):
    """nanoGPT's modules and names, untied."""

    def __init__(self, width):
        super().__init__()
        tables = {"wte": nn.Embedding(TOKENS, width), "wpe": nn.Embedding(16, width)}
        blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.transformer = nn.ModuleDict({**tables, "h": blocks, "ln_f": nn.LayerNorm(width)})
        self.lm_head = nn.Linear(width, TOKENS, bias=False)

    def forward(self, ids):
        x = self.transformer.wte(ids) + self.transformer.wpe.weight[: ids.shape[1]]
        for block in self.transformer.h:
            x = block(x)
        return self.lm_head(self.transformer.ln_f(x))


def built(width):
    """(model, its logits of a batch)."""
    if NAME == "nanogpt":
        return NanoGPT(width), lambda model, x: model(x)
    if NAME == "vit":
        import timm

        name = "vit_tiny_patch16_224"
        sizes = {"img_size": 16, "patch_size": 4, "embed_dim": width, "num_heads": width // HEAD}
        model = timm.create_model(name, pretrained=False, depth=2, num_classes=TOKENS, **sizes)
        return model, lambda model, x: model(x)
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = width // HEAD
    sizes = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": heads // 2}
    config = LlamaConfig(**sizes, head_dim=HEAD, vocab_size=TOKENS, tie_word_embeddings=False)
    return LlamaForCausalLM(config), lambda model, x: model(x).logits


def task(width, seed):
    model, logits = built(width)
    rule = Everett("mup", width, BASE, qk_exponent=-0.5, embedding_std=1.0)
    if os.environ.get("ONE_RATE"):
        rule = Everett("standard", width, BASE, alignment="global", embedding_std=1.0)
    numbers = plan(model, rules_for(model), rule, lr=2**-8, absorb_multipliers=True)
    draw = torch.Generator().manual_seed(seed)
    targets = torch.randint(TOKENS, (1, 16), generator=draw)
    batch = (targets.roll(1), targets)
    if NAME == "vit":
        batch = torch.randn(1, 3, 16, 16, generator=draw), targets[:, 0]
    loss = lambda model, batch: F.cross_entropy(
        logits(model, batch[0]).flatten(0, -2), batch[1].flatten()
    )
    return Check(model, numbers, [batch], loss)


if __name__ == "__main__":
    one = task(64, 0)
    one.plan.initialise(one.model, seed=0)
    optimizer = torch.optim.AdamW(one.plan.groups(one.model))
    losses = []
    for _ in range(30):
        losses.append(one.loss(one.model, one.batches[0]))
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    print("learned" if losses[-1] < losses[0] / 2 else f"from {losses[0]} to {losses[-1]}")
