"""`param-groups exponents|constraints|solve|table|suggest|check`."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import MISSING, asdict, fields
from typing import TYPE_CHECKING, Any

from param_groups import exponents
from param_groups.contract import OPTIMIZER_FAMILY, Numbers, Prescription, exponent_optimizer
from param_groups.exponents import (
    ALIGNMENTS,
    LAYERS,
    OPTIMIZERS,
    PARAMETERIZATION_TABLE,
    Alignment,
    ExponentError,
    Solution,
    gradient_exponents,
    solve,
)
from param_groups.prescriptions import DINAN_STRATEGIES, Bordelon, Dinan, Everett
from param_groups.roles import BLOCK, PlanError, Role
from param_groups.rows import align

if TYPE_CHECKING:  # a generic class for type checkers alone
    _Commands = argparse._SubParsersAction[argparse.ArgumentParser]

Rows = list[tuple[str, ...]]

SYMBOLS = """n is the width. A layer multiplies its input z by n^-a W, W starts with entries of size
n^-b and learns with rate n^-c. alpha, omega and u say how the terms of the change of its output add
up over the n inputs, 1/2 as independent numbers do and 1 as equal ones: alpha for (change of W) z,
omega for W (change of z), u for (change of W)(change of z). The change of a layer's output is
n^-residual: 0 changes by a constant, above 0 ever less at larger widths. stable: no change grows
with width; nontrivial: training moves the logits; feature learning: it moves the last layer's
input."""


def everett_table() -> dict[str, dict[str, dict[str, object]]]:
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
    for name in PARAMETERIZATION_TABLE:
        gradients = gradient_exponents(name)
        rates = [solve(name, *column).lr for column in columns]
        for layer in LAYERS:
            own = PARAMETERIZATION_TABLE[name][layer]
            powers = -2 * own.b, -own.a, gradients[layer], *(rate[layer] for rate in rates)
            rows.append((name, layer, *map(str, powers)))
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


def stratos_rows() -> Rows:
    """The same with a line per layer."""
    rows: Rows = [("parameterization", "layer", "a", "b", "c")]
    for name, layers in stratos_table().items():
        rows += [(name, layer, *entry.values()) for layer, entry in layers.items()]
    return rows


def solution_rows(solution: Solution) -> Rows:
    """A line per layer: the power of n in its rate, and the residual of its output's change."""
    several = len(solution.residuals) > len(LAYERS)
    hidden = [f"hidden {i}" if several else "hidden" for i in range(1, len(solution.residuals) - 1)]
    return [
        ("layer", "learning rate n^", "residual"),
        *(
            (layer, str(solution.lr[layer.split()[0]]), str(residual))
            for layer, residual in zip(
                ("embedding", *hidden, "readout"), solution.residuals, strict=True
            )
        ),
    ]


def properties(solution: Solution) -> str:
    """What the rates do, and what the symbols mean."""
    flags = ("stable", "nontrivial", "feature_learning")
    lines = [f"{flag.replace('_', ' ')}: {getattr(solution, flag)}" for flag in flags]
    return "\n".join([*lines, "", *textwrap.wrap(SYMBOLS, 98)])


JSON_HELP = "every number, for programs"
# The stem of each paper's models; norms, BLOCK and readout follow.
_STEMS = {
    "language": (Role.TOKEN_EMBEDDING, Role.POSITION_EMBEDDING),
    "vision": (Role.PATCH_EMBEDDING, Role.POSITION_EMBEDDING),
}


# What a command found: its value for JSON, its rows for the table, its text for people.
_Found = tuple[object, Rows, Callable[[str], str]]


