"""All of Everett et al.'s figures: drawn with holes and under names of one's own, or refused."""

import math
from pathlib import Path

import pandas as pd
import pytest
from matplotlib.text import Text

from plots import style, tables
from plots.__main__ import make
from plots.everett import (
    epsilon,
    learning_rates,
    length,
    loss_vs_size,
    table_4_constants,
    weight_decay,
)
from plots.tables import TableError
from tests.plots.everett.constructed import (
    RULES,
    decayed,
    depths,
    families,
    heat,
    horizons,
    interventions,
    longer,
    mitigations,
    probes,
    sweep,
)
from tests.plots.made import lines, written

GAINS = {200: 0.3, 800: 0.1, 3200: 0.0}


def constants(**options):
    """Runs of a global rate with constants, a row of which says its parameterisation."""
    rows = [row for rule in RULES for row in sweep("constants", rule, exponent=-0.8, **options)]
    return pd.DataFrame(rows)


TWO = {"widths": (32, 64)}
CASES = {  # the tables a figure takes, by file name, and the files it draws
    "loss_vs_size": lambda: ({"own_sweep": interventions(**TWO)}, {"own_sweep"}),
    "learning_rates": lambda: (
        {"own_adam": horizons(**TWO)},
        {"figure_12_adam", "figure_12_adam_optima", "table_4"},
    ),
    "length": lambda: (longer({200: -0.5, 800: -0.6, 3200: -0.7}, GAINS, **TWO), {"length"}),
    "table_4_constants": lambda: (
        {"tuned": constants(**TWO), "plain": horizons(**TWO)},
        {"table_4_constants"},
    ),
    "weight_decay": lambda: (
        {"decay": decayed(**TWO), "plain": horizons(**TWO)},
        {"figure_9_weight_decay"},
    ),
    "adafactor": lambda: ({"own": families(**TWO)}, {"figure_10_adafactor"}),
    "epsilon": lambda: (
        {"heat": heat(lost=-12), "mitigations": mitigations()},
        {"figure_4_epsilon", "figure_8_mitigations"},
    ),
    "depth": lambda: ({"own_depth": depths()}, {"depth"}),
    "alignment": lambda: (
        {"probes": probes(curves=("adam",), widths=(64,))},
        {"figure_1_alignment", "figure_6_alignment_adam"},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_table_with_holes_is_drawn_all_the_same(tmp_path, name):
    """One width, one seed, divergence, half the parameterisations missing."""
    named, drawn = CASES[name]()
    for stem, table in named.items():
        rules = table["prescription.parameterization"].isin(["mup", "mean_field"])
        table = table[rules & (table.seed == 0) & (table["model.width"] == 64)].copy()
        if "optimizer.lr" in table:
            gone = (table["optimizer.lr"] > 2**-6) | (
                table["prescription.parameterization"] == "mean_field"
            )
            table.loc[gone, ["status", "final_eval_loss"]] = ["diverged", math.nan]
        named[stem] = table
    text, files = make(f"everett/{name}", written(tmp_path, **named), tmp_path / "out")
    assert {file.stem for file in files} == drawn and all(file.stat().st_size for file in files)
    assert "NTK" not in text
    assert name == "alignment" or any(
        word in text for word in ("not measured", "no fit", "diverge")
    )


def renamed(table):
    """Half of the curves, and muP, under names of one's own."""
    table.loc[table["prescription.parameterization"] == "mup", "prescription.parameterization"] = (
        "own_rule"
    )
    mine = table.curve == table.curve.iloc[-1]
    table.loc[mine, "curve"] = "own_curve"
    return table


@pytest.mark.parametrize("name", CASES)
def test_curves_of_ones_own_are_drawn_under_their_names(tmp_path, name, monkeypatch):
    named, _ = CASES[name]()
    paths = written(tmp_path, **{stem: renamed(table) for stem, table in named.items()})
    texts = set()

    def keep(item, *_):
        if not isinstance(item, pd.DataFrame):
            texts.update(text.get_text() for text in item.findobj(Text))
        return {}

    monkeypatch.setattr(style, "files", keep)
    found, _ = make(f"everett/{name}", paths, tmp_path / "out")
    if name not in ("length", "table_4_constants"):  # their curves are lengths and constants
        assert "own_curve" in found and any("own_curve" in text for text in texts)
    if name != "learning_rates":  # it has its rules from the names of curves
        assert "own_rule" in found and any("own_rule" in text for text in texts)


def test_tables_that_do_not_belong_together_are_refused(tmp_path):
    (first,) = written(tmp_path, one=horizons(rules=("mup",)))
    with pytest.raises(TableError, match="1 table given, expected 2: results.csv .with decay"):
        weight_decay.read([first])
    with pytest.raises(TableError, match="expected one table of Figure 4 and one of Figure 8"):
        epsilon.read(written(tmp_path, one=heat(), two=heat()))
    adam, again = written(tmp_path, x_adam=horizons(rules=("mup",)), y_adam=horizons())
    with pytest.raises(TableError, match="two tables of one optimiser"):
        learning_rates.read([adam, again])
    (table,) = written(tmp_path, figure_2_adam=interventions(rules=("mup",), widths=(64,)))
    with pytest.raises(TableError, match="two tables would be drawn to one file name"):
        (tmp_path / "figure_2_adam").mkdir()
        (tmp_path / "figure_2_adam" / "results.csv").write_text(table.read_text())
        loss_vs_size.read([table, tmp_path / "figure_2_adam" / "results.csv"])


def test_results_of_a_sweep_give_the_figure_the_sweeps_name():
    assert tables.name(Path("results/nanolm_c4/figure_2_adam_laptop/results.csv")) == (
        "figure_2_adam_laptop"
    )
    assert tables.name(Path("plots/data/everett/figure_2_adam.csv")) == "figure_2_adam"


def test_exponents_and_the_gap_of_two_parameterisations_are_followed_as_runs_get_longer(tmp_path):
    named = longer({200: -0.5, 800: -0.7, 3200: -0.9}, GAINS, seeds=(0, 1, 2))
    data = length.read(written(tmp_path, **named))
    found = lines(length.findings(data))
    assert [name for name, _ in length.draw(data)] == ["length"]
    for steps, power in ((200, -0.5), (800, -0.7), (3200, -0.9)):
        one = found[f"muP, {steps} steps: exponent of the best rate"]
        assert one.estimate.value == pytest.approx(power) and one.published == "-0.99"
        gap = found[f"standard - muP, {steps} steps, D = 64 (nats)"]
        assert gap.estimate.value == pytest.approx(GAINS[steps]) and gap.published == "below 0"
    assert list(one.estimate.by_size) == list(gap.estimate.by_size) == [200, 800, 3200]
    assert "(n = 3)" in gap.measured


def test_what_constants_change_in_an_exponent(tmp_path):
    paths = written(tmp_path, tuned=constants(), plain=horizons(fixed=-0.5))
    found = lines(table_4_constants.findings(table_4_constants.read(paths)))
    assert found["adam, NTK, without constants"].estimate.value == pytest.approx(-0.5)
    assert found["adam, NTK, with constants"].estimate.value == pytest.approx(-0.8)
    assert found["adam, NTK: what they change"].measured.startswith("-0.30 ± ")
