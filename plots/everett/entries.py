"""The entries of Table 4 of Everett et al.: the best rate's power of the width, by the paper's
estimator and as a straight line in logarithms."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from plots import rates, style
from plots.everett import horizons
from plots.everett.published import TABLE_4
from plots.findings import Estimate, Finding
from plots.floors import IrreduciblePowerLaw, irreducible_power_law

Data = Mapping[str, pd.DataFrame]  # by optimiser


@dataclass(frozen=True)
class Entry:
    """One entry of Table 4: measured and published exponent, and the horizon in this table's words.
    `floored` are the optima as a power law with an irreducible term; None below four widths."""

    optimizer: str
    rule: str
    horizon: str
    label: str
    fit: rates.Exponent
    floored: IrreduciblePowerLaw | None

    @property
    def name(self) -> str:
        """The entry in words."""
        return f"{self.optimizer}, {style.LABELS.get(self.rule, self.rule)}, {self.label}"

    @property
    def published(self) -> float:
        """The paper's exponent; NaN for what it does not have."""
        return TABLE_4[self.horizon].get(self.optimizer, {}).get(self.rule, math.nan)

    @property
    def deciding(self) -> rates.Exponent:
        """What stands beside the paper's: by its estimator, a power law with an irreducible term
        (App. H), with the jackknife's error if seeds are shared; where the widths leave that term
        open, the straight line's."""
        if not self.levels_off:
            return self.fit
        law, parts = self.floored, []
        used = {n: one for n, one in self.fit.sweeps.items() if n not in self.fit.edge}
        for part in rates.without_each_seed(used):
            one = _floored({n: 2.0**place for n, place in part.items()})
            parts.append(-one.exponent if one else math.nan)
        count = len(parts)
        known = count > 1 and all(map(math.isfinite, parts))
        error = math.sqrt((count - 1) * np.var(parts)) if known else law.exponent_error
        freedom = count - 1 if known else law.n - 3
        unknown = {"intercept": math.nan, "windows": math.nan, "chance": math.nan}
        number = {"value": -law.exponent, "error": error, "fitted": 3, "freedom": freedom}
        return replace(self.fit, **number, **unknown)

    @property
    def levels_off(self) -> bool:
        """Whether the widths determine the irreducible term."""
        return self.floored is not None and math.isfinite(self.floored.exponent_error)


def entries(data: Data) -> list[Entry]:
    """Table 4, as far as there are tables: what has no run at all is left out."""
    return [
        Entry(optimizer, rule, horizon, labels[horizon], rates.exponent(sweeps), floored(sweeps))
        for optimizer, table in data.items()
        for labels in [horizons.horizon_labels(table)]
        for (rule, horizon), sweeps in horizons.lines(table).items()
    ]


def beside(name: str, number: Estimate, published: float = math.nan, text: str = "") -> Finding:
    """An exponent, or a difference of two, beside what Table 4 has; NaN for what it does not."""
    if not text:
        text = number.text(2) if isinstance(number, rates.Exponent) else number.through_widths()
    known = (f"{published:+.2f}", number.distance(published))
    return Finding(name, text, *(("no claim", "") if math.isnan(published) else known), number)


def floored(sweeps: rates.Sweeps) -> IrreduciblePowerLaw | None:
    """lr* = floor + amplitude D^-k over the widths whose optimum is not at the edge, each optimum
    weighing alike; None where there are fewer than four, or the fit does not end."""
    used = {width: sweep.best for width, sweep in sweeps.items() if not sweep.best.at_edge}
    known = [math.log(2) * b.error * b.value for b in used.values() if math.isfinite(b.error)]
    noise = float(np.sqrt(np.mean(np.square(known)))) if known else math.nan
    return _floored({width: best.value for width, best in used.items()}, noise)


def _floored(best: Mapping[int, float], noise: float = math.nan) -> IrreduciblePowerLaw | None:
    try:
        # In units of the largest: the fit is made for losses, which are of order 1.
        unit = max(best.values())
        law = irreducible_power_law(list(best), [one / unit for one in best.values()], noise / unit)
    except (ValueError, RuntimeError):
        return None
    floor, error = unit * law.floor, unit * law.floor_error
    return replace(law, floor=floor, floor_error=error, amplitude=unit * law.amplitude)