def main(argv: Sequence[str] | None = None) -> None:
    """Runs one command; a mistake of the user's is one line and exit code 2."""
    words = [*(sys.argv[1:] if argv is None else argv)]
    try:
        if words[:1] == ["check"]:  # the only one that needs torch
            from param_groups.check import command

            command.main(words[1:])
            return
        args = _parser().parse_args(words)
        found = args.command(args)
        if isinstance(found, str):
            print(found)
            return
        value, rows, text = found
        print(json.dumps(value, indent=1) if args.json else text(align(rows)))
    except (ExponentError, PlanError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def published_exponents(_: argparse.Namespace) -> _Found:
    """Everett et al., Table 1, as the solver derives it."""
    title = "Powers of the width n (Everett et al., Table 1)"
    return everett_table(), everett_rows(), lambda text: f"{title}\n\n{text}"


def constraints(_: argparse.Namespace) -> _Found:
    """Everett et al., Table 2."""
    rows = constraint_rows()
    value = [dict(zip(rows[0], row, strict=True)) for row in rows[1:]]
    note = "\n".join(textwrap.wrap(CONSTRAINTS_NOTE, 98))
    return value, rows, lambda text: f"Everett et al., Table 2\n\n{text}\n\n{note}"


def solution(args: argparse.Namespace) -> _Found:
    """The largest stable learning rates under the alignment given."""
    alignment = Alignment(args.alpha, args.omega, args.u, omega_readout=args.omega_readout)
    optimizer = exponent_optimizer(args.optimizer)
    family = OPTIMIZER_FAMILY.get(optimizer, optimizer)
    solved = exponents.solve(
        args.parameterization, family, alignment, hidden_layers=args.hidden_layers
    )
    rows = solution_rows(solved)
    return solved.to_dict(), rows, lambda text: f"{text}\n{properties(solved)}"


def numbers_table(args: argparse.Namespace) -> _Found:
    """What a prescription gives every role at one width."""
    if args.prescription == "stratos":
        return _stratos(args)
    prescription = _prescription(args)
    numbers = {
        str(role): prescription(role, *_fans(role, round(prescription.width), args))
        for role in _roles(args)
    }
    forward = prescription.forward(args.head_dim)
    roles = {role: asdict(value) for role, value in numbers.items()}
    value = {"prescription": prescription.describe(), "roles": roles, "forward": forward}
    factors = _forward_text(forward, prescription)
    return value, _rows(numbers), lambda text: f"{text}\n{factors}"


def _stratos(args: argparse.Namespace) -> _Found:
    """His Table 1 has no width: exponents alone, Adam with full alignment."""
    given = [name for name in (*_EVERYWHERE, *_SHAPES) if vars(args).get(name) is not None]
    if given or args.optimizer != "adam":
        name = given[0].replace("_", "-") if given else "optimizer"
        raise PlanError(f"--prescription stratos prints exponents of Adam; leave out --{name}")
    title = "Stratos, Table 1: multiplier n^-a, std n^-b, rate n^-c"
    return stratos_table(), stratos_rows(), lambda text: f"{title}\n\n{text}"


def _forward_text(forward: dict[str, float], prescription: Prescription) -> str:
    """The factors of the forward pass; without a head dimension, the attention's power of it."""
    parts = [f"{name} {value:.6g}" for name, value in forward.items()]
    if "attention_scale" not in forward:
        power = prescription.attention_exponent()
        parts.insert(0, f"attention_scale head_dim^({power:g}), a number with --head-dim")
    return ", ".join(parts)


_PRESCRIPTIONS: dict[str, type[Everett] | type[Dinan] | type[Bordelon]] = {
    "everett": Everett,
    "dinan": Dinan,
    "bordelon": Bordelon,
}
PRESCRIPTIONS = (*_PRESCRIPTIONS, "stratos")

# What a model is like beside its width, and what is meant where it is not said.
_SHAPES = {"head_dim": None, "model": "language", "patch_inputs": 768, "outputs": 1000}
# The options each prescription reads: its own fields, and the MLP's width where it is free.
_SHARED = {"optimizer", "head_dim", "init", "zero_readout", "hidden_layers"}
_OPTIONS = {
    name: [own.name for own in fields(kind) if own.init and own.name not in _SHARED]
    + ([] if kind is Bordelon else ["mlp_ratio"])
    for name, kind in _PRESCRIPTIONS.items()
}
_EVERYWHERE = tuple(dict.fromkeys(name for options in _OPTIONS.values() for name in options))


def _prescription(args: argparse.Namespace) -> Prescription:
    """The prescription of the options given; PlanError for one it lacks or would ignore."""
    own, kind = _OPTIONS[args.prescription], _PRESCRIPTIONS[args.prescription]
    for name in _EVERYWHERE:
        if name in args and name not in own:
            readers = " and ".join(key for key, options in _OPTIONS.items() if name in options)
            raise PlanError(
                f"--{name.replace('_', '-')} goes with --prescription {readers}, "
                f"not {args.prescription}"
            )
    language = (args.model or _SHAPES["model"]) == "language"
    if language and args.patch_inputs is not None:
        raise PlanError("--patch-inputs goes with --model vision, not language")
    if language and kind is Dinan and args.outputs is not None:
        raise PlanError("--outputs goes with --model vision, as dinan's language model is tied")
    for name, value in _SHAPES.items():
        vars(args)[name] = value if getattr(args, name) is None else getattr(args, name)
    values: dict[str, Any] = {name: getattr(args, name) for name in own if name in args}
    vars(args)["mlp_ratio"] = values.pop("mlp_ratio", 4)
    for name in ("head_dim", "mlp_ratio", "patch_inputs", "outputs"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise PlanError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    if kind is Everett:
        values.setdefault("parameterization", "standard")
        if "depth" in values and "alpha_depth" not in values:
            raise PlanError("--depth goes with --alpha-depth in --prescription everett")
    elif kind is Dinan:
        values["init"] = "vit" if args.model == "vision" else "bart"
    else:
        values["zero_readout"] = args.model == "language"
        if args.head_dim is not None:
            values["head_dim"] = args.head_dim
    for needed in fields(kind):
        if needed.init and needed.default is MISSING and needed.name not in values:
            option = needed.name.replace("_", "-")
            raise PlanError(f"--prescription {args.prescription} needs --{option}")
    return kind(**values, optimizer=args.optimizer)


def _roles(args: argparse.Namespace) -> tuple[Role, ...]:
    norms = (Role.NORM_SCALE,) if args.prescription == "everett" else ()
    tied = args.prescription == "dinan" and args.model == "language"
    bias = (args.prescription, args.model) in (("dinan", "vision"), ("bordelon", "language"))
    readout = () if tied else (Role.READOUT, *((Role.READOUT_BIAS,) if bias else ()))
    return (*_STEMS[args.model], *norms, *BLOCK, *readout)


def _fans(role: Role, width: int, args: argparse.Namespace) -> tuple[int, int]:
    hidden = width * (1 if args.prescription == "bordelon" else args.mlp_ratio)
    return {
        **dict.fromkeys((*_STEMS["language"], Role.NORM_SCALE), (1, width)),
        Role.PATCH_EMBEDDING: (args.patch_inputs, width),
        Role.MLP_IN: (width, hidden),
        Role.MLP_OUT: (hidden, width),
        Role.READOUT: (width, args.outputs),
        Role.READOUT_BIAS: (1, args.outputs),
    }.get(role, (width, width))


def _rows(numbers: dict[str, Numbers]) -> Rows:
    rows: Rows = [("role", "init", "std", "multiplier", "relative lr", "eps factor")]
    for role, value in numbers.items():
        init = (
            f"{value.init_distribution} {value.init_mean:.4g}"
            if value.init_std == 0
            else (value.init_distribution)
        )
        scales = (value.init_std, value.multiplier, value.lr, value.eps)
        rows.append((role, init, *(f"{scale:.6g}" for scale in scales)))
    return rows


def suggestion(args: argparse.Namespace) -> str:
    """Rules guessed for a stock model of the library's own size, as code."""
    import torch

    from param_groups.stock.rules import stock
    from param_groups.stock.suggest import suggest

    with torch.device("meta"):
        return str(suggest(stock(args.model)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m param_groups", description=__doc__)
    names = "exponents|constraints|solve|table|suggest|check"
    commands = parser.add_subparsers(required=True, metavar=names)
    for name, command, number in (
        ("exponents", published_exponents, 1),
        ("constraints", constraints, 2),
    ):
        plain = commands.add_parser(name, help=f"Everett et al., Table {number}")
        plain.add_argument("--json", action="store_true", help=JSON_HELP)
        plain.set_defaults(command=command)
    _add_solve(commands)
    _add_table(commands)
    commands.add_parser("check", help="train a few steps at several widths: does anything grow?")
    suggest = commands.add_parser("suggest", help="rules to look over for a stock model")
    suggest.add_argument("model", help="hf:gpt2 or timm:vit_tiny_patch16_224, not downloaded")
    suggest.set_defaults(command=suggestion)
    return parser


def _add_solve(commands: _Commands) -> None:
    parser = commands.add_parser(
        "solve", help="largest stable learning rates for any alignment", epilog=SYMBOLS
    )
    parser.add_argument("--parameterization", required=True, help="standard, ntk, mup, mean_field")
    parser.add_argument("--optimizer", required=True, help="sgd, adam, adafactor")
    for name, meaning in (
        ("alpha", "alignment of the weight update with the layer's input"),
        ("omega", "alignment of the initial weight with the change of its input"),
        ("u", "alignment of both changes"),
    ):
        parser.add_argument(f"--{name}", required=True, help=meaning + ", in [0, 1]")
    parser.add_argument("--omega-readout", help="omega of the readout, if different")
    parser.add_argument("--hidden-layers", type=int, default=1, help="how many follow each other")
    parser.add_argument("--json", action="store_true", help=JSON_HELP)
    parser.set_defaults(command=solution)


def _add_table(commands: _Commands) -> None:
    parser = commands.add_parser("table", help="what a prescription gives every role")
    parser.add_argument("--prescription", required=True, choices=PRESCRIPTIONS)
    parser.add_argument("--optimizer", default="adam", help=", ".join(OPTIMIZER_FAMILY))
    parser.add_argument("--model", choices=_STEMS, help="stem and head (default language)")
    parser.add_argument("--head-dim", type=int, help="head dimension, N in bordelon")
    parser.add_argument("--patch-inputs", type=int, help="inputs of a patch (vision, default 768)")
    parser.add_argument("--outputs", type=int, help="classes or vocabulary (default 1000)")
    parser.add_argument("--json", action="store_true", help=JSON_HELP)
    _own(parser, "width", type=int, help="n")
    _own(parser, "mlp-ratio", type=int, help="MLP width over n, M in dinan (default 4)")
    everett = parser.add_argument_group("everett")
    _own(everett, "parameterization", help=", ".join(exponents.PARAMETERIZATION_TABLE))
    _own(everett, "alignment", help="full, none or global")
    _own(everett, "base-width", type=int, help="width at which the exponents cancel")
    _own(everett, "eps-per-layer", action="store_true", help="scale epsilon with the gradient")
    _own(everett, "embedding-std", type=float, help="scale of the embedding after its multiplier")
    for layer in exponents.LAYERS:
        _own(everett, f"gamma-{layer}", type=float, help="constant on its rate (default 1)")
    _own(everett, "qk-exponent", type=float, help="power of the head dimension on q.k")
    _own(everett, "base-depth", type=float, help="depth at which the depth's powers cancel")
    dinan = parser.add_argument_group("dinan")
    _own(dinan, "strategy", help=", ".join((*DINAN_STRATEGIES, "meta_principled")))
    _own(dinan, "s", type=float, help="in [0, 1], with meta_principled")
    _own(dinan, "mlp-factor", help="keep or drop M (default drop)")
    bordelon = parser.add_argument_group("bordelon")
    _own(bordelon, "heads", type=int, help="H")
    _own(bordelon, "depth", type=int, help="L")
    for name in ("alpha-attention", "alpha-depth", "beta0", "gamma0"):
        _own(bordelon, name, type=float, help="default 1")
    parser.set_defaults(command=numbers_table)


def _own(parser: argparse._ActionsContainer, name: str, **options: Any) -> None:
    """An option of some prescriptions only: absent unless given, as `_prescription` must know."""
    parser.add_argument(f"--{name}", default=argparse.SUPPRESS, **options)


if __name__ == "__main__":
    main()
