"""Stratos' bigram model in training: Tables 1 and 3 and the alignments, as fitted exponents.

Every step is W_l <- W_l - C d^(-c_l) sign(W'_l), Adam without momentum, (12), on the one bigram.

What these networks do, where the paper says otherwise:

* omega_{L+1} = 1 from the first step on: the change of h_{L+1} is aligned with the readout. So the
  logits of SP and NTK move as sqrt(d), (31); Condition A.2, row 1 of Table 3, and omega_{L+1} =
  1/2, on which the first two rows of Table 1 rest, are hypothetical. The RMS over V logits shows
  it only for d far above V, as about one of them moves: that of y, the columns with [y].
* Hence SP does not maintain its gradients, as Table 3 says of either row, for more steps than
  keep the logits below a constant: then the softmax saturates, and they vanish exponentially.
* u_l = 1/2 at the first step, not 1: h_l . h'_l = h_{L+2} . h'_{L+2} is of order one in a linear
  network, so the change of h_l, along sign(h'_l), is not aligned with sign(h_l). It grows to 1 as
  the activations take up the changes, from C sqrt(d) of about 1 on. Stability needs only u <= 1.

Hence two values of C: a large one where logits stay put, so that activations move by a sizeable
part of themselves (`FittedExponent.moved`), and a small one where they grow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np
import torch

from effective_theory.stratos.bigram import (
    WORD,
    BigramConfig,
    Model,
    Pass,
    RankOne,
    Sizes,
    kind,
    layers,
    mean_square,
    over_widths,
    propagate,
    raised,
    sample,
    sizes,
)
from effective_theory.stratos.exponents import (
    Cell,
    Claim,
    FittedExponent,
    chosen,
    columns,
    fit,
    table_2,
    variance_exponents,
)
from effective_theory.stratos.table_1 import STRATOS_TABLE
from param_groups.rules.exponents import (
    HALF,
    LAYERS,
    TENSOR_PROGRAMS,
    Layer,
    Parameterization,
    residuals,
)


@dataclass(frozen=True)
class Member:
    """A member of the family: the exponents a, b and c of the embedding, hidden and readout."""

    parameterization: Parameterization
    c: tuple[Fraction, ...]

    @property
    def logits_grow(self) -> bool:
        """Whether a step moves the logits by sqrt(d), (31): a readout of RMS(W) d^(-a) 1/sqrt(d)
        whose alignment with the change of h_{L+1} is full."""
        return self.parameterization.readout.scale == HALF

    def rates(self, width: int, config: BigramConfig) -> list[float]:
        """eta_0..eta_{L+1}, (11), with the small C where logits grow."""
        c = dict(zip(LAYERS, self.c, strict=True))
        count = config.hidden_layers
        exponents = [c[kind(l, count)] for l in range(count + 2)]
        rate = config.small_learning_rate if self.logits_grow else config.learning_rate
        return [rate * raised(width, -exponent) for exponent in exponents]


def member(name: str) -> Member:
    """A row of Stratos' Table 1: sp, ntk, mup or mf; UserError for another name."""
    (name,) = chosen([name], STRATOS_TABLE, "Table 1")
    row = STRATOS_TABLE[name]
    exponents = (Layer(row["a"][layer], row["b"][layer]) for layer in LAYERS)
    return Member(Parameterization(*exponents), tuple(row["c"][layer] for layer in LAYERS))


def _with_readout_of(base: str, readout: str) -> Member:
    """Table 3's "SP+readout": the embedding and hidden layers of one, the readout of another."""
    first, second = member(base), member(readout)
    mixed = first.parameterization, second.parameterization.readout
    return Member(
        Parameterization(mixed[0].embedding, mixed[0].hidden, mixed[1]), (*first.c[:2], second.c[2])
    )


@dataclass(frozen=True)
class Step:
    """One step of sign descent: the model and its passes before, its updates, and the pass after.

    `before.h` and `after.h` differ by the changes of h_0..h_{L+2}.
    """

    model: Model
    before: Pass
    updates: tuple[RankOne, ...]
    after: Pass

    def change(self, l: int) -> torch.Tensor:
        """The change of h_l."""
        return self.after.h[l] - self.before.h[l]


def sign_steps(model: Model, rates: Iterable[float], steps: int, networks: int) -> Iterator[Step]:
    """Steps of (12). The sign of a gradient of rank one has rank one, so no matrix is formed."""
    rates = tuple(rates)
    before = propagate(model, networks)
    for _ in range(steps):
        updates = tuple(
            RankOne(-rate * gradient.left.sign(), gradient.right.sign())
            for rate, gradient in zip(rates, before.weight_gradient, strict=True)
        )
        weights = tuple(w.plus(update) for w, update in zip(model.weights, updates, strict=True))
        changed = Model(weights, model.multipliers, model.rms_norm)
        after = propagate(changed, networks)
        yield Step(model, before, updates, after)
        model, before = changed, after


