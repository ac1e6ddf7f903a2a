"""A Hugging Face Llama on the bytes of Python's manual, for `param-groups transfer`.

    param-groups transfer examples/transfer_llama.py --widths 32 64 128 --lr 2^-9:2^-5 \\
        --steps 100 --seeds 3 --fresh 1
"""

import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parent))  # where nanogpt.py is
from nanogpt import HEAD, TEXT

from param_groups import Everett, plan, rules_for
from param_groups.check import Check

ROWS = 8


def task(width, seed):
    """Two blocks with random weights under muP, pairs of heads that share keys, no decay."""
    heads = {"num_attention_heads": width // HEAD, "num_key_value_heads": width // HEAD // 2}
    sizes = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, head_dim=HEAD, **sizes, **heads))
    rule = Everett("mup", width, base_width=32, qk_exponent=-0.5)  # Llama's own 1/sqrt(HEAD)
    numbers = plan(model, rules_for(model), rule, lr=2**-8, absorb_multipliers=True)
    order = torch.randperm(len(TEXT), generator=torch.Generator().manual_seed(seed))
    loss = lambda model, rows: model(rows, labels=rows, use_cache=False).loss
    return Check(model, numbers, TEXT[order].split(ROWS)[:-1], loss)
