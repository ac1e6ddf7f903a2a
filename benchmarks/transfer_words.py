"""Is the word of `param-groups transfer` right? Rules that stay and mistakes that move, many times.

    python -m benchmarks.transfer_words --json benchmarks/results/transfer_words.json

Three layers guess the next letter of Python's manual from four, at widths 32, 64 and 128, the last
with 51 thousand parameters. Every rule is judged by `transfer.answer` in repetitions with seeds of
their own, on the grids that `transfer.wanted` asks for, with the command's defaults. Runs of one
rate train side by side as a stack of models, each with the initial values and data of its seed.
Fresh seeds are left out: they say prices, not words. The power of all seeds together says whether a
rule really does what its word says.
"""

from __future__ import annotations

import functools
import sys
import time
from collections import Counter
from collections.abc import Callable
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from benchmarks import harness
from param_groups import Everett, Muon, Prescription, Rule, Tuned, plan
from param_groups.check import transfer
from param_groups.check.transfer import MOVES, STAYS, UNDECIDED, Grid
from param_groups.optim import MuonAdamW
from param_groups.schedules import factor

LETTERS, CONTEXT, BATCH, STEPS = 28, 4, 128, 100
BASE, WIDTHS, OCTAVES = 32, (32, 64, 128), tuple(map(float, range(-7, -1)))
ROLES = {"0": "token_embedding", "2": "mlp_in", "4": "mlp_out", "6": "readout"}
RULES = [Rule(f"{name}.weight", role) for name, role in ROLES.items()]
INIT = {"token_embedding": 0.5, "mlp_in": 0.1, "mlp_out": 0.1, "readout": 0.02}  # torch has others


def one_rate(width: int, **more: float) -> Everett:
    """A standard model with one rate, or with the embedding's kept as the width grows."""
    return Everett("standard", width, BASE, alignment="global", embedding_std=1.0, **more)


def mup(width: int) -> Everett:
    """The right rule."""
    return Everett("mup", width, BASE)


def muon(width: int, **more: Any) -> Muon:
    """At rates of the rest so low that the hidden matrices decide which rate is best."""
    return Muon(mup(width), adam_factor=1 / 16, **more)


PLANTED: dict[str, tuple[str, Callable[[int], Prescription]]] = {
    "standard, one rate": (MOVES, one_rate),
    "muP, base width forgotten": (MOVES, lambda n: Everett("mup", n, n)),
    "Muon, match RMS without its power": (
        MOVES,
        lambda n: muon(n, convention="match_rms", rate_exponent=0.0),
    ),
    "standard, embedding's rate only": (MOVES, lambda n: one_rate(n, embedding_exponent=1.0)),
    "muP": (STAYS, mup),
    "Muon": (STAYS, muon),
    "Tuned": (STAYS, lambda n: Tuned(mup(n), init=INIT)),
}


class Sum(nn.Module):
    """Of the letters' vectors, at their mean size."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sum(-2) / CONTEXT**0.5


def build(width: int) -> nn.Sequential:
    """Letters at their places, two hidden layers, the next letter."""
    hidden = lambda: nn.Linear(width, width, bias=False)
    table, readout = nn.Embedding(CONTEXT * LETTERS, width), nn.Linear(width, LETTERS, bias=False)
    return nn.Sequential(table, Sum(), hidden(), nn.GELU(), hidden(), nn.GELU(), readout)


@functools.cache
def text() -> Tensor:
    """The manual: 26 letters, a space, and all else."""
    small = "".join(topics.values()).lower().encode()
    return torch.tensor([b - 96 if 97 <= b <= 122 else 27 * (b != 32) for b in small])


def train(rule: Prescription, width: int, octave: float, seeds: range) -> list[float]:
    """Each seed's mean loss over the last tenth of the steps."""
    models = [build(width) for _ in seeds]
    for model, seed in zip(models, seeds, strict=True):
        numbers = plan(model, RULES, rule, lr=2.0**octave, absorb_multipliers=True)
        numbers.initialise(model, seed)
    stacks, _ = stack_module_state(models)
    groups = numbers.groups(models[-1], several=True)
    for group in groups:
        group["params"] = [stacks[name] for name in group.pop("param_names")]
        group |= {"layout": "experts"} if group["optimizer"] == "muon" else {}
    optimizer = MuonAdamW(groups)
    peaks = [group["lr"] for group in groups]
    draws = [torch.Generator().manual_seed(seed) for seed in seeds]

    def loss_of(parameters: dict[str, Tensor], letters: Tensor, following: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(models[0], parameters, (letters,)), following)

    losses = []
    for step in range(STEPS):
        part = factor("cosine", step + 1, warmup_steps=STEPS // 10, total_steps=STEPS + 1)
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * part
        last = len(text()) - CONTEXT
        at = torch.stack([torch.randint(last, (BATCH,), generator=draw) for draw in draws])
        places = torch.arange(CONTEXT)
        letters = text()[at[..., None] + places] + LETTERS * places
        loss = vmap(loss_of)(stacks, letters, text()[at + CONTEXT])
        optimizer.zero_grad()
        loss.sum().backward()
        optimizer.step()
        losses.append(loss.detach())
    mean = torch.stack(losses[-STEPS // 10 :]).mean(0)
    return torch.where(mean.isfinite(), mean, torch.inf).tolist()


def judge(name: str, repetitions: int, chosen: int) -> dict[str, object]:
    """How often each word is said of a rule."""
    right, rule = PLANTED[name]
    seeds, started = range(repetitions * chosen), time.process_time()
    trained = functools.cache(lambda width, octave: train(rule(width), width, octave, seeds))

    def answer(own: range) -> transfer.Answer:
        grid = Grid(WIDTHS, OCTAVES, 1.0, tuple(own), ())
        losses: dict[transfer.Run, float] = {}
        while runs := transfer.wanted(grid, losses):
            losses |= {run: trained(run.width, run.octave)[run.seed] for run in runs}
        return transfer.answer(grid, losses)

    answers = [answer(range(first, first + chosen)) for first in seeds[::chosen]]
    said, together = Counter(one.verdict for one in answers), answer(seeds)
    row = {
        "rule": name,
        "right": right,
        "words": {word: said[word] for word in (STAYS, MOVES, UNDECIDED)},
        "wrong": said[{STAYS: MOVES, MOVES: STAYS}[right]] / repetitions,
        "together": (together.verdict, together.power and together.power.exponent, together.reach),
        "powers": [round(one.power.exponent, 3) for one in answers if one.power],
        "reach": [round(one.reach, 3) for one in answers],
        "cpu_seconds": round(time.process_time() - started),
    }
    print(
        f"{name}: {row['words']}, together {row['together']}, {row['cpu_seconds']} s",
        file=sys.stderr,
    )
    return row


def main() -> None:
    made = harness.parser(__doc__ or "")
    made.add_argument("--repetitions", type=int, default=20)
    made.add_argument("--seeds", type=int, default=2, help="that choose in each (default 2)")
    made.add_argument("--rules", nargs="+", choices=PLANTED, default=[*PLANTED])
    options = made.parse_args()
    torch.set_num_threads(1)
    rows = [judge(name, options.repetitions, options.seeds) for name in options.rules]
    harness.show(options, "cpu", rows, parameters=sum(p.numel() for p in build(128).parameters()))


if __name__ == "__main__":
    main()
