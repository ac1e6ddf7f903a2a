"""Published scaling rules as numbers for every tensor: their tables, rules, check, audit, transfer.

Every command has `--help`: param-groups check --help
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from param_groups import __version__
from param_groups.exit_code import with_exit_code
from param_groups.families import OPTIMIZER_FAMILY, exponent_optimizer
from param_groups.roles import PlanError
from param_groups.rows import align
from param_groups.rules.exponents import (
    ALIGNMENTS,
    LAYERS,
    OPTIMIZERS,
    PARAMETERIZATION_TABLE,
    Alignment,
    gradient_exponents,
    solve,
)

Rows = list[tuple[str, ...]]
WIDTHS = (64, 128)  # of a trace

SYMBOLS = """n is the width. A layer multiplies its input z by n^-a W, W starts with entries of size
n^-b and learns with rate n^-c. alpha, omega and u say how the terms of the change of its output add
up over the n inputs, 1/2 as independent numbers do and 1 as equal ones: alpha for (change of W) z,
omega for W (change of z), u for (change of W)(change of z). The change of a layer's output is
n^-residual: 0 changes by a constant, above 0 ever less at larger widths. stable: no change grows
with width; nontrivial: training moves the logits; feature learning: it moves the last layer's
input."""


def everett_table() -> dict[str, dict[str, dict[str, Any]]]:
    """Everett et al.'s Table 1, every entry a power of n as a string; rates from the solver."""
    return {
        name: {
            layer: {
                "init_variance": str(-2 * scales[layer].b),
                "multiplier": str(-scales[layer].a),
                "gradient": str(gradient_exponents(name)[layer]),
                "lr": {
                    o: {k: str(solve(name, o, k).lr[layer]) for k in ALIGNMENTS} for o in OPTIMIZERS
                },
            }
            for layer in LAYERS
        }
        for name, scales in PARAMETERIZATION_TABLE.items()
    }


def everett_rows() -> Rows:
    """The same with a line per layer; rates in the paper's order, full alignment first."""
    columns = [(optimizer, kind) for kind in ALIGNMENTS for optimizer in OPTIMIZERS]
    titles = (f"{optimizer} {kind}" for optimizer, kind in columns)
    rows: Rows = [("parameterization", "layer", "init variance", "multiplier", "gradient", *titles)]
    for name, layers in everett_table().items():
        for layer, entry in layers.items():
            rates = (entry["lr"][optimizer][kind] for optimizer, kind in columns)
            powers = (entry[key] for key in ("init_variance", "multiplier", "gradient"))
            rows.append((name, layer, *powers, *rates))
    return rows


# Everett et al., Table 2. One update times its multiplier is n^-d: the d of embedding, hidden
# layers and readout, in which alone the optimisers differ.
_UPDATES = {
    "sgd": ("g_1 + a_1 + c_1", "g_l + a_l + c_l", "2*a_r + c_r"),
    "adam": ("a_1 + c_1", "a_l + c_l", "a_r + c_r"),
    "adafactor": ("c_1", "1/2 + c_l", "a_r + b_r + c_r"),
}
CONSTRAINTS_NOTE = """1 is the embedding, l a hidden layer, k the layer before it, L the last hidden
layer, r the readout, and g_l = min(a_r + b_r, 2*a_r + c_r) + a_l the negative exponent of a
gradient. The paper prints g_l with a max and without + a_l, and + omega_l; its own Table 1 needs
what stands here. Nontrivial: one of the first three constraints on logits is an equality."""


def constraint_rows() -> Rows:
    """Everett et al.'s Table 2: what each optimiser's exponents must satisfy, a line each."""
    rows: Rows = [("constraint", *OPTIMIZERS)]
    at_start = ("a_1 + b_1 == 0", "a_l + b_l == 1/2", "a_r + b_r >= 1/2")
    rows += [("stable at init", *[text] * len(OPTIMIZERS)) for text in at_start]
    first, hidden, last = zip(*(_UPDATES[optimizer] for optimizer in OPTIMIZERS), strict=True)
    for kind, updates, rest in (
        ("stable activations", first, ""),
        ("stable activations", hidden, " - alpha_l"),
        ("stable activations", hidden, " + r_k - u_l"),
        ("stable activations", ("1/2",) * 3, " + r_k - omega_l"),
        ("stable logits", ("a_r + b_r",) * 3, " + r_L - omega_r"),
        ("stable logits", last, " - alpha_r"),
        ("stable logits", last, " + r_L - u_r"),
    ):
        rows.append((kind, *(f"{update}{rest} >= 0" for update in updates)))
    return [*rows, ("stable logits", "", "", "c_r >= 0")]


# Commands. Each returns its value for JSON, its rows for the table, its text for people.
_Result = tuple[object, Rows, Callable[[str], str]]


def main(argv: Sequence[str] | None = None) -> None:
    """Runs one command; a mistake of the user's is one line and exit code 2."""
    words = [*(sys.argv[1:] if argv is None else argv)]
    with_exit_code(lambda: _run(words, apart=argv is None), words)


