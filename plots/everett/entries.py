"""The entries of Table 4 of Everett et al.: the best rate's power of the width, by the paper's
estimator and as a straight line in logarithms."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from param_groups.fits import IrreduciblePowerLaw, irreducible_power_law, power_law
from plots import rates, style
from plots.everett import horizons
from plots.everett.published import TABLE_4
from plots.findings import Estimate

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
    def weighted(self) -> Estimate:
        """The exponent weighted by the optima's own errors."""
        best = {w: sweep.best for w, sweep in self.fit.sweeps.items() if sweep.best.error > 0}
        known = {w: one for w, one in best.items() if not one.at_edge and one.error < math.inf}
        if len(known) < 2:
            return Estimate(math.nan, math.nan, 0)
        values, errors = zip(*((one.value, one.error) for one in known.values()), strict=True)
        law = power_law(list(known), values, errors)
        return Estimate(law.exponent, law.error, law.n)

    def record(self) -> dict[str, object]:
        """The entry as a row of table_4.csv."""
        windows, weighted = rates.by_window(self.fit.sweeps).values(), self.weighted
        law = self.floored if self.levels_off else None
        return {
            "optimizer": self.optimizer,
            "parameterization": self.rule,
            "horizon": self.horizon,
            "horizon_here": self.label,
            "exponent": self.fit.value,
            "standard_error": self.fit.error,
            "scatter_error": self.fit.errors.get("scatter", math.nan),
            "seed_error": self.fit.errors.get("seeds", math.nan),
            "window_lowest": min(windows, default=math.nan),
            "window_highest": max(windows, default=math.nan),
            "widths": self.fit.groups,
            "weighted_exponent": weighted.value,
            "weighted_error": weighted.error,
            "weighted_widths": weighted.groups,
            "widths_at_edge": " ".join(map(str, self.fit.edge)),
            "irreducible_exponent": -law.exponent if law else math.nan,
            "irreducible_error": self.deciding.error if law else math.nan,
            "irreducible_rate": law.floor if law else math.nan,
            "published": self.published,
            "difference": self.fit.value - self.published,
        }

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
