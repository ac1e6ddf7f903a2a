"""How the papers' prescriptions relate, computed from `param_groups` as exact powers of the width.

    python -m effective_theory.cross_paper

prints every fact with the exponents behind it; exit code 1 if one does not hold. A layer type has
multiplier n^(-a), initial standard deviation n^(-b) and learning rate n^(-c); a shift by theta,
a + theta, b - theta, c - theta (SGD: 2 theta) changes none of what is trained.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from effective_theory.stratos.table_1 import STRATOS_NAMES, STRATOS_TABLE
from param_groups import Bordelon, Dinan, Prescription, Role, Tensor
from param_groups.check.theory import power_between
from param_groups.rules.exponents import (
    FULL_ALIGNMENT,
    LAYERS,
    PARAMETERIZATION_TABLE,
    TENSOR_PROGRAMS,
    Layer,
    Parameterization,
    shift,
    solve,
)

OPTIMIZERS = ("sgd", "adam")
# One role stands for each layer type; the tests check that the others of its type agree.
_ROLES = dict(zip(LAYERS, (Role.PATCH_EMBEDDING, Role.ATTENTION_OUTPUT, Role.READOUT), strict=True))
_WIDTHS = (2**10, 2**20)
_FIXED = 32  # n_patch and n_out, which do not grow with the width


@dataclass(frozen=True)
class Scaling:
    """Exponents (a, b, c) of one layer type: multiplier, initial std and rate are n^(-these)."""

    a: Fraction
    b: Fraction
    c: Fraction

    def with_multiplier(self, a: Fraction, optimizer: str) -> Scaling:
        """The member of the equivalence class that has multiplier exponent `a`."""
        layer, c = shift(Layer(self.a, self.b), self.c, a - self.a, optimizer)
        return Scaling(layer.a, layer.b, c)

    def __str__(self) -> str:
        return f"({self.a}, {self.b}, {self.c})"


Scalings = Mapping[str, Scaling]


@dataclass(frozen=True)
class Fact:
    """A statement, whether it holds, and the exponents that say so, one line each."""

    statement: str
    holds: bool
    lines: tuple[str, ...]


def scaling(rule: Callable[[int], Prescription], role: Role) -> Scaling:
    """The exponents of one role, from the numbers a prescription gives at two widths.

    Initial values of zero are not allowed.
    """
    written = [
        rule(width)(
            Tensor(
                role,
                _FIXED if role is Role.PATCH_EMBEDDING else width,
                _FIXED if role is Role.READOUT else width,
            )
        )
        for width in _WIDTHS
    ]
    ratio = _WIDTHS[1] / _WIDTHS[0]
    pairs = [[getattr(one, key) for one in written] for key in ("multiplier", "init_std", "lr")]
    powers = [power_between(small, large, ratio) for small, large in pairs]
    return Scaling(*(-one for one in powers if one is not None))


def dinan(s: Fraction, optimizer: str) -> dict[str, Scaling]:
    """Dinan et al.'s family by layer type: (1.25)-(1.34), (1.99)-(1.116), footnotes 8 and 26."""
    return _by_layer(
        lambda width: Dinan(
            width, "meta_principled", s=float(s), optimizer=optimizer, mlp_factor="keep"
        )
    )


def everett(name: str, optimizer: str, alignment=FULL_ALIGNMENT) -> dict[str, Scaling]:
    """A row of Everett et al.'s Table 1 with the solver's largest stable rates."""
    rates = solve(name, optimizer, alignment).c
    table = PARAMETERIZATION_TABLE[name]
    return {layer: Scaling(table[layer].a, table[layer].b, rates[layer]) for layer in LAYERS}


def bordelon(optimizer: str) -> dict[str, Scaling]:
    """Bordelon et al., Tables 1 and 2, in the number of heads at depth 1."""
    return _by_layer(lambda width: Bordelon(1, width, 1, optimizer=optimizer))


def facts() -> list[Fact]:
    """All of them, in the README's order."""
    return [
        dinan_is_the_solver(),
        _one_class(
            "Dinan et al.'s maximal-update strategy (s = 1) is muP up to the shift theta",
            lambda optimizer: (dinan(Fraction(1), optimizer), everett("mup", optimizer)),
        ),
        neural_tangent_is_not_ntk(),
        stratos_is_everett(),
        _one_class(
            "Bordelon et al.'s scaling in the number of heads is muP up to the shift theta",
            lambda optimizer: (bordelon(optimizer), everett("mup", optimizer)),
        ),
    ]


