"""Is the word of `param-groups transfer` right? Rules that stay and mistakes that move, many times.

    python -m benchmarks.transfer_words --losses benchmarks/results/transfer_words.csv \\
        --json benchmarks/results/transfer_words.json

Three layers learn a random table: the class of two letters, a fifth of them wrong. The widest model
has 80 thousand parameters. Every rule is judged by `transfer.answer` in repetitions with seeds of
their own, on the grids that `transfer.wanted` asks for, with the command's defaults. Runs of one
rate train side by side as a stack of models, each with the initial values and data of its seed.
Fresh seeds are left out: they say prices, not words. The power of all seeds together says whether a
rule does what its word says. Runs whose losses the table has are not trained again.
"""

import argparse
import csv
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from benchmarks import harness
from param_groups import Everett, Muon, Prescription, Rule, Tuned, plan
from param_groups.check import transfer
from param_groups.check.transfer import MOVES, STAYS, UNDECIDED, Grid, Run
from param_groups.optim import MuonAdamW
from param_groups.schedules import factor

LETTERS, CLASSES, WRONG, BATCH, STEPS = 16, 4, 0.2, 64, 100
BASE, OCTAVES = 32, (-7.0, -6.0, -5.0, -4.0, -3.0, -2.0)
WIDTHS, OF_MUON = (48, 96, 192), (32, 64, 128)  # whose steps cost the width's third power
ROLES = {"0": "token_embedding", "2": "mlp_in", "4": "mlp_out", "6": "readout"}
RULES = [Rule(f"{name}.weight", role) for name, role in ROLES.items()]
INIT = {"token_embedding": 0.5, "mlp_in": 0.1, "mlp_out": 0.1, "readout": 0.02}


class Planted(NamedTuple):
    """A rule by width, the word that is right for it, and the widths it is judged at."""

    word: str
    rule: Callable[[int], Prescription]
    widths: tuple[int, ...] = WIDTHS


def one_rate(width: int, **more: float) -> Everett:
    """A standard model with one rate, or with the embedding's kept as the width grows."""
    return Everett("standard", width, BASE, alignment="global", embedding_std=1.0, **more)


def mup(width: int) -> Everett:
    """The right rule."""
    return Everett("mup", width, BASE)


def muon(width: int, **more: Any) -> Muon:
    """With rates of the rest so low that the hidden matrices decide which rate is best."""
    return Muon(mup(width), adam_factor=1 / 16, **more)


PLANTED = {
    "standard, one rate": Planted(MOVES, one_rate),
    "muP, base width forgotten": Planted(MOVES, lambda n: Everett("mup", n, n)),
    "standard, embedding's rate only": Planted(MOVES, lambda n: one_rate(n, embedding_exponent=1)),
    "Muon, match RMS without its power": Planted(
        MOVES, lambda n: muon(n, convention="match_rms", rate_exponent=0.0), OF_MUON
    ),
    "muP": Planted(STAYS, mup),
    "Tuned": Planted(STAYS, lambda n: Tuned(mup(n), init=INIT)),
    "Muon": Planted(STAYS, muon, OF_MUON),
}


