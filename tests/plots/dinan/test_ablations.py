"""What C_WE and N_rescale gain one at a time: differences by seed, right on known tables."""

import functools

import pytest

from plots.dinan import ablations
from plots.tables import TableError
from tests.plots.dinan.searched import read_rows
from tests.plots.made import lines

# Final loss at the best rate, lr = 4, of seed 0; every seed adds 0.1 to all curves alike.
LOWEST = {
    "standard": 4.7,
    "standard_rescale": 4.75,
    "standard_c_we": 4.2,
    "standard_both": 4.1,
    "neural_tangent": 4.0,
    "neural_tangent_rescale": 4.02,
    "neural_tangent_c_we": 4.6,
}


def row(curve, octave, seed):
    own = 0.001 * seed * (curve == "standard_c_we")  # an error of its own
    loss = LOWEST[curve] + 0.2 * abs(octave - 2) + 0.1 * seed + own
    place = {"curve": curve, "model.width": 64, "optimizer.lr": 2.0**octave, "seed": seed}
    return {**place, "status": "finished", "final_eval_loss": loss}


ROWS = [row(curve, octave, seed) for curve in LOWEST for octave in (1, 2, 3) for seed in range(3)]


read = functools.partial(read_rows, ablations)


def test_an_exchange_is_judged_by_seed_at_the_best_rate_of_either(tmp_path):
    """Seeds differ by 0.1, and the gains' errors by what curves do not share alone."""
    table = read(tmp_path, ROWS)
    findings = lines(ablations.findings(table))
    for name, measured, verdict in (
        ("C_WE = 1, in standard", "+0.499 ± 0.001 (n = 3)", "helps"),
        ("N_rescale, in standard", "-0.050 ± 0.000 (n = 3)", "harms"),
        ("both, in standard", "+0.600 ± 0.000 (n = 3)", "helps"),
        ("C_WE = 1, in neural-tangent", "+0.600 ± 0.000 (n = 3)", "helps"),
        ("N_rescale, in neural-tangent", "+0.020 ± 0.000 (n = 3)", "helps"),
        ("relative rates, with both", "+0.100 ± 0.000 (n = 3)", "helps"),
        ("all three", "+0.700 ± 0.000 (n = 3)", "helps"),
    ):
        found = findings[f"gain of {name} (nats)"]
        assert (found.measured, found.verdict) == (measured, verdict), name
    lowest = findings["standard, both: lowest loss (nats)"]
    assert lowest.measured == "4.200 ± 0.058 (n = 3) at lr = 4"
    ((name, figure),) = ablations.draw(table)
    assert name == "bart_ablations"
    assert [axis.get_title() for axis in figure.axes] == [
        "standard",
        "neural-tangent",
        "best rate of each",
    ]
    assert len(figure.axes[2].get_yticklabels()) == len(LOWEST)


def test_tables_of_other_curves_or_of_several_widths_are_one_line(tmp_path):
    for rows, message in (
        ([*ROWS, ROWS[0] | {"model.width": 32}], "several widths; expected one: .*model.width=32"),
        (
            [one | {"curve": f"adam {one['curve']}"} for one in ROWS],
            "no row with curve standard, standard_rescale",
        ),
    ):
        with pytest.raises(TableError, match=message):
            read(tmp_path, rows)
