"""Bordelon et al.'s Figures 2, 11 and 13: the sweeps, and findings right on constructed tables."""

import itertools
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from plots.bordelon import dynamics, head_dimension, rate_transfer, scans
from plots.bordelon.scans import HEAD_DIM
from plots.findings import Finding

ROOT = Path(__file__).resolve().parents[3]
SWEEPS = ROOT / "vit_cifar5m" / "sweeps"
N = (8, 16, 32, 64)
NAMES = ("figure_2", "figure_11", "figure_13")


def written(path, rows):
    path.parent.mkdir(exist_ok=True, parents=True)
    pd.DataFrame(rows).to_csv(path, index=False)
    return path


def by_name(findings):
    found = [line for line in findings if isinstance(line, Finding)]
    assert len(found) == len({finding.name for finding in found})
    return {finding.name: finding for finding in found}


def text_of(findings):
    return "\n".join(map(str, findings))


# Figure 2a


def rate_row(alpha, n, rate, loss, seed=0, status="finished"):
    return {
        "curve": "transfer",
        "prescription.alpha_attention": alpha,
        "model.head_dim": n,
        "optimizer.lr": rate,
        "seed": seed,
        "status": status,
        "final_eval_loss": loss,
    }


def rate_rows(power=None, seeds=(0, 1)):
    """Parabolas whose optimum goes as N^power[alpha]; 2 at N = 8."""
    power = power or {1.0: 0.25, 0.5: 0.0}
    return [
        rate_row(
            alpha, n, rate, 1 + 0.1 * (math.log2(rate / 2 / (n / 8) ** p)) ** 2 + 0.01 * seed, seed
        )
        for alpha, p in power.items()
        for n in N
        for rate in (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
        for seed in seeds
    ]


def test_the_exponent_of_the_best_rate_is_found_for_each_alpha(tmp_path):
    rows = rate_transfer.read([written(tmp_path / "t.csv", rate_rows())])
    found = by_name(rate_transfer.findings(rows))
    moved = found["alpha_A = 1: exponent of N in the best rate"]
    assert moved.measured.startswith("+0.25 ±") and "n = 4 widths" in moved.measured
    kept = found["alpha_A = 1/2: exponent of N in the best rate"]
    assert kept.measured.startswith(("+0.00", "-0.00")) and kept.verdict == "agrees within 95 %"
    assert found["alpha_A = 1/2: best rate by N"].measured.startswith("8: 2 x/÷")
    # N = 64 is best at 2 x 8^(1/4) = 3.36: the grid has 4, and 2 costs (0.75^2 - 0.25^2) / 10.
    lost = found["alpha_A = 1: cost of the smallest N's rate at the largest N"]
    assert lost.measured.startswith("+0.050")
    text = text_of(rate_transfer.findings(rows))
    assert "over seeds, near optima: 0.007 at N = 8, 16, 32, 64" in text
    assert "D =" not in text and "$" not in text
    axes = dict(rate_transfer.draw(rows))["figure_2a_rate_transfer"].axes
    titles = [r"$\alpha_A$ = 1", r"$\alpha_A$ = 1/2", "best rate"]
    assert [axis.get_title() for axis in axes] == titles
    assert axes[0].get_ylim() == axes[1].get_ylim() and axes[0].get_ylim()[1] <= 2.42
    assert axes[2].get_xscale() == "log"


def test_one_best_rate_for_all_costs_nothing_without_an_error_of_nothing(tmp_path):
    rows = rate_transfer.read([written(tmp_path / "t.csv", rate_rows())])
    found = by_name(rate_transfer.findings(rows))
    kept = found["alpha_A = 1/2: cost of the smallest N's rate at the largest N"]
    assert kept.measured == "same grid rate" and not kept.verdict


def test_errors_rest_on_the_spread_at_the_same_head_dimension(tmp_path):
    """At N = 8 seeds differ ten times as much as at the others."""
    rows = rate_rows(seeds=range(5))
    for row in rows:
        if row["model.head_dim"] == 8:
            row["final_eval_loss"] += 0.09 * row["seed"]
    read = rate_transfer.read([written(tmp_path / "t.csv", rows)])
    line = rate_transfer.findings(read)[0]
    assert "0.158 at N = 8; 0.016 at N = 16, 32, 64 (nats)" in line
    sweeps = rate_transfer.fits(read)[0.5]
    assert sweeps[8].best.error == pytest.approx(10 * sweeps[16].best.error, rel=1e-3)
    assert sweeps[8].error == pytest.approx(10 * sweeps[16].error)


def test_optima_at_the_edge_are_left_out_and_named_and_lost_ones_too(tmp_path):
    rows = [
        row
        for row in rate_rows(seeds=(0,))
        if row["model.head_dim"] != 64 or row["optimizer.lr"] <= 1
    ]
    for row in rows:
        if (row["model.head_dim"], row["prescription.alpha_attention"]) == (8, 1.0):
            row |= {"status": "diverged", "final_eval_loss": math.nan}
    text = text_of(rate_transfer.findings(rate_transfer.read([written(tmp_path / "t", rows)])))
    assert "alpha_A = 1: every run diverged at N = 8" in text
    assert "alpha_A = 1/2: best rate at the edge of its sweep at N = 64" in text
    assert "64: ~1" in text and "spread over seeds unknown" in text


# Figures 2b and 13


def observed(n, alpha, step, measured, seed=0, **more):
    """One run's rows of one step: a block and all blocks, of which only the latter count."""
    key = {
        "curve": "c",
        "prescription.alpha_attention": alpha,
        "model.head_dim": n,
        **more,
        "seed": seed,
        "run": f"{alpha}-{n}-{seed}-{more}",
        "step": step,
    }
    first = {**key, "block": "0", **dict.fromkeys(measured, 7.0)}
    return [first, {**key, "block": "all", **measured}]


def scattered(value, seed):
    """Three seeds' values: 2% apart, whatever N."""
    return value * (0.98 + 0.02 * seed)


def variance_rows():
    """N^(1 - 2 alpha) before training; N^-2 and N^0 after. Seeds scatter by 2%."""
    after = {1.0: -2, 0.5: 0}
    return [
        row
        for alpha, power in after.items()
        for n in N
        for seed in (0, 1, 2)
        for step, exponent in ((0, 1 - 2 * alpha), (500, power))
        for row in observed(
            n, alpha, step, {"head_variance": scattered(3 * n**exponent, seed)}, seed
        )
    ]


def test_slopes_of_the_variance_over_heads_stand_beside_theory_and_caption(tmp_path, laid_out):
    rows = head_dimension.read([written(tmp_path / "t.csv", variance_rows())])[0]
    found = by_name(head_dimension.variance_findings(rows))
    start = found["alpha_A = 1: variance of A over heads at initialisation"]
    assert start.measured.startswith("-1.000 ± 0.000 (n = 3)")
    assert (start.published, start.verdict) == ("-1", "agrees within 95 %")
    end = found["alpha_A = 1: variance of A over heads at t = 500"]
    assert end.measured.startswith("-2.000") and end.published == "-1 derived (caption -2)"
    assert end.verdict.startswith("off by -1.00")
    half = found["alpha_A = 1/2: variance of A over heads at t = 500"]
    assert (half.published, half.verdict) == ("not below 0", "agrees")
    calm = found["alpha_A = 1/2: variance of A over heads at initialisation"]
    assert (calm.published, calm.verdict) == ("0", "agrees within 95 %")
    assert "Figure 2b: spread over seeds 2.0% of a value" in head_dimension.findings([rows])
    figure = dict(head_dimension.draw([rows]))["figure_2b_head_variance"]
    (axis,), (legend,) = figure.axes, figure.legends
    labels = [text.get_text() for text in legend.get_texts()]
    assert r"$\alpha_A$ = 1, at t = 500: $N^{-2.000 \pm 0.000}$" in labels
    assert len(labels) == 5 and "caption: $N^{-2}$" in labels
    figure.draw_without_rendering()  # the legend lies on no line
    assert not legend.get_window_extent().overlaps(axis.get_window_extent())


MOVED = ("key_change_weights", "attention_change_weights", "key_change", "attention_change")


def movement_rows():
    """What the paper's exponents say of W_Q and W_K, and N^0.3 in all. Seeds scatter by 2%."""
    cells = itertools.product(("sgd", "adam"), (1.0, 0.5), N, (1, 200), (0, 1, 2))
    found = []
    for optimizer, alpha, n, step, seed in cells:
        first = 0.5 if (optimizer, step) == ("sgd", 1) else 0.0
        powers = (alpha - 1 - first, -first, 0.3, 0.3)
        measured = {
            k: scattered(0.1 * n**power, seed) for k, power in zip(MOVED, powers, strict=True)
        }
        key = {"optimizer.name": optimizer, "training.steps": step}
        found += observed(n, alpha, 0, dict.fromkeys(MOVED, 0.0), seed, **key)
        found += observed(n, alpha, step, measured, seed, **key)
    return found


def test_slopes_of_movement_stand_beside_the_papers_exponents(tmp_path):
    rows = head_dimension.read([written(tmp_path / "t.csv", movement_rows())])[0]
    found = by_name(head_dimension.movement_findings(rows))
    assert len(found) == 2 * 2 * 2 * 4
    expected = {
        "SGD, alpha_A = 1, t = 1": ("-1/2 derived", "-1/2 derived"),
        "SGD, alpha_A = 1, t = 200": ("0", "0"),
        "SGD, alpha_A = 1/2, t = 1": ("-1 derived", "-1/2 derived"),
        "Adam, alpha_A = 1/2, t = 1": ("-1/2", "0"),
        "Adam, alpha_A = 1, t = 1": ("0", "0"),
    }
    for place, published in expected.items():
        for what, beside in zip("kA", published, strict=True):
            finding = found[f"{place}: change of {what} by W_Q, W_K"]
            assert (finding.published, finding.verdict) == (beside, "agrees within 95 %")
            assert "(n = 3)" in finding.measured
    whole = found["Adam, alpha_A = 1/2, t = 200: change of A in all"]
    assert whole.measured.startswith("+0.300") and not whole.published and not whole.verdict
    figure = dict(head_dimension.draw([rows]))["figure_13_movement"]
    titles = [axis.get_title() for axis in figure.axes]
    assert len(titles) == 8
    assert titles[:2] == ["SGD: change of k by $W_Q$, $W_K$", "SGD: change of A by $W_Q$, $W_K$"]
    assert titles[-1] == "Adam: change of A in all"


def test_both_tables_make_the_papers_table_3(tmp_path):
    """Its six powers, those of the updates twice: after the later step, per optimiser."""
    paths = [
        written(tmp_path / "13.csv", movement_rows()),
        written(tmp_path / "11.csv", variance_rows()),
    ]
    table = dict(head_dimension.draw(head_dimension.read(paths)))["table_3"]
    assert list(table["exponent"]) == pytest.approx(list(table["published"]), abs=1e-6)
    assert list(table["published"]) == [-1, 0, 0, 0, 0, 0, 0, -0.5, 0, -0.5]
    assert list(table["step"]) == [0, 200, 200, 200, 200] * 2 and set(table["seeds"]) == {3}
    assert list(table["entry"][:3]) == ["variance of A(0)", "update to A", "update to k"]


def test_sgd_that_misses_the_exponents_of_later_steps_is_noted(tmp_path):
    path = tmp_path / "t.csv"
    kept = text_of(head_dimension.findings(head_dimension.read([written(path, movement_rows())])))
    frozen = [
        {**row, **{key: row[key] / row["model.head_dim"] ** 0.3 for key in MOVED}}
        if (row["optimizer.name"], row["step"]) == ("sgd", 200)
        else row
        for row in movement_rows()
    ]
    missed = text_of(head_dimension.findings(head_dimension.read([written(path, frozen)])))
    assert "note:" not in kept and missed.count("note: SGD does not reach all exponents") == 1


def test_the_spread_over_seeds_is_that_of_each_figure_and_optimiser(tmp_path):
    calm = [row for row in movement_rows() if row["optimizer.name"] == "adam"]
    wild = [
        {**row, **{key: row[key] * 2 ** row["seed"] for key in MOVED}}
        for row in movement_rows()
        if row["optimizer.name"] == "sgd"
    ]
    paths = [written(tmp_path / "a.csv", variance_rows()), written(tmp_path / "b.csv", calm + wild)]
    lines = head_dimension.findings(head_dimension.read(paths))
    sgd = np.std(np.log([0.98, 2, 4 * 1.02]), ddof=1)
    assert lines[1:4] == [
        "Figure 2b: spread over seeds 2.0% of a value",
        f"Figure 13, SGD: spread over seeds {sgd:.1%} of a value",
        "Figure 13, Adam: spread over seeds 2.0% of a value",
    ]


def test_log_axes_have_labels_where_data_span_less_than_a_decade(tmp_path):
    rows = head_dimension.read([written(tmp_path / "t.csv", movement_rows())])[0]
    figure = dict(head_dimension.draw([rows]))["figure_13_movement"]
    figure.canvas.draw()
    for axis in figure.axes:
        low, high = axis.get_ylim()
        inside = [
            label.get_text()
            for label in axis.get_yticklabels()
            if low <= label.get_position()[1] <= high
        ]
        assert len(inside) > 1, axis.get_title()


def test_one_head_dimension_has_no_slope(tmp_path):
    rows = [row for row in movement_rows() if row["model.head_dim"] == 8]
    read = head_dimension.read([written(tmp_path / "t.csv", rows)])[0]
    assert {f.measured for f in head_dimension.movement_findings(read)} == {"not measured"}


def test_two_tables_of_one_figure_are_refused(tmp_path, refused):
    paths = [written(tmp_path / name, variance_rows()) for name in ("a.csv", "b.csv")]
    assert "a second table of one figure" in refused("bordelon/head_dimension", *paths)


def changed(rows, key, value):
    return [{**row, key: value, "run": "another"} for row in rows]


REFUSED = {
    "another figure's observations as 2b": (
        "head_dimension",
        variance_rows() + changed(variance_rows(), "model.heads", 16),
        "two runs with prescription.alpha_attention 1, model.head_dim 8, seed 0, step 0; expected "
        "one; is it the observations.csv of figure_11.yaml?",
    ),
    "another figure's observations as 13": (
        "head_dimension",
        movement_rows() + changed(movement_rows(), "model.layers", 4),
        "two runs with optimizer.name sgd, prescription.alpha_attention 1, model.head_dim 8, "
        "seed 0, step 1; expected one; is it the observations.csv of figure_13.yaml?",
    ),
    "one length": (
        "head_dimension",
        [row for row in movement_rows() if row["step"] != 1],
        "observed after 200 steps; expected step 1 and one later step; is it the whole "
        "observations.csv of figure_13.yaml?",
    ),
    "three lengths": (
        "head_dimension",
        movement_rows() + [{**row, "step": 50} for row in movement_rows() if row["step"] == 200],
        "observed after 1, 50, 200 steps; expected step 1 and one later step",
    ),
    "another figure's results as 2a": (
        "rate_transfer",
        rate_rows() + changed(rate_rows(), "training.steps", 1),
        "two runs with prescription.alpha_attention 1, model.head_dim 8, optimizer.lr 0.25, "
        "seed 0; expected one; is it the results.csv of figure_2.yaml?",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_tables_of_other_figures_are_one_line(what, tmp_path, refused):
    name, rows, message = REFUSED[what]
    path = written(tmp_path / "t.csv", rows)
    assert refused(f"bordelon/{name}", path).startswith(f"error: {path}: {message}")


# Figure 11


def logged(size, seed, loss, **more):
    """A run's metrics: `loss` times what one seed's samples are worth, falling with the step."""
    key = {"curve": "dynamics", HEAD_DIM: size, "seed": seed, **more}
    key["run"] = f"{more}-{size}-{seed}"
    return [
        {**key, "step": step, "train_loss": math.nan if step % 2 else loss + seed + 1 / step}
        for step in range(1, 101)
    ]


def dynamics_rows(alphas=(1.0, 0.5), seeds=(0, 1, 2)):
    """Losses 2 + 1/N: doubling N halves what it gains; seeds differ by far more."""
    return [
        row
        for alpha in alphas
        for n in N
        for seed in seeds
        for row in logged(
            n, seed, 2 + 1 / n + 0.001 * seed / n, **{"prescription.alpha_attention": alpha}
        )
    ]


def test_sizes_are_compared_on_the_same_samples(tmp_path):
    losses = dynamics.read([written(tmp_path / "m.csv", dynamics_rows())])
    found = list(by_name(dynamics.findings(losses)).values())
    assert len(found) == 6
    # 1/8 - 1/16, and a thousandth more for every further seed
    assert found[0].name == "alpha_A = 1: loss of N = 8 minus that of 16"
    assert found[0].measured == "+0.0626 ± 0.0000 (n = 3)" and found[0].verdict == ""
    assert found[2].measured.startswith("+0.0156") and found[2].verdict == "agrees"
    rows = losses.rows[losses.rows["prescription.alpha_attention"] == 1.0]
    lines = scans.lines(rows, HEAD_DIM)
    assert list(lines) == list(N) and lines[8].seeds == 3
    assert lines[8].steps[0] == 2 and 90 < lines[8].steps[-1] <= 100
    even = scans.lines(rows, HEAD_DIM, scale="linear")
    assert set(even[8].steps[1:] - even[8].steps[:-1]) == {2, 3} and even[8].steps[-1] >= 99
    assert lines[8].losses[0] == pytest.approx(2 + 1 / 8 + 1 + 0.5, abs=1e-3)
    assert lines[8].errors[0] == pytest.approx(1 / math.sqrt(3), abs=1e-3)


def test_a_run_that_ended_early_counts_nowhere_and_is_named(tmp_path):
    """Its first steps against whole runs would be a gap of their own."""
    rows = [
        row
        for row in dynamics_rows()
        if row["step"] <= 20 or (row["seed"], row[HEAD_DIM]) != (1, 16)
    ]
    losses = dynamics.read([written(tmp_path / "m.csv", rows)])
    lines = dynamics.findings(losses)
    found = list(by_name(lines).values())
    assert found[0].measured.startswith("+0.0626") and found[0].measured.endswith("(n = 2)")
    assert found[2].measured.endswith("(n = 3)") and found[2].verdict == "undecided (n = 2)"
    one = losses.rows[losses.rows["prescription.alpha_attention"] == 1]
    assert scans.lines(one, HEAD_DIM)[16].steps[-1] > 90
    assert lines[-1].startswith("left out, as they ended before the others: ")
    assert lines[-1].count("-16-1") == 2


def test_growing_gaps_disagree(tmp_path):
    rows = [
        row for n in N for s in (0, 1, 2) for row in logged(n, s, 2 - n**2 / 5000 + 1e-4 * s * n)
    ]
    losses = dynamics.read([written(tmp_path / "m.csv", rows)])
    assert dynamics.findings(losses)[-1].verdict == "disagrees"


def test_a_figure_has_a_panel_per_alpha_and_a_line_per_size(tmp_path):
    losses = dynamics.read([written(tmp_path / "m.csv", dynamics_rows())])
    axes = dict(dynamics.draw(losses))["figure_11_dynamics"].axes
    assert [axis.get_title() for axis in axes] == [r"$\alpha_A$ = 1", r"$\alpha_A$ = 1/2"]
    for axis in axes:
        labels = [text.get_text() for text in axis.get_legend().get_texts()]
        assert labels == [f"N = {size}" for size in N] and axis.get_xscale() == "linear"
    one = [{k: v for k, v in row.items() if "alpha" not in k} for row in dynamics_rows((1.0,))]
    losses = dynamics.read([written(tmp_path / "o.csv", one)])
    assert len(dict(dynamics.draw(losses))["figure_11_dynamics"].axes) == 1


def test_two_runs_of_one_size_and_seed_are_refused(tmp_path, refused):
    again = [{**row, "run": "second"} for row in dynamics_rows((1.0,))]
    path = written(tmp_path / "m.csv", dynamics_rows((1.0,)) + again)
    assert "two runs with model.head_dim 8 and seed 0" in refused("bordelon/dynamics", path)
