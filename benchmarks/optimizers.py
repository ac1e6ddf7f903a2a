"""Time of one optimiser step: every rule beside torch's fused AdamW, many groups beside one.

    python benchmarks/optimizers.py                       # some ten minutes on two cores
    python benchmarks/optimizers.py --widths 128 --optimizers adam_atan2 --repeats 100

The tensors are those of nanolm_c4's decoder with the paper's 8 layers, context 512 and vocabulary
32,101, float32 on the CPU, with random gradients. For each rule four optimisers take turns, in an
order that rotates, so that a drift of the machine meets them alike:

    fused_adamw   torch.optim.AdamW(fused=True) on one group, the yardstick
    one           the rule with all tensors in one group
    plan          the rule with the groups of the plan, which here has every role's numbers differ
    per_tensor    the rule with one group per tensor, the most a plan can have

Ratios are taken within a turn. `plan_ms` is what a run pays once, before its first step: making
the plan, drawing the initial values, making the groups and building the optimiser. Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from nanolm_c4.model import Decoder  # noqa: E402
from param_groups import Everett, Plan, plan  # noqa: E402
from param_groups.roles import DECODER_RULES  # noqa: E402
from training import allocator, environment, optimizers  # noqa: E402

LAYERS, CONTEXT, VOCABULARY, HEAD_DIM = 8, 512, 32101, 64
BETAS, LR, EPS, WEIGHT_DECAY = (0.9, 0.98), 2**-9, 1e-9, 1e-4
REFERENCE = "fused_adamw"


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--widths", type=int, nargs="+", default=[128, 256, 512], metavar="D")
    names = optimizers.OPTIMIZERS
    add("--optimizers", nargs="+", default=list(names), choices=names, metavar="NAME")
    add("--threads", type=int, default=2)
    add("--repeats", type=int, default=40, help="timed turns of each optimiser")
    add("--warmup", type=int, default=3, help="turns before them")
    add("--json", type=Path, metavar="OUT", help="also write the document to this file")
    return parser.parse_args(argv)


def decoder(width: int) -> Decoder:
    """The decoder of the paper at one width."""
    return Decoder(
        vocab_size=VOCABULARY,
        context=CONTEXT,
        layers=LAYERS,
        heads=width // HEAD_DIM,
        head_dim=HEAD_DIM,
        mlp_ratio=4,
        attention_scale=HEAD_DIM**-0.5,
    )


def make_plan(model: Decoder, width: int, optimizer: str) -> Plan:
    """A plan in which embeddings, hidden matrices, scales and readout need groups of their own."""
    prescription = Everett(
        parameterization="standard",
        alignment="full",
        width=width,
        base_width=64,
        optimizer=optimizer,
        gamma_embedding=4.0,
        gamma_hidden=2.0,
        eps_per_layer=optimizer in ("adam", "adam_param_scaling", "adafactor"),
    )
    numbers = {"lr": LR, "eps": EPS, "weight_decay": WEIGHT_DECAY}
    return plan(model, DECODER_RULES, prescription, **numbers)


def grouped(groups: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """The plan's groups, or their tensors all in one or each in its own, with the first's numbers.

    The tensors keep the order in which the plan's groups hold them.
    """
    if kind == "plan":
        return groups
    names = [name for group in groups for name in group["param_names"]]
    params = [param for group in groups for param in group["params"]]
    if kind == "one":
        return [{**groups[0], "name": "all", "params": params, "param_names": names}]
    return [
        {**groups[0], "name": name, "params": [param], "param_names": [name]}
        for name, param in zip(names, params)
    ]


def build(groups: list[dict[str, Any]], name: str) -> dict[str, torch.optim.Optimizer]:
    """The four optimisers of one rule; they share the parameters and own their state."""
    params = [param for group in groups for param in group["params"]]
    settings = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": groups[0]["weight_decay"]}
    ours = {
        kind: optimizers.build(name, grouped(groups, kind), betas=BETAS)
        for kind in ("one", "plan", "per_tensor")
    }
    return {REFERENCE: torch.optim.AdamW(params, fused=True, **settings), **ours}


def take_turns(
    actions: dict[str, Callable[[], object]], repeats: int, warmup: int
) -> dict[str, list[float]]:
    """Milliseconds of every action in every turn; each turn starts with another action."""
    times: dict[str, list[float]] = {name: [] for name in actions}
    names = list(actions)
    for turn in range(warmup + repeats):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            start = time.perf_counter()
            actions[name]()
            elapsed = time.perf_counter() - start
            if turn >= warmup:
                times[name].append(1e3 * elapsed)
    return times


def summary(values: list[float]) -> dict[str, float]:
    """Median, least, interquartile range and number."""
    low, _, high = statistics.quantiles(values, n=4) if len(values) > 1 else values * 3
    numbers = {"median": statistics.median(values), "min": min(values), "iqr": high - low}
    return {**{key: round(value, 4) for key, value in numbers.items()}, "n": len(values)}


def ratios(times: dict[str, list[float]], above: str, below: str) -> dict[str, float]:
    """The ratio of two actions' times within each turn."""
    return summary([x / y for x, y in zip(times[above], times[below])])


