"""Best rates and their losses: over width (Figures 11 to 13, Table 4), with weight decay (9), for
Adafactor and parameter scaling (10), and over depth."""

import math
from types import SimpleNamespace

import pandas as pd
import pytest

from param_groups.fits import Optimum
from plots.everett import entries, learning_rates, published
from tests.plots.everett.constructed import RULES
from tests.plots.made import lines


def test_table_4_has_the_exponent_beside_an_irreducible_rate():
    """Where the optima level off it is another one, where they do not there is none."""

    def sweeps(law, widths=(16, 32, 64, 128)):
        return {
            width: SimpleNamespace(best=Optimum(law(width), 1.0, 3.0, True, error=1e-4))
            for width in widths
        }

    level = entries.floored(sweeps(lambda width: 0.001 + 0.02 / width))
    assert level.exponent == pytest.approx(1, rel=1e-3)
    assert level.floor == pytest.approx(0.001, rel=1e-3)
    for law in (lambda width: 0.01 - 5e-5 * width, lambda width: 1e-4 * width):
        assert math.isnan(entries.floored(sweeps(law)).exponent_error)
    assert entries.floored(sweeps(lambda width: 1 / width, (16, 32, 64))) is None


def test_table_4_is_judged_by_the_papers_estimator_with_the_jackknifes_error():
    """Optima of 0.002 + 0.4 / D for two seeds and of a slightly steeper law for a third: a straight
    line has another power, which stands beside it."""
    rows = []
    for seed, power in enumerate((1.0, 1.0, 1.1)):
        for width in (16, 32, 64, 128, 256):
            vertex = math.log2(0.002 + 0.4 * width**-power)
            for step in range(-4, 5):
                place = round(2 * vertex) / 2 + step / 2
                rows.append((width, 2.0**place, seed, 3 + 0.05 * (place - vertex) ** 2))
    names = ["model.width", "optimizer.lr", "seed", "final_eval_loss"]
    table = pd.DataFrame(rows, columns=names).assign(status="finished", curve="mup_fixed")
    (entry,) = entries.entries({"adam": table.assign(run="x", parameters=1.0)})
    deciding = entry.deciding
    assert deciding.value == pytest.approx(-1.0, abs=0.1) and deciding.freedom == 2
    assert 0.005 < deciding.error < 0.2 and entry.fit.value > deciding.value + 0.2
    found = lines(learning_rates.findings({"adam": table.assign(run="x", parameters=1.0)}))
    said = found["adam, muP, fixed steps"]
    assert said.estimate == deciding and said.measured.endswith(" without")
    assert f"{entry.fit.value:+.2f} ± " in said.measured and said.published == "-0.99"


def test_the_published_differences_are_those_of_the_erratum():
    fixed, optimal = (published.TABLE_4[horizon] for horizon in ("fixed", "compute_optimal"))
    drops = sorted(fixed[o][r] - optimal[o][r] for o in fixed for r in RULES)
    assert (drops[0], drops[-1]) == (pytest.approx(0.18), pytest.approx(1.05))
    assert (drops[5] + drops[6]) / 2 == pytest.approx(0.405)