class Sum(nn.Module):
    """Of the two letters' vectors, at their mean size."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sum(-2) / 2**0.5


def build(width: int) -> nn.Sequential:
    """First and second letters, two hidden layers, the class."""
    hidden = lambda: nn.Linear(width, width, bias=False)
    table, readout = nn.Embedding(2 * LETTERS, width), nn.Linear(width, CLASSES, bias=False)
    return nn.Sequential(table, Sum(), hidden(), nn.GELU(), hidden(), nn.GELU(), readout)


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
    optimizer, peaks = MuonAdamW(groups), [group["lr"] for group in groups]
    draws = [torch.Generator().manual_seed(seed) for seed in seeds]
    classes = lambda draw, *shape: torch.randint(CLASSES, shape, generator=draw)
    tables = [classes(draw, LETTERS, LETTERS) for draw in draws]

    def batch(table: Tensor, draw: torch.Generator) -> tuple[Tensor, Tensor]:
        pairs = torch.randint(LETTERS, (BATCH, 2), generator=draw)
        wrong = torch.rand(BATCH, generator=draw) < WRONG
        right = table[pairs[:, 0], pairs[:, 1]]
        return pairs + torch.tensor([0, LETTERS]), torch.where(wrong, classes(draw, BATCH), right)

    def loss_of(parameters: dict[str, Tensor], pairs: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(models[0], parameters, (pairs,)), labels)

    losses = []
    for step in range(STEPS):
        part = factor("cosine", step + 1, warmup_steps=STEPS // 10, total_steps=STEPS + 1)
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * part
        pairs, labels = zip(*map(batch, tables, draws), strict=True)
        loss = vmap(loss_of)(stacks, torch.stack(pairs), torch.stack(labels))
        optimizer.zero_grad()
        loss.sum().backward()
        optimizer.step()
        losses.append(loss.detach())
    mean = torch.stack(losses[-STEPS // 10 :]).mean(0)
    return torch.where(mean.isfinite(), mean, torch.inf).tolist()


def judge(name: str, repetitions: int, chosen: int, losses: dict[Run, float]) -> dict[str, object]:
    """How often each word is said of a rule; trains what the `losses` lack."""
    right, rule, widths = PLANTED[name]
    seeds = range(repetitions * chosen)

    def answer(own: range) -> transfer.Answer:
        grid = Grid(widths, OCTAVES, 1.0, tuple(own), ())
        known: dict[Run, float] = {}
        while runs := transfer.wanted(grid, known):
            for width, octave in {run[:2] for run in runs if run not in losses}:
                trained = zip(seeds, train(rule(width), width, octave, seeds), strict=True)
                losses.update({Run(width, octave, seed): loss for seed, loss in trained})
            known |= {run: losses[run] for run in runs}
        return transfer.answer(grid, known)

    answers = [answer(range(first, first + chosen)) for first in seeds[::chosen]]
    said, together = Counter(one.verdict for one in answers), answer(seeds)
    return {
        "rule": name,
        "right": right,
        "widths": widths,
        **{word: said[word] for word in (STAYS, MOVES, UNDECIDED)},
        "wrong": said[{STAYS: MOVES, MOVES: STAYS}[right]] / repetitions,
        "power of all seeds": together.power and round(together.power.exponent, 3),
        "95 %": round(together.reach, 3),
    }


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    made = harness.parser(__doc__ or "")
    made.add_argument("--losses", type=Path, help="table of runs, read and written")
    made.add_argument("--repetitions", type=int, default=20)
    made.add_argument("--seeds", type=int, default=2, help="that choose in each (default 2)")
    made.add_argument("--rules", nargs="+", choices=PLANTED, default=[*PLANTED])
    return made.parse_args(argv)


def main() -> None:
    """Prints and keeps how often each word is said of each rule."""
    options, rows = parse(), []
    torch.set_num_threads(1)
    losses = read(options.losses) if options.losses and options.losses.exists() else {}
    for name in options.rules:
        rows.append(judge(name, options.repetitions, options.seeds, losses.setdefault(name, {})))
        print(rows[-1], file=sys.stderr)
        if options.losses:
            write(options.losses, losses)
    parameters = {width: sum(p.numel() for p in build(width).parameters()) for width in WIDTHS}
    harness.show(options, "cpu", rows, parameters=parameters)


def read(path: Path) -> dict[str, dict[Run, float]]:
    """Rule -> run -> loss; a line of the table has a rate's losses by seed."""
    losses: dict[str, dict[Run, float]] = {}
    with open(path, newline="", encoding="utf-8") as file:
        for rule, width, octave, *by_seed in list(csv.reader(file))[1:]:
            for seed, loss in enumerate(by_seed):
                losses.setdefault(rule, {})[Run(int(width), float(octave), seed)] = float(loss)
    return losses


def write(path: Path, losses: dict[str, dict[Run, float]]) -> None:
    """The same, with a digit beyond what a seed's spread lets matter."""
    rows: dict[tuple[Any, ...], list[str]] = {("rule", "width", "octave"): ["losses by seed"]}
    for rule, of in losses.items():
        for run in sorted(of):
            rows.setdefault((rule, run.width, run.octave), []).append(f"{of[run]:.5f}")
    with open(path, "w", newline="", encoding="utf-8") as file:
        lines = ((*key, *cells) for key, cells in rows.items())
        csv.writer(file, lineterminator="\n").writerows(lines)


if __name__ == "__main__":
    main()
