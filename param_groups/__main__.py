"""Published scaling rules as numbers for every tensor: their tables, rules, check, audit, transfer.

Every command has `--help`: param-groups check --help
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
import traceback
from collections.abc import Callable, Sequence
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any

from param_groups import __version__
from param_groups.families import OPTIMIZER_FAMILY, exponent_optimizer
from param_groups.prescription import Prescription, Tensor
from param_groups.roles import PlanError, Role, choose
from param_groups.rows import align
from param_groups.rules import exponents
from param_groups.rules.bordelon import Bordelon
from param_groups.rules.dinan import Dinan
from param_groups.rules.everett import Everett
from param_groups.rules.exponents import (
    ALIGNMENTS,
    LAYERS,
    OPTIMIZERS,
    PARAMETERIZATION_TABLE,
    Alignment,
    gradient_exponents,
    solve,
)
from param_groups.rules.wrappers import Depth, EpsFollows

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
                    optimizer: {
                        kind: str(solve(name, optimizer, kind).lr[layer]) for kind in ALIGNMENTS
                    }
                    for optimizer in OPTIMIZERS
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


# His names for Everett et al.'s parameterisations.
STRATOS_NAMES = {"sp": "standard", "ntk": "ntk", "mup": "mup", "mf": "mean_field"}


def stratos_table() -> dict[str, dict[str, dict[str, str]]]:
    """Stratos' Table 1 under his names: a, b and c by layer, for Adam with full alignment."""
    return {
        name: {
            layer: {
                "a": str(PARAMETERIZATION_TABLE[known][layer].a),
                "b": str(PARAMETERIZATION_TABLE[known][layer].b),
                "c": str(solve(known, "adam", "full").c[layer]),
            }
            for layer in LAYERS
        }
        for name, known in STRATOS_NAMES.items()
    }


# Commands. Each returns its value for JSON, its rows for the table, its text for people.

_Result = tuple[object, Rows, Callable[[str], str]]


def main(argv: Sequence[str] | None = None) -> None:
    """Runs one command; a mistake of the user's is one line and exit code 2."""
    words = [*(sys.argv[1:] if argv is None else argv)]
    try:
        if words and words[0] in ("check", "audit", "transfer"):  # with options of their own
            from param_groups.check import verdict  # and with torch

            run = verdict.main if argv is None else verdict.run
            run(words[0], words[1:])
            return
        args = _parser().parse_args(words)
        result = args.command(args)
        if isinstance(result, str):
            print(result)
            return
        value, rows, text = result
        print(json.dumps(value, indent=1) if args.json else text(align(rows)))
    except PlanError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except Exception:  # of a user's file: not the exit code of a bad verdict
        traceback.print_exc()
        raise SystemExit(2) from None


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
    found = exponents.solve(
        args.parameterization, family, alignment, hidden_layers=args.hidden_layers
    )
    count = len(found.residuals) - 2
    hidden = ["hidden"] if count == 1 else [f"hidden {i + 1}" for i in range(count)]
    rows: Rows = [("layer", "learning rate n^", "residual")]
    for layer, residual in zip(("embedding", *hidden, "readout"), found.residuals, strict=True):
        rows.append((layer, str(found.lr[layer.split()[0]]), str(residual)))
    flags = ("stable", "nontrivial", "feature_learning")
    lines = [f"{flag.replace('_', ' ')}: {getattr(found, flag)}" for flag in flags]
    notes = "\n".join([*lines, "", *textwrap.wrap(SYMBOLS, 98)])
    return found.to_dict(), rows, lambda text: f"{text}\n{notes}"


_PRESCRIPTIONS: dict[str, type[Everett] | type[Dinan] | type[Bordelon]] = {
    "everett": Everett,
    "dinan": Dinan,
    "bordelon": Bordelon,
}
# The stem of each paper's models; norms, the matrices of a block and the readout follow.
_STEMS = {
    "language": (Role.TOKEN_EMBEDDING, Role.POSITION_EMBEDDING),
    "vision": (Role.PATCH_EMBEDDING, Role.POSITION_EMBEDDING),
}