def _run(words: Sequence[str], apart: bool) -> None:
    """A command; one with options of its own in another process, if `apart`."""
    if words and words[0] in ("check", "audit", "transfer"):
        from param_groups.check import verdict  # and with torch

        (verdict.main if apart else verdict.run)(words[0], words[1:])
        return
    args = _parser().parse_args(words)
    result = args.command(args)
    if not isinstance(result, str):
        value, rows, text = result
        result = json.dumps(value, indent=1) if args.json else text(align(rows))
    print(result)


def published_exponents(_: argparse.Namespace) -> _Result:
    """Everett et al., Table 1, as the solver derives it."""
    title = "Powers of the width n (Everett et al., Table 1)"
    return everett_table(), everett_rows(), lambda text: f"{title}\n\n{text}"


def constraints(_: argparse.Namespace) -> _Result:
    """Everett et al., Table 2."""
    rows = constraint_rows()
    value = [dict(zip(rows[0], row, strict=True)) for row in rows[1:]]
    note = "\n".join(textwrap.wrap(CONSTRAINTS_NOTE, 98))
    return value, rows, lambda text: f"Everett et al., Table 2\n\n{text}\n\n{note}"


def solution(args: argparse.Namespace) -> _Result:
    """The largest stable learning rates under the alignment given: a line per layer."""
    alignment = Alignment(args.alpha, args.omega, args.u, omega_readout=args.omega_readout)
    optimizer = exponent_optimizer(args.optimizer)
    family = OPTIMIZER_FAMILY.get(optimizer, optimizer)
    if family == "spectral":
        raise PlanError("Muon's rates go by shapes, not by layer types: `param_groups.Muon`")
    found = solve(args.parameterization, family, alignment, hidden_layers=args.hidden_layers)
    count = len(found.residuals) - 2
    hidden = ["hidden"] if count == 1 else [f"hidden {i + 1}" for i in range(count)]
    rows: Rows = [("layer", "learning rate n^", "residual")]
    for layer, residual in zip(("embedding", *hidden, "readout"), found.residuals, strict=True):
        rows.append((layer, str(found.lr[layer.split()[0]]), str(residual)))
    flags = ("stable", "nontrivial", "feature_learning")
    lines = [f"{flag.replace('_', ' ')}: {getattr(found, flag)}" for flag in flags]
    notes = "\n".join([*lines, "", *textwrap.wrap(SYMBOLS, 98)])
    return found.to_dict(), rows, lambda text: f"{text}\n{notes}"


def tracing(args: argparse.Namespace) -> str:
    """What every tensor of a stock model, or of a file's, is for: a pass at each of two widths."""
    from param_groups.check import command, stock
    from param_groups.model.trace import traced

    if args.target.partition(":")[0] not in ("hf", "timm"):
        return str(command.trace_of(command.task_of(Path(args.target)), WIDTHS))
    batch = stock.batch_of(args.target, seed=0)
    build = lambda width: stock.build(args.target, width)
    return str(traced(build, lambda model: stock.loss_of(model, batch), WIDTHS))


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("param-groups", description=__doc__, formatter_class=raw)
    parser.add_argument("--version", action="version", version=f"param-groups {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", title="commands")

    def command(name: str, call: Callable[[argparse.Namespace], Any], **words: Any) -> Any:
        added = commands.add_parser(name, **words)
        added.set_defaults(command=call)
        return added.add_argument

    add = [
        command("exponents", published_exponents, help="Everett et al., Table 1"),
        command("constraints", constraints, help="Everett et al., Table 2"),
        command("solve", solution, help="largest stable rates for any alignment", epilog=SYMBOLS),
    ]
    for one in add:
        one("--json", action="store_true", help="every number, for programs")
    of_solve = add[2]
    of_solve("--parameterization", required=True, help=", ".join(PARAMETERIZATION_TABLE))
    of_solve("--optimizer", required=True, help=", ".join(OPTIMIZERS))
    for name, meaning in (
        ("alpha", "alignment of the weight update with the layer's input"),
        ("omega", "alignment of the initial weight with the change of its input"),
        ("u", "alignment of both changes"),
    ):
        of_solve(f"--{name}", required=True, help=meaning + ", in [0, 1]")
    of_solve("--omega-readout", help="omega of the readout, if different")
    of_solve("--hidden-layers", type=int, default=1, help="how many follow each other")
    commands.add_parser("check", help="train a few steps at several widths: does anything grow?")
    commands.add_parser("audit", help="which rule does an optimiser of anybody's follow?")
    commands.add_parser("transfer", help="train several widths: does the best rate stay?")
    of_trace = command("trace", tracing, help="what every tensor of a model is for")
    of_trace("target", help="FILE.py with task(width, seed), hf:gpt2 or timm:vit_tiny_patch16_224")
    return parser


if __name__ == "__main__":
    main()
