"""Best rates and their losses: over width (Figures 11 to 13, Table 4), with weight decay (9), for
Adafactor and parameter scaling (10), and over depth."""

import math
from types import SimpleNamespace

import pandas as pd
import pytest

from param_groups.fits import Optimum
from plots.__main__ import make
from plots.everett import adafactor, depth, entries, learning_rates, published, weight_decay
from plots.tables import TableError
from tests.plots.everett.constructed import RULES, decayed, depths, families, horizons
from tests.plots.made import lines, written


def test_table_4_is_recovered_beside_the_published_numbers(tmp_path):
    paths = written(tmp_path, figure_12_adam=horizons())
    text, _ = make("everett/learning_rates", paths, tmp_path)
    table = pd.read_csv(tmp_path / "table_4.csv")
    rows = {(row["parameterization"], row["horizon"]): row for row in table.to_dict("records")}
    assert len(rows) == 8
    row = rows["standard", "compute_optimal"]
    assert float(row["exponent"]) == pytest.approx(-0.9)
    assert float(row["published"]) == -1.27
    assert float(row["difference"]) == pytest.approx(0.37)
    assert int(row["widths"]) == 4 and float(row["weighted_exponent"]) == pytest.approx(-0.9)
    found = {line[:38].strip(): line for line in text.splitlines()}
    assert "agrees within 95 %" in found["adam, NTK, fixed steps"]  # both -0.50
    assert "off by +0.37" in found["adam, standard, compute-optimal"]
    assert not abs(row["irreducible_exponent"] + 0.9) > 0.01  # NaN where it ends at a rate of 0


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
    judged = entry.judged
    assert judged.value == pytest.approx(-1.0, abs=0.1) and judged.freedom == 2
    assert 0.005 < judged.error < 0.2 and entry.fit.value > judged.value + 0.2
    found = lines(learning_rates.findings({"adam": table.assign(run="x", parameters=1.0)}))
    said = found["adam, muP, fixed steps"]
    assert said.estimate == judged and said.measured.endswith(" without")
    assert f"{entry.fit.value:+.2f} ± " in said.measured and said.published == "-0.99"


def test_the_published_differences_are_those_of_the_erratum():
    fixed, optimal = (published.TABLE_4[horizon] for horizon in ("fixed", "compute_optimal"))
    drops = sorted(fixed[o][r] - optimal[o][r] for o in fixed for r in RULES)
    assert (drops[0], drops[-1]) == (pytest.approx(0.18), pytest.approx(1.05))
    assert (drops[5] + drops[6]) / 2 == pytest.approx(0.405)


def test_one_width_has_no_fit_and_says_so(tmp_path):
    paths = written(tmp_path, figure_11_sgd=horizons(widths=(64,), seeds=(0,)))
    text, files = make("everett/learning_rates", paths, tmp_path)
    assert "no fit: 1 width" in text
    assert "growing minus fixed horizon's exponent: not measured" in text
    assert "unknown, of one seed at" not in text and "unknown, of one seed" in text
    assert all(file.exists() for file in files)


def test_the_optimiser_comes_from_the_table_before_the_name(tmp_path):
    table = horizons(rules=("mup",), widths=(32, 64))
    (path,) = written(tmp_path, figure_12_adam=table.assign(**{"optimizer.name": "sgd"}))
    assert list(learning_rates.read([path])) == ["sgd"]
    (path,) = written(tmp_path, my_table=table)
    assert list(learning_rates.read([path])) == ["my_table"]
    names = ["sgd", "adam"] * (len(table) // 2)
    (path,) = written(tmp_path, two=table.assign(**{"optimizer.name": names}))
    with pytest.raises(TableError, match="2 optimisers, expected one: adam, sgd; choose with"):
        learning_rates.read([path])
    blank = table.assign(**{"optimizer.name": ["adam", None] * (len(table) // 2)})
    (path,) = written(tmp_path, blank=blank)
    with pytest.raises(TableError, match="2 optimisers, expected one: adam, unknown"):
        learning_rates.read([path])
    (path,) = written(tmp_path, figure_13_adafactor_laptop=table)
    assert list(learning_rates.read([path])) == ["adafactor"]


def test_decay_is_compared_with_runs_without(tmp_path):
    paths = written(tmp_path, figure_9_weight_decay=decayed(), figure_12_adam=horizons())
    found = lines(weight_decay.findings(weight_decay.read(paths)))
    same = found["exponent with decay - without: muP, fixed steps"]
    assert same.measured.startswith("+0.00") or same.measured.startswith("-0.00")
    assert same.verdict == "agrees"
    better = found["gain in loss from decay: muP, fixed steps"]
    assert better.measured.startswith("+0.100 ± 0.014") and better.verdict == "agrees"
    other = weight_decay.findings((decayed(shift=0.1, exponent=0.4), horizons()))
    assert lines(other)[same.name].verdict == "disagrees"
    assert lines(other)[better.name].verdict == "disagrees"


def test_adafactor_is_compared_with_adam_and_parameter_scaling():
    def of_one_width(findings):
        return [line for name, line in lines(findings).items() if name.startswith("Adafactor - ")]

    alike = of_one_width(adafactor.findings(families(gap=0.01)))
    assert len(alike) == 8
    assert {line.verdict for line in alike} == {"3% of the span of parameterisations"}  # 0.01 / 0.3
    apart = of_one_width(adafactor.findings(families(gap=0.3)))
    assert all(f.verdict.startswith("100% ") and f.measured.startswith("+0.300") for f in apart)
    table = families(widths=(64,))
    one = lines(adafactor.findings(table[table["prescription.parameterization"] == "mup"])).values()
    assert {f.verdict for f in one} == {"nan% of the span of parameterisations"}


def test_the_best_rate_over_depth_stands_beside_what_the_rule_is_to_do(tmp_path):
    paths = written(tmp_path, depth=depths(one=0.5))
    found = lines(depth.findings(depth.read(paths)))
    start = "exponent of L in the best rate, "
    half, one = (found[f"{start}alpha_L = {alpha}: mean"] for alpha in ("1/2", "1"))
    assert half.measured.lstrip("+-") == "0.00 ± 0.00 (n = 4)"
    assert half.verdict == "agrees within 95 %" and one.verdict.startswith("off by +0.")
    assert "n = 4 depths" in found[f"{start}alpha_L = 1/2: muP"].measured
    gain = found["gain of alpha_L = 1/2 in the best loss: mean"]
    assert gain.measured == "+0.100 ± 0.001 (n = 4), nats"
    assert found["cost of the base depth's rate at the deepest, alpha_L = 1/2"].measured == (
        "+0.000 ± 0.000 nats (n = 4 of 4)"
    )
