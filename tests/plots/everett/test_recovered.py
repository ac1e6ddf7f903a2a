"""Each of Everett et al.'s figures finds the numbers that its tables were made with, is drawn from
tables with holes and with curves of one's own, and refuses what does not belong together."""

import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from matplotlib.text import Text

from param_groups.fits import Optimum
from plots import style, tables
from plots.__main__ import make
from plots.catalogue import load
from plots.everett import alignment, entries, epsilon, learning_rates, loss_vs_size, published
from plots.tables import PARAMETERIZATION, TableError
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


def constants(**options):
    """Runs of a global rate with constants, a row of which says its parameterisation."""
    rows = [row for rule in RULES for row in sweep("constants", rule, exponent=-0.8, **options)]
    return pd.DataFrame(rows)


POWERS = {200: -0.5, 800: -0.6, 3200: -0.7}
GAINS = {200: 0.3, 800: 0.1, 3200: 0.0}
# Figure -> its tables by file name, made with options, the files that it draws, and what it finds.
FIGURES = {
    "loss_vs_size": (
        lambda **of: {"own_sweep": interventions(**of)},
        {"own_sweep"},
        {
            "adam, standard: global -> full": 0.1,
            "adam, muP: full -> full_constants": 0.2,
            "adam, NTK: full_constants -> none_constants": -0.05,
            "adam, tuned muP against standard with one rate": 0.3,
            "adam, muP, full: exponent of D in the best rate": -0.5,
        },
    ),
    "learning_rates": (
        lambda **of: {"own_adam": horizons(**of)},
        {"figure_12_adam", "figure_12_adam_optima"},
        {
            "adam, NTK, fixed steps": -0.5,
            "adam, standard, compute-optimal": -0.9,
            "adam, standard, compute-optimal minus fixed": -0.4,
        },
    ),
    "length": (
        lambda **of: longer(POWERS, GAINS, **of),
        {"length"},
        {
            **{f"muP, {n} steps: exponent of the best rate": power for n, power in POWERS.items()},
            **{f"standard - muP, {n} steps, D = 64 (nats)": gain for n, gain in GAINS.items()},
        },
    ),
    "table_4_constants": (
        lambda **of: {"tuned": constants(**of), "plain": horizons(**of)},
        {"table_4_constants"},
        {
            "adam, NTK, without constants": -0.5,
            "adam, NTK, with constants": -0.8,
            "adam, NTK: what they change": -0.3,
        },
    ),
    "weight_decay": (
        lambda **of: {"decay": decayed(**of), "plain": horizons(**of)},
        {"figure_9_weight_decay"},
        {
            "exponent with decay - without: muP, fixed steps": 0.0,
            "gain in loss from decay: muP, fixed steps": 0.1,
        },
    ),
    "adafactor": (
        lambda **of: {"own": families(**of)},
        {"figure_10_adafactor"},
        {
            "Adafactor - Adam + PS: muP, one global rate": 0.01,
            "muP, one global rate: the difference at D = 256 minus at D = 32 (nats)": 0.0,
        },
    ),
    "epsilon": (
        lambda **of: {
            "heat": heat(lost=-12),
            "mitigations": mitigations(growth=0.25, **{"widths": (32, 64, 128), **of}),
        },
        {"figure_4_epsilon", "figure_8_mitigations"},
        {
            "mean-field: gain of atan2 over enlarged": 0.9,
            "mean-field: small over enlarged, per doubling of D": 0.15,
            "standard: small - atan2": 0.0,
        },
    ),
    "depth": (
        lambda **of: {"own_depth": depths()},
        {"depth"},
        {
            "exponent of L in the best rate, alpha_L = 1/2: mean": 0.0,
            "gain of alpha_L = 1/2 in the best loss: muP": 0.1,
        },
    ),
    "alignment": (
        lambda **of: {"probes": probes(curves=("adam",), widths=of.get("widths", (64,))[-1:])},
        {"figure_1_alignment", "figure_6_alignment_adam"},
        {"adam, muP: peak of the readout": 1 - 0.045 * math.log(64) / math.log(4096)},
    ),
}


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_finds_the_numbers_that_its_tables_were_made_with(tmp_path, name):
    named, _, expected = FIGURES[name]
    module = load(f"everett/{name}")
    found = lines(module.findings(module.read(written(tmp_path, **named()))))
    measured = {finding: found[finding].estimate.value for finding in expected}
    assert measured == pytest.approx(expected, abs=2e-3)
    of_seeds = {finding: found[finding].estimate.error for finding in expected}
    assert all(0 <= error < 0.05 for error in of_seeds.values()), of_seeds


