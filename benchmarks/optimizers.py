"""Time of one optimiser step: every rule against torch's fused AdamW, many groups against one.

    python -m benchmarks.optimizers                       # some ten minutes on two cores
    python -m benchmarks.optimizers --widths 128 --optimizers adam_atan2 --repeats 100
    python -m benchmarks.optimizers --widths 1024 --device cuda

The tensors are those of nanolm_c4's decoder with the paper's 8 layers, context 512 and vocabulary
32,101, float32, with random gradients. For each rule four optimisers take turns, in an
order that rotates, so that a drift of the machine meets them alike; of muon, whose groups are of
two rules, the first and the third:

    fused_adamw   torch.optim.AdamW(fused=True) on one group, the yardstick
    one           the rule with all tensors in one group
    plan          the rule with the groups of the plan, which here has every role's numbers differ
    per_tensor    the rule with one group per tensor, the most a plan can have

Ratios are taken within a turn. `plan_ms` is what a run pays once, before its first step: making
the plan, drawing the initial values, making the groups and building the optimiser. Prints JSON.
"""

import argparse
import sys
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import harness
from nanolm_c4.model import RULES, Decoder
from param_groups import EpsFollows, Everett, Muon, Plan, Prescription, plan
from training.optim import optimizers

BETAS, LR, EPS, WEIGHT_DECAY = (0.9, 0.98), 2**-9, 1e-9, 1e-4
REFERENCE = "fused_adamw"
RATIOS = {
    "plan_to_fused_adamw": ("plan", REFERENCE),
    "one_to_fused_adamw": ("one", REFERENCE),
    "plan_to_one": ("plan", "one"),
    "per_tensor_to_one": ("per_tensor", "one"),
}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = harness.parser(__doc__)
    add = parser.add_argument
    add("--widths", type=int, nargs="+", default=[128, 256, 512], metavar="D")
    add("--device", choices=("cpu", "cuda"), default="cpu")
    names = list(optimizers.OPTIMIZERS)
    add("--optimizers", nargs="+", default=names, choices=names, metavar="NAME")
    add("--threads", type=int, default=2)
    add("--repeats", type=int, default=40, help="timed turns of each optimiser")
    add("--warmup", type=int, default=3, help="turns before them")
    return parser.parse_args(argv)


def make_plan(model: torch.nn.Module, width: int, optimizer: str) -> Plan:
    """A plan in which embeddings, hidden matrices, scales and readout each need another group."""
    if optimizer == "muon":
        prescription: Prescription = Muon(Everett("mup", width, base_width=64))
    else:
        gammas = {"gamma_embedding": 4.0, "gamma_hidden": 2.0}
        prescription = Everett("standard", width, 64, optimizer, **gammas)
        if optimizer in ("adam", "adam_param_scaling", "adafactor"):
            prescription = EpsFollows(prescription)
    decay = {"weight_decay": WEIGHT_DECAY, "decay_mode": "independent"}
    return plan(model, RULES, prescription, lr=LR, eps=EPS, **decay)


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
        for name, param in zip(names, params, strict=True)
    ]


def build(groups: list[dict[str, Any]], name: str) -> dict[str, torch.optim.Optimizer]:
    """The optimisers of one rule; they share the parameters and own their state."""
    params = [param for group in groups for param in group["params"]]
    settings = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": groups[0]["weight_decay"]}
    kinds = ("plan",) if name == "muon" else ("one", "plan", "per_tensor")
    ours = {kind: optimizers.build(name, grouped(groups, kind), betas=BETAS) for kind in kinds}
    return {REFERENCE: torch.optim.AdamW(params, fused=True, **settings), **ours}


def measure(width: int, name: str, args: argparse.Namespace) -> dict[str, Any]:
    """One rule at one width."""
    sizes = {"vocab_size": 32_101, "context": 512, "layers": 8, "head_dim": 64, "mlp_ratio": 4}
    model = Decoder(**sizes, heads=width // 64, attention_scale=64**-0.5)
    plan_ms: dict[str, float] = {}

    def paid(part: str, action: Callable[[], Any]) -> Any:
        value: list[Any] = []
        plan_ms[part] = harness.milliseconds(lambda: value.append(action()))
        return value[0]

    made = paid("plan", lambda: make_plan(model, width, name))
    paid("initialise", lambda: made.initialise(model, seed=0))
    model.to(args.device)
    groups = paid("groups", lambda: made.groups(model, several=name == "muon"))
    paid("optimizer", lambda: optimizers.build(name, groups, betas=BETAS))
    generator = torch.Generator().manual_seed(0)
    for param in model.parameters():
        param.grad = torch.randn(param.shape, generator=generator).mul_(1e-3).to(args.device)
    actions = {
        kind: lambda step=optimizer.step: harness.milliseconds(step, args.device)
        for kind, optimizer in build(groups, name).items()
    }
    times = harness.take_turns(actions, args.repeats, args.warmup)
    known = {ratio: pair for ratio, pair in RATIOS.items() if times.keys() >= {*pair}}
    return {
        "width": width,
        "optimizer": name,
        "parameters": sum(param.numel() for param in model.parameters()),
        "tensors": len(list(model.parameters())),
        "plan_groups": len(groups),
        "plan_ms": plan_ms,
        "step_ms": {kind: harness.spread(values) for kind, values in times.items()},
        **{ratio: harness.ratios(times, *pair) for ratio, pair in known.items()},
    }


def main(argv: list[str] | None = None) -> None:
    """Measures every case and prints one JSON document; progress goes to stderr."""
    args = parse(argv)
    torch.set_num_threads(args.threads)
    # torch imports the machinery of torch.compile with the first optimiser of a process.
    torch.optim.AdamW([torch.zeros(1, requires_grad=True)])
    rows = []
    for width in args.widths:
        for name in args.optimizers:
            row = measure(width, name, args)
            rows.append(row)
            fused = row["plan_to_fused_adamw"]["median"]
            print(f"{width} {name}: {fused:.2f} x fused AdamW", file=sys.stderr)
    harness.show(args, args.device, rows)


if __name__ == "__main__":
    main()
