"""Exponents of the bigram model's sizes: predicted, fitted, and Table 2 at initialization.

Where the paper is read otherwise than it is printed:

* (5) has a wrong sign: Var(W'_l) goes as d^(L - [1 <= l <= L] - 2(...)), see `variance_exponents`.
* Table 2's h'_{L+2} is the variance about the mean 1/V - y; W'_{L+1} takes its second moment.
* With sigma_{L+1}^2 = 1 (rows 5 and 6) logits grow as sqrt(d) and the softmax saturates. Until its
  largest entry is alone, the variance of h'_{L+2} still rises, to (1 - 1/V)/V, and with it all
  gradients: a slope over finite widths that vanishes slowly, not an exponent.
* Lemma D.1's variance of activation gradients is exact only for d to infinity: h'_{l+1} depends on
  W_l through the softmax, which changes the variance by a factor 1 + O(1/d) (tested).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Literal

import numpy as np
import torch

from effective_theory.stratos.bigram import (
    BigramConfig,
    Sizes,
    layers,
    mean_square,
    over_widths,
    propagate,
    sample,
    sizes,
)
from param_groups.fits import power_law
from param_groups.rules.exponents import HALF, ZERO, Layer, Parameterization
from training.errors import UserError

TOLERANCE = 0.07
JUDGED_SEEDS, JUDGED_WIDTH = 300, 512
_ROUNDING = 1e-12  # standard errors below it are those of sizes that all networks share
Claim = Literal["prediction", "bound", "hypothetical"]


@dataclass(frozen=True)
class FittedExponent:
    """A fitted exponent of d, and the predicted one.

    `step` is 0 at initialization, else the step of training whose gradients or changes these are.
    `error` is the standard error of `measured`: the larger of what the scatter of the widths about
    the line and of the `seeds` networks within each width imply. `local` is the slope between the
    two largest widths, with its own error from the networks; far from `measured` it says that the
    asymptote is not reached. `values` are the fitted sizes, by width. `moved` is how far training
    had moved h_{L+1} when this step began: the RMS of its change since initialization over that
    of h_{L+1}, at the largest width.
    """

    table: str
    row: str
    column: str
    step: int
    kind: Claim
    predicted: Fraction
    measured: float
    error: float
    local: float
    local_error: float
    moved: float
    widths: tuple[int, ...]
    values: tuple[float, ...]
    seeds: int
    note: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the exponent is as predicted, within TOLERANCE.

        A bound is met below it, too. None, not judged: hypothetical predictions, and exponents of
        fewer than 300 networks per width or of widths below 512 alone.
        """
        few = self.seeds < JUDGED_SEEDS or max(self.widths) < JUDGED_WIDTH
        if few or self.kind == "hypothetical":
            return None
        above = self.measured - float(self.predicted)
        return (above if self.kind == "bound" else abs(above)) <= TOLERANCE

    @property
    def z(self) -> float | None:
        """(measured - predicted) / error; None where not judged or where networks do not differ.

        Corrections at finite width, 1/d or V/d, show here long before they matter to `met`.
        """
        if self.met is None or self.error < _ROUNDING:
            return None
        return (self.measured - float(self.predicted)) / self.error

    def to_dict(self) -> dict[str, object]:
        """Plain JSON: the prediction as a string like "-1/2"; z and the verdict included."""
        lists = {"widths": list(self.widths), "values": list(self.values)}
        verdict = {"z": self.z, "met": self.met}
        return {**asdict(self), **lists, "predicted": str(self.predicted), **verdict}


@dataclass(frozen=True)
class Cell:
    """Where a fitted exponent stands, and what is predicted there.

    `kind` says what the prediction is: one that these networks follow, an upper bound, or
    hypothetical: it rests on an assumption that they violate.
    """

    table: str
    row: str
    column: str
    predicted: Fraction
    step: int = 0
    kind: Claim = "prediction"
    moved: float = 0.0
    note: str = ""


def fit(
    place: Cell, squares: np.ndarray, widths: Sequence[int], root: bool = False
) -> FittedExponent:
    """The exponent of the mean over networks of `squares`, (widths, networks), or of its root.

    UserError where a size is zero or not finite.
    """
    means = squares.mean(1)
    if not (np.isfinite(means) & (means > 0)).all():
        raise UserError(
            f"{place.table}, {place.row}, {place.column}: a size is zero or not finite, so it has "
            "no exponent; lower learning_rate (small_learning_rate for SP and NTK), steps or the "
            "largest width"
        )
    half = 0.5 if root else 1.0
    noise = half * squares.std(1, ddof=1) / math.sqrt(squares.shape[1]) / means / math.log(2)
    x, values = np.log2(np.asarray(widths, float)), means**half
    line = power_law(widths, values)
    centred = x - x.mean()
    spread = math.sqrt(float(centred**2 @ noise**2)) / float(centred @ centred)
    last = x[-1] - x[-2]
    return FittedExponent(
        **asdict(place),
        measured=line.exponent,
        error=float(np.fmax(line.error, spread)),
        local=float(np.log2(values[-1] / values[-2]) / last),
        local_error=float(np.hypot(*noise[-2:]) / last),
        widths=tuple(widths),
        values=tuple(map(float, values)),
        seeds=squares.shape[1],
    )