def quick(half):
    """Every second figure; the others are thorough, and quick in the other test of two."""
    return [
        name if at % 2 == half else pytest.param(name, marks=pytest.mark.thorough)
        for at, name in enumerate(FIGURES)
    ]


@pytest.mark.parametrize("name", quick(0))
def test_a_table_with_holes_is_drawn_all_the_same(tmp_path, name):
    """One width, one seed, divergence, half the parameterisations missing."""
    named, drawn, _ = FIGURES[name]
    holes = {}
    for stem, table in named(widths=(32, 64)).items():
        rules = table[PARAMETERIZATION].isin(["mup", "mean_field"])
        table = table[rules & (table.seed == 0) & (table["model.width"] == 64)].copy()
        if "optimizer.lr" in table:
            gone = (table["optimizer.lr"] > 2**-6) | (table[PARAMETERIZATION] == "mean_field")
            table.loc[gone, ["status", "final_eval_loss"]] = ["diverged", math.nan]
        holes[stem] = table
    text, files = make(f"everett/{name}", written(tmp_path, **holes), tmp_path / "out")
    assert {file.stem for file in files} == drawn and all(file.stat().st_size for file in files)
    assert "NTK" not in text
    words = ("not measured", "no fit", "diverge")
    assert name == "alignment" or any(word in text for word in words)


@pytest.mark.parametrize("name", quick(1))
def test_curves_of_ones_own_are_drawn_under_their_names(tmp_path, name, monkeypatch):
    """Half of the curves, and muP."""
    named, texts = {}, set()
    for stem, table in FIGURES[name][0](widths=(32, 64)).items():
        mine = table["curve"] == table["curve"].iloc[-1]
        rules = table[PARAMETERIZATION].replace("mup", "own_rule")
        curves = table["curve"].mask(mine, "own_curve")
        named[stem] = table.assign(**{PARAMETERIZATION: rules, "curve": curves})

    def keep(item, *_):
        texts.update(text.get_text() for text in item.findobj(Text))
        return {}

    monkeypatch.setattr(style, "files", keep)
    found, _ = make(f"everett/{name}", written(tmp_path, **named), tmp_path / "out")
    if name not in ("length", "table_4_constants"):  # their curves are lengths and constants
        assert "own_curve" in found and any("own_curve" in text for text in texts)
    if name != "learning_rates":  # it has its rules from the names of curves
        assert "own_rule" in found and any("own_rule" in text for text in texts)


def test_results_of_a_sweep_give_the_figure_the_sweeps_name():
    for path in ("results/nanolm_c4/figure_2_adam/results.csv", "data/everett/figure_2_adam.csv"):
        assert tables.name(Path(path)) == "figure_2_adam"


def test_heat_maps_are_losses_above_the_best_of_a_width():
    grid = epsilon.heat_map(heat(lost=-12), "constant", "mup")
    assert list(grid.index) == [64, 128] and grid.shape == (2, 7)
    assert grid.loc[64, 1e-9] == 0 and grid.loc[64, 1e-6] == pytest.approx(0.3)
    assert grid.loc[128, 1e-12] == math.inf


@pytest.mark.parametrize(("few", "verdict"), [(False, "within noise"), (True, "disagrees")])
def test_the_lowest_of_many_others_is_low_by_chance_too(few, verdict):
    """3.2 errors are beyond noise where the lower one is the lowest of two, and not of 32."""
    best = interventions("adam_param_scaling", {"none_constants": 0.045}, ("ntk",))
    options = ({"full_constants": 0.0}, ("standard",)) if few else ()
    others = [interventions(name, *options) for name in ("adam", "sgd")]
    found = loss_vs_size.best(list(map(loss_vs_size.lines, [*others, best])))
    assert found.measured.startswith("+0.045 ± 0.014") and found.verdict == verdict


def test_constants_near_an_edge_of_their_search_decide_nothing():
    table = interventions()
    near = (table[PARAMETERIZATION] == "ntk") & table["curve"].str.endswith("constants")
    table.loc[near, "constants"] = "near_edge"
    before, after = (lines(loss_vs_size.findings({"": one})) for one in (interventions(), table))
    changed = {name for name, one in after.items() if one.verdict != before[name].verdict}
    assert changed == {f"adam, NTK: {' -> '.join(step)}" for step in loss_vs_size.STEPS[1:]}
    assert {after[name].verdict for name in changed} == {"undecided: constants near an edge"}