def step_sizes(step: Step) -> Sizes:
    """Mean squares of h_l, h'_l and W'_l before the step and of the changes of h_l.

    "[y]" is the one logit of the target in place of the mean over V.
    """
    last = len(step.model.weights)
    squares = sizes(step.before)
    squares |= {f"dh_{l}": mean_square(step.change(l)) for l in range(1, last + 1)}
    return squares | {f"dh_{last}[y]": step.change(last)[:, WORD].square()}


def alignment_sizes(step: Step, variances: list[float]) -> Sizes:
    """d^(2 alpha), d^(2 omega) and d^(2 u) of W_1..W_{L+1} as ratios of mean squares, (15)-(17).

    `variances` are those of the initial W_0..W_{L+1}: of RMS(W_l), sign steps change no exponent.
    """
    ratios = {}
    last = len(step.model.weights) - 1
    for l in range(1, last + 1):
        weight, update, change = step.model.weights[l], step.updates[l], step.change(l)
        moved = weight.times(change)
        ratios[f"alpha_{l}"] = _ratio(update.times(step.before.h[l]), update, step.before.h[l])
        ratios[f"omega_{l}"] = mean_square(moved) / (variances[l] * mean_square(change))
        ratios[f"u_{l}"] = _ratio(update.times(change), update, change)
    of_target = moved[:, WORD].square() / (variances[last] * mean_square(change))
    return ratios | {f"omega_{last}[y]": of_target}


def _ratio(product: torch.Tensor, matrix: RankOne, vector: torch.Tensor) -> torch.Tensor:
    return mean_square(product) / (matrix.mean_square() * mean_square(vector))


_MOVED = "moved"
Results = dict[tuple[str, int], torch.Tensor]


@lru_cache(maxsize=8)
def _trained(item: Member, config: BigramConfig) -> Mapping[tuple[str, int], np.ndarray]:
    """(name, step) -> mean squares, (widths, networks); Tables 1, 3 and the alignments share it."""

    def measure(width: int, networks: int, generator: torch.Generator) -> Results:
        model = sample(item.parameterization, width, networks, config, generator)
        exponents = layers(item.parameterization, config.hidden_layers)
        variances = [raised(width, -2 * layer.b) for layer in exponents]
        steps = sign_steps(model, item.rates(width, config), config.steps, networks)
        results: Results = {}
        start = None
        for number, step in enumerate(steps, 1):
            start = start or step.before
            both = step_sizes(step) | alignment_sizes(step, variances)
            change = step.before.h[-2] - start.h[-2]  # of h_{L+1}, since initialization
            both[_MOVED] = mean_square(change) / mean_square(start.h[-2])
            results |= {(name, number): values for name, values in both.items()}
        return results

    return over_widths(config, measure)


# A note on a column at one step, and the kind of its prediction.
Remark = tuple[str, Claim]
_NONE: Remark = ("", "prediction")


def _rows(
    table: str,
    name: str,
    item: Member,
    predictions: Mapping[str, Fraction],
    about: Callable[[str, int], Remark],
    config: BigramConfig,
) -> list[FittedExponent]:
    """A fit for every predicted column and every step, all of them of an RMS."""
    squares = _trained(item, config)
    rows = []
    for step in range(1, config.steps + 1):
        moved = float(np.sqrt(squares[_MOVED, step][-1].mean()))
        for column, predicted in predictions.items():
            note, claim = about(column, step)
            place = Cell(table, name, column, predicted, step, claim, moved, note)
            rows.append(fit(place, squares[column, step], config.widths, root=True))
    return rows


def table_1(config: BigramConfig, rows: Iterable[str] | None = None) -> list[FittedExponent]:
    """RMS in training of the four parameterizations of Table 1: rows sp, ntk, mup and mf.

    Predicted by (9), (10) and (13)-(20) with full alignment and omega_{L+1} = 1, (31). UserError
    for an unknown row.
    """
    fitted = []
    for name in chosen(rows, STRATOS_TABLE, "Table 1"):
        item = member(name)
        predictions = _predicted_rms(item, config.hidden_layers)
        about = _about_logits(item, config, ("omega_{L+1} = 1/2 would make it 0", _NONE[1]))
        fitted += _rows("Table 1", name, item, predictions, about, config)
    return fitted


