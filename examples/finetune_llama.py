"""A Llama fine-tuned from a checkpoint: groups, rates and decay are the plan's, weights its own.

python examples/finetune_llama.py

The checkpoint is made here: a small Llama, head tied to embedding, that has read Python's manual.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from pydoc_data.topics import topics

import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, ".")  # the repository's root, which is not installed
from param_groups import Everett, guard, plan, rules_for, schedule

WIDTH, STEPS = 64, 100
MANUAL = torch.tensor(list("".join(topics.values()).encode())).unfold(0, 64, 64)  # passages
SOURCE = torch.tensor(list(Path(argparse.__file__).read_bytes())).unfold(0, 64, 64)


def train(model, optimizer, passages):
    """Prints the mean loss of the first and the last ten steps."""
    clock = schedule(optimizer, "cosine", total_steps=STEPS, warmup_steps=STEPS // 10)
    losses = []
    for rows in torch.randint(len(passages), (STEPS, 8)):
        loss = model(passages[rows], labels=passages[rows]).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        clock.step()
        losses.append(loss.item())
    print(f"from {sum(losses[:10]) / 10:.3f} to {sum(losses[-10:]) / 10:.3f} nats per byte")


if __name__ == "__main__":
    torch.manual_seed(0)
    sizes = {"hidden_size": WIDTH, "intermediate_size": 4 * WIDTH, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes, **heads))
    train(model, torch.optim.AdamW(model.parameters(), lr=3e-3), MANUAL)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        saved = load_file(f"{folder}/model.safetensors")
        model = LlamaForCausalLM.from_pretrained(folder)  # tied as it was, which keeps its head
    rule = Everett("standard", WIDTH, WIDTH, alignment="global")  # one rate for all tensors
    decay = {"weight_decay": 0.1, "decay_mode": "per_group", "no_decay": ["*norm*"]}
    numbers = plan(model, rules_for(model), rule, lr=1e-3, **decay)
    print(numbers.table())
    numbers.apply_multipliers(model)  # in place of initialise, which would draw new weights
    kept = sum(torch.equal(model.state_dict()[name], tensor) for name, tensor in saved.items())
    print(f"{kept} of {len(saved)} tensors are the checkpoint's, bit for bit")
    optimizer = torch.optim.AdamW(numbers.groups(model))
    guard(optimizer, numbers)
    train(model, optimizer, SOURCE)
