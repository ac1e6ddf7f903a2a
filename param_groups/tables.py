"""Exponents as tables: of Everett et al., Stratos and the solver; as text, CSV or LaTeX."""

from __future__ import annotations

import csv
import io
import textwrap
from collections.abc import Sequence

from param_groups.exponents import (
    ALIGNMENTS,
    LAYERS,
    OPTIMIZERS,
    PARAMETERIZATION_TABLE,
    Solution,
    gradient_exponents,
    solve,
)
from param_groups.rows import align

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


def render(rows: Sequence[tuple[str, ...]], style: str | None) -> str:
    """Rows, the first a header, as aligned text, or in the style "csv" or "latex"."""
    if style is None:
        return align(rows)
    if style == "csv":
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(rows)
        return text.getvalue().rstrip("\n")
    columns = "l" * len(rows[0])
    header, *body = (" & ".join(map(_latex, row)) + r" \\" for row in rows)
    begin, end = rf"\begin{{tabular}}{{{columns}}}", r"\end{tabular}"
    return "\n".join([begin, r"\hline", header, r"\hline", *body, r"\hline", end])


def _latex(cell: str) -> str:
    """A cell's text; fractions such as -1/2 are set as mathematics."""
    sign, digits = ("-", cell[1:]) if cell.startswith("-") else ("", cell)
    if digits.replace("/", "", 1).isdigit():
        top, _, bottom = digits.partition("/")
        return f"${sign}\\frac{{{top}}}{{{bottom}}}$" if bottom else f"${sign}{top}$"
    return cell.replace("_", r"\_").replace("^", r"\^{}")