def test_an_optimiser_is_what_the_table_says_or_its_file(tmp_path):
    table = horizons(rules=("mup",), widths=(32, 64))
    for stem, column, optimizer in (
        ("figure_12_adam", "sgd", "sgd"),
        ("my_table", None, "my_table"),
        ("figure_13_adafactor_laptop", None, "adafactor"),
    ):
        own = table.assign(**({"optimizer.name": column} if column else {}))
        assert list(learning_rates.read(written(tmp_path, **{stem: own}))) == [optimizer]
    for other in ("sgd", None):
        names = ["adam", other] * (len(table) // 2)
        two = written(tmp_path, two=table.assign(**{"optimizer.name": names}))
        with pytest.raises(TableError, match=f"2 optimisers, expected one: adam, {other or 'unk'}"):
            learning_rates.read(two)


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


# Figures 1 and 5 to 7: where alignment starts and peaks


def at_paper(ratio, width=128):
    """The ratio that the same factor of alignment has at D = 4,096."""
    return 1 + (ratio - 1) * np.log(width) / np.log(4096)


def said(folder, table):
    """The findings of a table in a file, by name."""
    return lines(alignment.findings(alignment.read(written(folder, probes=table))))


def test_alignment_starts_and_peaks_are_those_of_the_probes(tmp_path):
    found = said(tmp_path, probes(seeds=(0, 1, 2)))
    top = "adam, muP: readout's peak minus the highest of other layers"
    assert found["adam, muP: first value, all layers"].measured.startswith("0.500")
    peak = found["adam, muP: peak of the readout"]
    assert "[0.960 at D = 128, step 20]" in peak.measured  # 0.95, and 0.01 with every seed
    assert peak.estimate.value == pytest.approx(at_paper(0.96))
    assert (peak.published, peak.verdict) == ("> 0.9", "agrees")
    assert found["adam, standard: peak of the readout"].verdict == "disagrees: above"
    assert found["sgd, muP: peak of the readout"].published == "low amounts"
    assert found[top].verdict == "agrees" and "next MLP up" in found[top].measured
    mlp = found["adafactor, NTK: highest peak of MLP layers"]
    assert "[0.760 at D = 128" in mlp.measured and mlp.published == "<= 0.8"
    one = said(tmp_path, probes(seeds=(0,)))
    for name in (
        "adam, muP: peak of the readout",
        "adafactor, NTK: highest peak of MLP layers",
        top,
    ):
        assert one[name].verdict in ("undecided (n = 1)", "agrees in sign, error unknown")
    high = said(tmp_path, probes(readout=0.3, mlp=0.95, seeds=(0, 1, 2), widths=(1024,)))
    assert high["adam, standard: peak of the readout"].verdict == "disagrees: below"
    assert high[top].verdict == "disagrees"
    assert high["adam, standard: highest peak of MLP layers"].verdict == "disagrees: above"


def test_one_factor_of_alignment_is_one_number_at_every_width(tmp_path):
    """f = 1/2 in the readout at both widths, so A = 1 - log 2 / log D."""
    table = probes(seeds=(0, 1, 2))
    there = (table.layer == "readout") & (table.step == 20)
    factor = 1 - np.log(2) / np.log(table["model.width"])
    found = said(tmp_path, table.assign(alignment=table.alignment.mask(there, factor)))
    gap = found["adam, standard: readout's peak from D = 64 to 128"]
    assert gap.estimate.value == pytest.approx(0, abs=1e-12)
    peak = found["adam, standard: peak of the readout"].estimate
    assert [one.value for one in peak.by_size.values()] == pytest.approx(
        [1 - np.log(2) / np.log(4096)] * 2
    )


def test_noise_does_not_count_as_height():
    """Alignment that stays at 0.7: the highest of 200 means over four seeds is 0.76, by chance."""
    draws = np.random.default_rng(0).normal(0.7, 0.05, (4, 200))
    rows = pd.DataFrame(
        [
            {"seed": seed, "step": step, "layer": "readout", "alignment": value}
            for seed, own in enumerate(draws)
            for step, value in enumerate(own)
        ]
    )
    assert draws.mean(0).max() > 0.755
    height, step = alignment.peak(rows, "alignment")
    assert abs(height.value - 0.7) < 2 * 0.025 and height.groups == 4
    assert step == draws.mean(0).argmax()