def numbers_table(args: argparse.Namespace) -> _Result:
    """What a prescription gives every role of a paper's model at one width."""
    name: str = args.prescription
    settings: dict[str, Any] = dict(map(_setting, args.settings))
    if name == "stratos":  # his Table 1 has no width: exponents alone
        if settings:
            raise PlanError(f"stratos is a table of exponents; leave out {args.settings[0]}")
        rows: Rows = [("parameterization", "layer", "a", "b", "c")]
        for known, layers in stratos_table().items():
            rows += [(known, layer, *entry.values()) for layer, entry in layers.items()]
        title = "Stratos, Table 1, Adam with full alignment: multiplier n^-a, std n^-b, rate n^-c"
        return stratos_table(), rows, lambda text: f"{title}\n\n{text}"
    kind = _PRESCRIPTIONS[name]
    model = choose("model", settings.pop("model", "language"), _STEMS)
    language = model == "language"
    # Readouts: Dinan et al.'s language model has none of its own; biases are those of the papers.
    bias = (
        (Role.READOUT_BIAS,) if (name, language) in (("dinan", False), ("bordelon", True)) else ()
    )
    readout = () if name == "dinan" and language else (Role.READOUT, *bias)
    norms = (Role.NORM_SCALE,) if name == "everett" else ()
    block = (role for role in Role if role.facts.block and role.parts == (role,))
    roles = (*_STEMS[model], *norms, *block, *readout)
    # The model's own sizes beside its width, with what is meant where it is not given.
    shapes: dict[str, Any] = {} if name == "bordelon" else {"mlp_ratio": 4, "head_dim": None}
    shapes |= {} if language else {"patch_inputs": 768}
    shapes |= {"outputs": 1000} if readout else {}
    decided: dict[str, Any] = {}  # fields that go with the model
    if kind is Dinan:
        decided = {"init": "bart" if language else "vit"}
    elif kind is Bordelon:
        decided = {"zero_readout": language}
    options = [one for one in fields(kind) if one.init and one.name not in decided]
    around = ("alpha_depth", "base_depth", "eps_per_layer") if kind is Everett else ()
    for key in settings:
        choose(f"key of {name}", key, [*(one.name for one in options), *around, *shapes])
    wrapped = {key: settings.pop(key) for key in around if key in settings}
    sizes = {key: settings.pop(key, value) for key, value in shapes.items()}
    for key, value in sizes.items():
        if value is not None and not (isinstance(value, int) and value >= 1):
            raise PlanError(f"{key}={value}: expected a whole number of at least 1")
    for one in options:
        if one.default is MISSING and one.name not in settings:
            raise PlanError(f"{name} needs {one.name}=")
    prescription: Prescription = kind(**settings, **decided)
    if "alpha_depth" in wrapped:
        depth: Any = settings.get("depth")
        base_depth = wrapped.get("base_depth", 1)
        prescription = Depth(prescription, depth, base_depth, wrapped["alpha_depth"])
    if wrapped.get("eps_per_layer"):
        prescription = EpsFollows(prescription)
    width = round(prescription.width)
    hidden = width * sizes.get("mlp_ratio", 1)
    fans = {
        **dict.fromkeys((*_STEMS["language"], Role.NORM_SCALE), (1, width)),
        Role.PATCH_EMBEDDING: (sizes.get("patch_inputs"), width),
        Role.MLP_IN: (width, hidden),
        Role.MLP_OUT: (hidden, width),
        Role.READOUT: (width, sizes.get("outputs")),
        Role.READOUT_BIAS: (1, sizes.get("outputs")),
    }
    numbers = {
        str(role): prescription(Tensor(role, *fans.get(role, (width, width)))) for role in roles
    }
    wanted = prescription.forward()
    forward = wanted.factors(sizes.get("head_dim", wanted.head_dim))
    rows = [("role", "init", "std", "multiplier", "relative lr", "eps factor")]
    for role, value in numbers.items():
        init = value.init_distribution + (f" {value.init_mean:.4g}" if not value.init_std else "")
        scales = (value.init_std, value.multiplier, value.lr, value.eps)
        rows.append((role, init, *(f"{scale:.6g}" for scale in scales)))
    parts = [f"{factor} {value:.6g}" for factor, value in forward.items()]
    if "attention_scale" not in forward:
        power = f"{wanted.attention:g}"
        parts.insert(0, f"attention_scale head_dim^({power}), a number with head_dim=")
    inner = {"gradient", "eps_power"}  # what prescriptions tell each other
    by_role = {
        role: {key: entry for key, entry in asdict(value).items() if key not in inner}
        for role, value in numbers.items()
    }
    everything = {"prescription": prescription.describe(), "roles": by_role, "forward": forward}
    return everything, rows, lambda text: f"{text}\n{', '.join(parts)}"


def _setting(text: str) -> tuple[str, object]:
    """key=value: numbers, true and false as JSON has them, anything else a text."""
    key, equals, value = text.partition("=")
    if not equals:
        raise PlanError(f"{text!r}: expected key=value, such as width=256")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def tracing(args: argparse.Namespace) -> str:
    """What every tensor of a stock model, or of a file's, is for: a pass at each of two widths."""
    from param_groups.check import command, stock
    from param_groups.model.trace import traced

    if args.target.partition(":")[0] not in ("hf", "timm"):
        task = command.load_function(Path(args.target), "task(width, seed)", "a Check")
        return str(command.trace_of(task, WIDTHS))
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
        command("table", numbers_table, help="what a prescription gives every role"),
    ]
    for one in add:
        one("--json", action="store_true", help="every number, for programs")
    of_solve, of_table = add[2:]
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
    of_table("prescription", choices=(*_PRESCRIPTIONS, "stratos"))
    of_table(
        "settings",
        nargs="*",
        metavar="key=value",
        help="fields of the prescription (width=256 base_width=64), and of a paper's model: "
        "model=language or vision, head_dim, mlp_ratio, patch_inputs, outputs",
    )
    commands.add_parser("check", help="train a few steps at several widths: does anything grow?")
    commands.add_parser("audit", help="which rule does an optimiser of anybody's follow?")
    commands.add_parser("transfer", help="train several widths: does the best rate stay?")
    of_trace = command("trace", tracing, help="what every tensor of a model is for")
    of_trace("target", help="FILE.py with task(width, seed), hf:gpt2 or timm:vit_tiny_patch16_224")
    return parser


if __name__ == "__main__":
    main()
