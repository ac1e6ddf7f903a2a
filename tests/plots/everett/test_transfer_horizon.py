"""Powers of batch and tokens in the best rate, on constructed sweeps with planted ones."""

import math

import pandas as pd
import pytest

from plots.everett import transfer
from plots.tables import TableError
from tests.plots.everett.constructed import sweep
from tests.plots.made import lines, written

SIZES = {"training.batch_size": (4, 16, 64), "training.steps": (150, 600, 2400)}


def table(key, curve, power, **options):
    """Rows of a sweep over `key`, in place of the width."""
    powers = [octave / 8 for octave in range(-128, -15)]
    rows = sweep(curve, "mup", exponent=power, widths=SIZES[key], powers=powers, **options)
    return pd.DataFrame(rows).rename(columns={"model.width": key}).assign(first_train_loss=99.0)


@pytest.mark.parametrize("planted", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("width", [64, 128])
def test_a_planted_power_of_the_batch_is_read_and_its_rule_costs_nothing(planted, width, tmp_path):
    rows = table("training.batch_size", f"batch_{width}", planted, spread=0.002)
    (path,) = written(tmp_path, results=rows)
    axes = transfer.read([path])
    assert list(axes) == [f"batch, D = {width}"]
    found = lines(transfer.findings(axes))
    for name, power in (("B^0", 0.0), ("B^(1/2)", 0.5)):
        stem = f"batch, D = {width}: rate as {name}"
        exponent = found[f"{stem}: exponent of B in the best value"]
        assert exponent.estimate.value == pytest.approx(planted, abs=0.01)
        cost = found[f"{stem}: paid for the base's value"].estimate
        expected = 0.05 * ((power - planted) * math.log2(64 / 4)) ** 2
        assert cost.value == pytest.approx(expected, abs=0.06 * (expected > 0) + 1e-6)
    (drawn,) = transfer.draw(axes)
    assert drawn[0] == f"transfer_batch_d_{width}"


@pytest.mark.parametrize("planted", [0.0, -0.32, -0.5])
def test_of_three_powers_of_the_tokens_the_planted_one_is_cheapest(planted, tmp_path):
    rows = table("training.steps", "horizon_64", planted, spread=0.002)
    found = lines(transfer.findings(transfer.read(written(tmp_path, results=rows))))
    costs = {
        power: found[f"tokens, D = 64: rate as T^{name}: paid for the base's value"].estimate.value
        for name, power in (("0", 0.0), ("(-0.32)", -0.32), ("(-1/2)", -0.5))
    }
    assert min(costs, key=costs.get) == planted
    assert found["tokens, D = 64: rate as T^0: exponent of T in the best value"].published == (
        "0 (nanochat)"
    )


def test_decays_over_tokens_are_compared_at_the_best_rate_of_each_length(tmp_path):
    rows = table("training.steps", "horizon_decay_64", -1.0, spread=0.002)
    rows = rows.assign(**{"optimizer.weight_decay": rows["optimizer.lr"]})
    rates = rows["training.steps"].map({150: 0.03, 600: 0.02, 2400: 0.01})
    worse = {"optimizer.lr": 2 * rates, "final_eval_loss": rows["final_eval_loss"] + 1}
    rows = pd.concat([rows.assign(**{"optimizer.lr": rates}), rows.assign(**worse)])
    found = lines(transfer.findings(transfer.read(written(tmp_path, results=rows))))
    for rule, power in (("1/T", -1.0), ("T^(-0.47)", -0.473)):
        stem = f"decay by tokens: decay per step as {rule}"
        assert found[f"{stem}: exponent of T in the best value"].estimate.value == pytest.approx(-1)
        cost = found[f"{stem}: paid for the base's value"].estimate.value
        assert cost == pytest.approx(0.05 * ((1 + power) * 4) ** 2, abs=0.02)


def test_a_best_rate_that_bends_lies_off_its_line(tmp_path):
    rows = table("training.steps", "horizon_64", 0.0)
    rows.loc[rows["training.steps"] == 600, "optimizer.lr"] *= 4
    found = lines(transfer.findings(transfer.read(written(tmp_path, results=rows))))
    text = found["tokens, D = 64: rate as T^0: exponent of T in the best value"].measured
    assert "0.94 octaves off it" in text  # 2/3, 4/3 and 2/3 of an octave: the root of their mean


def test_a_table_of_another_sweep_is_refused(tmp_path):
    rows = table("training.steps", "horizon_32", 0.0)
    with pytest.raises(TableError, match="curve"):
        transfer.read(written(tmp_path, results=rows))
