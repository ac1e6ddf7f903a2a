"""Tune nanoGPT's recipe at a small width, then train four times as wide with the same rate.

    python examples/tune_then_grow.py              # three seeds, about ten minutes on two cores
    python examples/tune_then_grow.py --quick      # one seed, two widths, 30 steps

`Tuned` leaves the base width as it is: AdamW with nanoGPT's betas, decay and initial values.
Next to it stands the same recipe with one rate for all widths, as everybody trains. The model is
nanogpt.py's, the text the source of Python's own library, by characters.

Mean loss of three seeds in nats (two cores, AMD EPYC): the recipe's best rate is 0.0078 at widths
32, 64 and 128 (2.078, 2.095, 2.018). With one rate it falls to 0.0020, and 0.0078 costs 0.27 there.
Each at its own best rate, one rate ends lower at 128 (1.948): what is carried over is the rate.
"""

import argparse
import inspect
import json
from pathlib import Path

import torch
import torch.nn.functional as F
from nanogpt import CONTEXT, GPT  # beside this file
from torch import nn

from param_groups import Everett, Tuned, initial_stds, plan, schedule, traced

BASE, ROWS = 32, 16
WIDTHS, RATES = (32, 64, 128), [2.0**-n for n in (9, 8, 7, 6, 5)]
TEXT = (Path(json.__file__).parents[1] / "argparse.py").read_text() + inspect.getsource(json)
LETTERS = sorted(set(TEXT))
DATA = torch.tensor([LETTERS.index(letter) for letter in TEXT])
GROWING = lambda width: GPT(width, len(LETTERS))
RULES = traced(GROWING, lambda model: model(DATA[:CONTEXT][None]), WIDTHS[:2]).rules


def train(width, lr, seed, steps, recipe):
    """Mean loss of the last tenth of a run, in nats."""
    torch.manual_seed(seed)
    stds = initial_stds(GROWING(BASE), RULES)
    model = GROWING(width)
    groups, decay = model.parameters(), {"weight_decay": 0.1}
    if recipe:
        rule = Tuned(Everett("mup", width, BASE, qk_exponent=-0.5), init=stds)
        options = {"lr": lr, "decay_mode": "per_group", "absorb_multipliers": True, **decay}
        numbers = plan(model, RULES, rule, **options)
        numbers.initialise(model, seed)
        groups = numbers.groups(model)
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), **decay)
    clock = schedule(optimizer, "cosine", total_steps=steps, warmup_steps=steps // 10, floor=0.1)
    draw, losses = torch.Generator().manual_seed(seed), []
    for _ in range(steps):
        at = torch.randint(len(DATA) - CONTEXT, (ROWS, 1), generator=draw) + torch.arange(CONTEXT)
        loss = F.cross_entropy(model(DATA[at]).flatten(0, 1), DATA[at + 1].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        clock.step()
        losses.append(loss.item())
    return sum(losses[-steps // 10 :]) / len(losses[-steps // 10 :])


def main():
    """A table of losses for each of the two, rates across and widths down."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one seed, two widths, 30 steps")
    quick = parser.parse_args().quick
    seeds, steps, widths = (range(1), 30, WIDTHS[:2]) if quick else (range(3), 200, WIDTHS)
    for title, recipe in (("one rate at all widths", False), ("the recipe by muP", True)):
        print(f"{title}\nwidth  " + "  ".join(f"lr {lr:.4f}" for lr in RATES))
        for width in widths:
            runs = [[train(width, lr, s, steps, recipe) for s in seeds] for lr in RATES]
            means = [sum(losses) / len(losses) for losses in runs]
            best = RATES[means.index(min(means))]
            print(f"{width:<6} " + "  ".join(f"{m:9.3f}" for m in means) + f"  best {best:.4f}")


if __name__ == "__main__":
    main()