def _predicted_rms(item: Member, hidden_layers: int) -> dict[str, Fraction]:
    """RMS of the activations, their changes and the gradients, as powers of d."""
    last = hidden_layers + 1
    variances = variance_exponents(item.parameterization, hidden_layers)
    halves = {name: value / 2 for name, value in variances.items()}
    del halves[f"h_{last + 1}"]  # it grows in training from its small size in muP and MF
    c = dict(zip(LAYERS, item.c, strict=True))
    changes = residuals(
        item.parameterization, "adam", TENSOR_PROGRAMS, c, hidden_layers=hidden_layers
    )
    halves |= {f"dh_{l}": -residual for l, residual in enumerate(changes, 1)}
    return halves | {f"dh_{last + 1}[y]": -changes[-1], f"h'_{last + 1}": Fraction(0)}


# Stratos, Table 3: RMS as powers of d. Columns: h_1..h_{L+1}, the change of h_{L+2}, h'_{L+2},
# h'_{L+1}..h'_1, W'_{L+1}, W'_L..W'_1 and W'_0.
TABLE_3 = {
    "SP (Condition A.2)": "0   0  0 -1/2    0 -1/2 -1/2",
    "SP (31)": "           0 1/2  0 -1/2    0 -1/2 -1/2",
    "SP+readout (31)": "   0   0  0   -1 -1/2   -1   -1",
    "SP+emb/readout (31)": "0  0  0   -1 -1/2   -1 -1/2",
}


def _member_of_table_3(name: str) -> Member:
    """The network of a row; the first two are the same one."""
    if name == "SP+readout (31)":
        return _with_readout_of("sp", "mup")
    return member("mup" if name == "SP+emb/readout (31)" else "sp")


_VIOLATED: Remark = ("the model violates Condition A.2 from its first step", "hypothetical")


def table_3(config: BigramConfig, rows: Iterable[str] | None = None) -> list[FittedExponent]:
    """RMS in training, Table 3: its rows are the keys of TABLE_3.

    Row 1 is hypothetical: it is measured on the network of row 2, which does not obey Condition
    A.2. UserError for an unknown row.
    """
    fitted = []
    for name in chosen(rows, TABLE_3, "Table 3"):
        item = _member_of_table_3(name)
        logits = f"dh_{config.hidden_layers + 2}"
        cells = map(Fraction, TABLE_3[name].split())
        predictions = columns(cells, config.hidden_layers, logits)
        predictions[f"{logits}[y]"] = predictions[logits]
        about = _about_logits(item, config, _VIOLATED if "A.2" in name else _NONE)
        fitted += _rows("Table 3", name, item, predictions, about, config)
    return fitted


def _about_logits(
    item: Member, config: BigramConfig, logits: Remark
) -> Callable[[str, int], Remark]:
    """What to say of columns that growing logits make misread: `logits` of their changes."""
    column_of_logits = f"dh_{config.hidden_layers + 2}"
    rms = f"one logit of {config.vocabulary} grows, which their RMS shows only for large d"

    def about(column: str, step: int) -> Remark:
        if item.logits_grow and column.startswith(column_of_logits):
            notes = (logits[0], "" if "[y]" in column else rms)
            return "; ".join(filter(None, notes)), logits[1]
        if item.logits_grow and "'" in column and step > 1:
            return "shrinks where the grown logits saturate the softmax", "prediction"
        return _NONE

    return about


def alignment(config: BigramConfig, rows: Iterable[str] | None = None) -> list[FittedExponent]:
    """alpha_l, omega_l and u_l of (15)-(17), l = 1..L+1, for the rows of Table 1.

    Predicted is full alignment, alpha = 1 and u <= 1, with omega = 1/2 at hidden layers and 1 at
    the readout. UserError for an unknown row.
    """
    last = config.hidden_layers + 1
    predictions: dict[str, Fraction] = {}
    for l in range(1, last + 1):
        alpha, omega, u = TENSOR_PROGRAMS.at(kind(l, config.hidden_layers))
        predictions |= {f"alpha_{l}": alpha, f"omega_{l}": omega, f"u_{l}": u}
    predictions[f"omega_{last}[y]"] = predictions[f"omega_{last}"]

    def about(column: str, step: int) -> Remark:
        if column.startswith("u_"):
            return _OF_U
        if column == f"omega_{last}":
            note = f"the RMS over {config.vocabulary} logits shows it only for large d"
            return note, "prediction"
        return _NONE

    fitted = []
    for name in chosen(rows, STRATOS_TABLE, "alignment"):
        fitted += _rows("alignment", name, member(name), predictions, about, config)
    return fitted


_OF_U: Remark = (
    "1/2 while changes are small (C sqrt(d) << 1), towards 1 once activations have taken them up",
    "bound",
)


def tables(config: BigramConfig) -> list[FittedExponent]:
    """Tables 2, 1 and 3 and the alignments, every row of them."""
    return [*table_2(config), *table_1(config), *table_3(config), *alignment(config)]