def dinan_is_the_solver() -> Fact:
    """Dinan's rates are the largest stable ones for his initialisation, for every s."""
    lines, holds = [], True
    for s, optimizer in itertools.product((Fraction(i, 8) for i in range(9)), OPTIMIZERS):
        own = dinan(s, optimizer)
        table = Parameterization(*(Layer(own[layer].a, own[layer].b) for layer in LAYERS))
        rates = {layer: own[layer].c for layer in LAYERS}
        solved = solve(table, optimizer, TENSOR_PROGRAMS).c
        holds &= rates == solved
        mine, theirs = (f"({', '.join(map(str, c.values()))})" for c in (rates, solved))
        lines.append(f"s = {s!s:<4} {optimizer:<5} c = {mine}; solver {theirs}")
    statement = (
        "Dinan et al.'s learning rates are the largest stable ones of Everett et al.'s solver at "
        "alpha = 1, omega = 1 in the readout, with unit multipliers, for every s"
    )
    return Fact(statement, holds, tuple(lines))


def _one_class(statement: str, pair: Callable[[str], tuple[Scalings, Scalings]]) -> Fact:
    """Whether two prescriptions, given by optimiser, are one up to the shift."""
    compared = [_compare(*pair(optimizer), optimizer) for optimizer in OPTIMIZERS]
    lines = tuple(line for _, text in compared for line in text)
    return Fact(statement, all(same for same, _ in compared), lines)


def neural_tangent_is_not_ntk() -> Fact:
    """s = 0 has smaller rates than Everett's NTK prescription, which is SP's class."""
    lines, holds = [], True
    for optimizer in OPTIMIZERS:
        ntk, standard = everett("ntk", optimizer), everett("standard", optimizer)
        same, text = _compare(dinan(Fraction(0), optimizer), ntk, optimizer)
        holds &= not same and _compare(ntk, standard, optimizer)[0]
        lines += text
    statement = (
        "Dinan et al.'s neural-tangent strategy (s = 0) is not Everett et al.'s NTK, which is "
        "equivalent to their standard parameterisation"
    )
    return Fact(statement, holds, tuple(lines))


def stratos_is_everett() -> Fact:
    """Stratos' Table 1 against Everett's Adam columns with full alignment."""
    lines, holds = [], True
    for name, row in STRATOS_TABLE.items():
        theirs = everett(STRATOS_NAMES[name], "adam")
        mine = {layer: Scaling(*(row[symbol][layer] for symbol in "abc")) for layer in LAYERS}
        holds &= mine == theirs
        lines.append(f"{name:<4} " + "  ".join(f"{layer} {mine[layer]}" for layer in LAYERS))
    statement = "Stratos' Table 1 is Everett et al.'s Adam with full alignment"
    return Fact(statement, holds, tuple(lines))


def _by_layer(rule: Callable[[int], Prescription]) -> dict[str, Scaling]:
    return {layer: scaling(rule, _ROLES[layer]) for layer in LAYERS}


def _compare(mine: Scalings, theirs: Scalings, optimizer: str) -> tuple[bool, list[str]]:
    """Whether two prescriptions are one class, and both at the second's multipliers."""
    moved = {layer: mine[layer].with_multiplier(theirs[layer].a, optimizer) for layer in LAYERS}
    lines = [
        f"{optimizer:<5}{layer:<10} {mine[layer]!s:<18} shifted {moved[layer]!s:<18} "
        f"theirs {theirs[layer]}"
        for layer in LAYERS
    ]
    return moved == dict(theirs), lines


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the facts; exit code 1 if one does not hold."""
    argparse.ArgumentParser(
        prog="python -m effective_theory.cross_paper",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    ).parse_args(argv)
    facts_of_papers = facts()
    for fact in facts_of_papers:
        print(f"{'holds' if fact.holds else 'FAILS'}: {fact.statement}")
        print("".join(f"    {line}\n" for line in fact.lines))
    raise SystemExit(0 if all(fact.holds for fact in facts_of_papers) else 1)


if __name__ == "__main__":
    main()
