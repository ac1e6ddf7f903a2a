"""A Hugging Face causal LM under muP: GPT-2 from its config, trained on the bytes of real text.

python examples/huggingface_gpt2.py
param-groups check examples/huggingface_gpt2.py
"""

import sys
from pydoc_data.topics import topics  # Python's own manual: text that needs no download

import torch
from transformers import GPT2Config, GPT2LMHeadModel

sys.path.insert(0, ".")  # the repository's root, which is not installed
from param_groups import Everett, plan, rules_for
from param_groups.check import Check

HEAD_DIM, CONTEXT, STEPS = 16, 64, 75
TEXT = torch.tensor(list("".join(topics.values()).encode())).unfold(0, CONTEXT, CONTEXT)


def planned(width):
    """The model, untied as the theory has it, and its plan; stock layers have no multipliers."""
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=256,
            n_positions=CONTEXT,
            n_embd=width,
            n_head=width // HEAD_DIM,
            n_layer=2,
            resid_pdrop=0,
            embd_pdrop=0,
            attn_pdrop=0,
            tie_word_embeddings=False,
            bos_token_id=0,
            eos_token_id=0,
        )
    )
    rule = Everett("mup", width=width, base_width=64)  # lr is the rate before absorption at 64
    for block in model.transformer.h:
        block.attn.scaling = rule.forward().attention_scale(HEAD_DIM)  # 1/h, not 1/sqrt(h)
    applied = {"attention_scale": block.attn.scaling}
    options = {"absorb_multipliers": True, "applied": applied}
    return model, plan(model, rules_for(model), rule, lr=2**-7, **options)


def loss_of(model, ids):
    """Mean cross-entropy of the next byte, ids (rows, CONTEXT)."""
    return model(ids, labels=ids).loss


def task(width, seed):
    """What the coordinate check trains: few tokens show how updates align, thousands hide it."""
    return Check(*planned(width), batches=[TEXT[:1]], loss=loss_of)


if __name__ == "__main__":
    model, numbers = planned(width=128)
    print(numbers.table())
    numbers.initialise(model, seed=0)
    optimizer = torch.optim.AdamW(numbers.groups(model), betas=(0.9, 0.95))
    order = torch.randperm(len(TEXT), generator=torch.Generator().manual_seed(0))
    for step in range(STEPS + 1):
        loss = loss_of(model, TEXT[order[8 * step : 8 * (step + 1)]])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 25 == 0:
            print(f"step {step}: {loss.item():.3f} nats per byte")