def variance_exponents(
    parameterization: Parameterization, hidden_layers: int
) -> dict[str, Fraction]:
    """Exponents of the elementwise variances at initialization without RMSNorm, Lemma D.5.

    (3), (4) and (5), the last with L - [1 <= l <= L] where the paper prints a plus. h'_{L+2} is
    left out: its second moment is constant for stable logits, its variance is not in (3)-(5).
    """
    scale = [layer.scale for layer in layers(parameterization, hidden_layers)]
    b = [layer.b for layer in layers(parameterization, hidden_layers)]
    last = hidden_layers + 1
    exponents = {f"h_{l + 1}": l - 2 * sum(scale[: l + 1], ZERO) for l in range(last + 1)}
    for l in range(last, 0, -1):
        exponents[f"h'_{l}"] = last - l - 2 * sum(scale[l:], ZERO)
    for l in range(last, -1, -1):
        inner = 1 if 1 <= l <= hidden_layers else 0
        exponents[f"W'_{l}"] = hidden_layers - inner - 2 * (sum(scale, ZERO) - b[l])
    return exponents


# Stratos, Table 2, as powers of d. Columns: RMSNorm, sigma_0^2, sigma_{L+1}^2, then the variances
# of h_1..h_{L+1}, h_{L+2}, h'_{L+2}, h'_{L+1}..h'_1, W'_{L+1}, W'_L..W'_1 and W'_0.
TABLE_2 = """
no    0 -1    0  0   0 -1   0 -1 -1
yes   0 -1    0  0   0 -1   0 -1 -1
no   -1 -1   -1 -1  -1 -1  -1 -2 -1
yes  -1 -1    0  0   0 -1   0 -1  0
no    0  0    0  1   0  0   0  0  0
yes   0  0    0  1   0  0   0  0  0
"""
TABLE_2_ROWS = {
    str(number): line.split() for number, line in enumerate(TABLE_2.strip().splitlines(), 1)
}


def columns(cells: Iterable[Fraction], hidden_layers: int, second: str) -> dict[str, Fraction]:
    """Give each layer its cell of a printed row; `second` names the second column, of h_{L+2}."""
    last = hidden_layers + 1
    h, logits, error, gradients, readout, hidden, embedding = cells
    named = {f"h_{l}": h for l in range(1, last + 1)}
    named |= {second: logits, f"h'_{last + 1}": error}
    named |= {f"h'_{l}": gradients for l in range(last, 0, -1)}
    named |= {f"W'_{last}": readout}
    return named | {f"W'_{l}": hidden for l in range(hidden_layers, 0, -1)} | {"W'_0": embedding}


def chosen(names: Iterable[str] | None, known: Iterable[str], table: str) -> list[str]:
    """The rows asked for, all without `names`; UserError for one that a table does not have."""
    known = list(known)
    for name in names or ():
        if name not in known:
            raise UserError(f"{table}: no row {name!r}; it has {', '.join(known)}")
    return known if names is None else list(names)


_SATURATES = "the softmax saturates, so the asymptote is reached slowly; see the local slope"


def table_2(config: BigramConfig, rows: Iterable[str] | None = None) -> list[FittedExponent]:
    """Elementwise variances at initialization, Table 2: its rows are "1" to "6".

    UserError for an unknown row.
    """
    fitted = []
    for name in chosen(rows, TABLE_2_ROWS, "Table 2"):
        norm, first, last, *cells = TABLE_2_ROWS[name]
        squares = over_widths(config, _initial_sizes(norm == "yes", first, last, config))
        logits = f"h_{config.hidden_layers + 2}"
        predictions = columns(map(Fraction, cells), config.hidden_layers, logits)
        for column, predicted in predictions.items():
            slow = last == "0" and "'" in column  # gradients of rows 5 and 6
            place = Cell("Table 2", name, column, predicted, note=_SATURATES if slow else "")
            fitted.append(fit(place, squares[column], config.widths))
    return fitted


def _initial_sizes(
    normalized: bool, first: str, last: str, config: BigramConfig
) -> Callable[[int, int, torch.Generator], Sizes]:
    """A measurement for `over_widths`: sigma_0^2 = d^first, sigma_{L+1}^2 = d^last."""
    b = (-Fraction(first) / 2, HALF, -Fraction(last) / 2)
    parameterization = Parameterization(*(Layer(0, value) for value in b))
    error = f"h'_{config.hidden_layers + 2}"
    mean = 1 / config.vocabulary  # of the softmax: h'_{L+2} has mean 1/V - y

    def measure(width: int, networks: int, generator: torch.Generator) -> Sizes:
        model = sample(parameterization, width, networks, config, generator, normalized=normalized)
        result = propagate(model, networks)
        return {**sizes(result), error: mean_square(result.h[-1].softmax(1) - mean)}

    return measure