def timed(times: dict[str, float], name: str, action: Callable[[], Any]) -> Any:
    """The action's value; its milliseconds go into `times`."""
    start = time.perf_counter()
    value = action()
    times[name] = round(1e3 * (time.perf_counter() - start), 3)
    return value


def measure(width: int, name: str, args: argparse.Namespace) -> dict[str, Any]:
    """One rule at one width."""
    model = decoder(width)
    plan_ms: dict[str, float] = {}
    made = timed(plan_ms, "plan", lambda: make_plan(model, width, name))
    timed(plan_ms, "initialise", lambda: made.initialise(model, seed=0))
    groups = timed(plan_ms, "groups", lambda: made.groups(model))
    timed(plan_ms, "optimizer", lambda: optimizers.build(name, groups, betas=BETAS))
    generator = torch.Generator().manual_seed(0)
    for param in model.parameters():
        param.grad = torch.randn(param.shape, generator=generator).mul_(1e-3)
    actions = {kind: optimizer.step for kind, optimizer in build(groups, name).items()}
    times = take_turns(actions, args.repeats, args.warmup)
    return {
        "width": width,
        "optimizer": name,
        "parameters": sum(param.numel() for param in model.parameters()),
        "tensors": len(list(model.parameters())),
        "plan_groups": len(groups),
        "plan_ms": plan_ms,
        "step_ms": {kind: summary(values) for kind, values in times.items()},
        "plan_to_fused_adamw": ratios(times, "plan", REFERENCE),
        "one_to_fused_adamw": ratios(times, "one", REFERENCE),
        "plan_to_one": ratios(times, "plan", "one"),
        "per_tensor_to_one": ratios(times, "per_tensor", "one"),
    }


def main(argv: list[str] | None = None) -> None:
    """Measures every case and prints one JSON document; progress goes to stderr."""
    args = parse(argv)
    torch.set_num_threads(args.threads)
    keeps = allocator.keep_memory()  # as a run does
    # torch imports the machinery of torch.compile with the first optimiser of a process.
    torch.optim.AdamW([torch.zeros(1, requires_grad=True)])
    rows = []
    for width in args.widths:
        for name in args.optimizers:
            row = measure(width, name, args)
            rows.append(row)
            fused, groups = row["plan_to_fused_adamw"]["median"], row["plan_to_one"]["median"]
            print(f"{width} {name}: {fused:.2f} x fused AdamW, groups {groups:.3f}",
                  file=sys.stderr)  # fmt: skip
    machine = {**environment.describe(torch.device("cpu")), "keeps_memory": keeps}
    document = json.dumps({"machine": machine, "results": rows}, indent=1)
    if args.json:
        args.json.write_text(document + "\n")
    print(document)


if __name__ == "__main__":
    main()
