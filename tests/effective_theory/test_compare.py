"""Theory and networks joined: the tolerances promised, and what a comparison counts as."""

from __future__ import annotations

import math

import pytest
import torch

from effective_theory.dinan import compare
from effective_theory.dinan.compare import Comparison
from effective_theory.dinan.config import Config
from effective_theory.dinan.inputs import inputs
from training.config import load

pytestmark = pytest.mark.xdist_group("compare")  # what most look at is computed once
CONFIGS = "effective_theory/configs"


def row(**changes) -> Comparison:
    values = {"stem": "vision", "width": 512, "heads": 2, "networks": 300, "quantity": "theta"}
    values |= {"block": "head", "part": "mlp_in", "entry": "diagonal", "predicted": 2.0}
    values |= {"predicted_error": math.nan, "measured": 2.03, "error": 0.01}
    return Comparison(**values | changes)


def test_ratio_and_z_score():
    assert row().ratio == pytest.approx(1.015)
    assert row().z == pytest.approx(3.0)
    assert row(predicted_error=0.01).z == pytest.approx(3 / math.sqrt(2))
    assert math.isnan(row(predicted=0.0).ratio)
    assert math.isnan(row(measured=2.0, error=1e-8).z)  # the same in all networks


MET = [({}, True), ({"measured": 2.05}, False), ({"measured": 2.09, "part": "query"}, True)]
MET += [({"measured": 1.89, "part": "key"}, False), ({"quantity": "G", "part": ""}, False)]
MET += [({"quantity": "G", "part": "", "measured": 1.99}, True)]
MET += [({"predicted": 0.0, "measured": 0.0, "error": 0.0}, True)]
MET += [({"predicted": 0.0, "measured": 1e-3}, False)]
FEW = [{"width": 256}, {"width": math.inf}, {"networks": 299}, {"entry": "rest"}]
MET += [({**one, "measured": 3.0}, None) for one in FEW]


@pytest.mark.parametrize(("changes", "met"), MET)
def test_tolerances_hold_at_large_widths_with_many_networks(changes, met):
    assert row(**changes).met is met


@pytest.fixture(scope="module")
def result():
    words = (
        "measure.widths=[32,64] measure.seeds=[40,25] model.heads=1 model.depth=1 "
        "model.mlp_ratio=1 model.outputs=16 theory.attention_draws=4096"
    ).split()
    return compare.compare(load(Config, f"{CONFIGS}/vision.yaml", words))


def test_theory_and_networks_agree_within_errors_and_the_corrections_of_small_widths(result):
    rows = [r for r in result.rows if r.entry == "diagonal" and r.quantity != "gradient"]
    assert {r.width for r in rows} == {32, 64, math.inf}
    # Stem and what only depends on it have no corrections: errors alone explain the distance.
    for r in rows:
        slack = 0.0 if (r.quantity, r.block) == ("G", "stem") else 4 / min(r.width, 64)
        assert abs(r.ratio - 1) <= slack + 4 * r.error / abs(r.predicted), r


def test_groups_add_up_to_the_whole_kernel(result):
    for part in result.measured:
        for block, groups in part.mean.groups.items():
            total = sum(groups.values())
            torch.testing.assert_close(total, part.mean.theta[block]["total"])


def test_diagonals_error_is_that_of_the_networks_means_not_of_single_entries(result):
    part = result.measured[0]
    entries = part.se.G["mlp.0"].diagonal()
    own = part.se.diagonals["G", "mlp.0"]
    independent = entries.norm() / len(entries)
    assert independent / 2 < own < entries.mean() * 1.001


def test_rest_is_the_projection_on_the_prediction_with_the_networks_own_error(result):
    part, theory = result.measured[-1], result.theory.G["mlp.0"]
    direction = compare.directions(result.theory, result.tangent)["G", "mlp.0"]
    assert not direction.diagonal().any()
    assert float(direction.norm()) == pytest.approx(1)
    where = ("G", "mlp.0", "rest", 64)
    [found] = [r for r in result.rows if (r.quantity, r.block, r.entry, r.width) == where]
    assert found.measured == pytest.approx(float((direction * part.mean.G["mlp.0"]).sum()))
    assert found.predicted == pytest.approx(float((direction * theory).sum()))
    seeds = [compare.measure.network(result.config, 64, seed) for seed in range(25)]
    x = inputs(result.config)
    kernels = [compare.measure.observe(one, x)["G", "mlp.0"] for one in seeds]
    own = torch.stack([(direction * kernel).sum() for kernel in kernels])
    assert found.error == pytest.approx(float(own.std() / 25**0.5))


def test_gradients_are_those_predicted_at_each_width(result):
    rows = [r for r in result.rows if r.quantity == "gradient"]
    assert {r.width for r in rows} == {32, 64}
    for r in rows:
        assert r.ratio == pytest.approx(1, abs=4 / r.width + 4 * r.error / r.predicted), r
    by = {(r.width, r.part): r.predicted for r in rows}
    for tensor in ("stem", "attention.0.value", "mlp.0.mlp_out"):  # n^(-1/2)
        assert by[32, tensor] / by[64, tensor] == pytest.approx(2**0.5)


@pytest.mark.thorough
def test_with_s_only_what_is_of_order_one_has_a_limit():
    words = (
        "measure.widths=[16,32,64] measure.seeds=[25,25,25] model.s=1 model.heads=1 model.depth=1 "
        "model.mlp_ratio=1 measure.outputs=2 theory.attention_draws=4096"
    ).split()
    found = compare.compare(load(Config, f"{CONFIGS}/language.yaml", words))
    rows = {(r.width, r.quantity, r.block, r.part): r for r in found.rows if r.entry == "diagonal"}
    limits = {(q, b) for width, q, b, _ in rows if width == math.inf}
    assert ("G", "mlp.0") in limits and ("theta", "head") in limits
    assert ("G", "head") not in limits and ("theta", "mlp.0") not in limits
    assert set(found.limit.mean.theta) == {"head"}
    # the head's kernel falls as 1 / n, Theta before it rises as n
    head = [rows[width, "G", "head", ""] for width in (16, 64)]
    before = [rows[width, "theta", "stem", "total"] for width in (16, 64)]
    assert head[0].predicted / head[1].predicted == pytest.approx(4)
    assert before[1].predicted / before[0].predicted == pytest.approx(4)
    assert all(r.ratio == pytest.approx(1, abs=0.25) for r in (*head, *before))


def test_the_limit_is_that_of_the_largest_widths():
    words = (
        "measure.widths=[256,8,16,32] measure.seeds=[2,2,2,2] measure.outputs=1 model.depth=0 "
        "model.outputs=4"
    ).split()
    found = compare.compare(load(Config, f"{CONFIGS}/vision.yaml", words))
    networks = {r.networks for r in found.rows if r.width == math.inf}
    three = sorted(found.measured, key=lambda part: part.width)[1:]
    again = compare.measure.limit(three)
    torch.testing.assert_close(found.limit.mean.G["head"], again.mean.G["head"])
    assert networks == {6}


def test_rest_compares_along_the_prediction(result):
    rest = [r for r in result.rows if r.entry == "rest" and r.quantity == "G"]
    assert rest and all(abs(r.z) < 4 for r in rest if r.block == "stem")
    assert all(r.predicted > 0 for r in rest)


@pytest.mark.parametrize("stem", ["vision", "language"])
@pytest.mark.parametrize("s", [0.0, 0.5])
def test_theory_at_another_width_is_what_it_gives_there(stem, s):
    words = f"model.s={s} model.depth=1 model.mlp_ratio=2 rates.query=0 theory.attention_draws=256"
    small, large = (
        load(Config, f"{CONFIGS}/{stem}.yaml", [*words.split(), f"model.width={width}"])
        for width in (32, 128)
    )
    x = inputs(small)
    there = compare.kernels.forward(large, x)
    expected = compare.tangent.tangent(large, x, there)
    here = compare.kernels.forward(small, x)
    found = compare.tangent.at_width(small, compare.tangent.tangent(small, x, here), 128)
    moved = compare.kernels.at_width(small, here, 128)
    torch.testing.assert_close((moved.G, moved.F, moved.G_se), (there.G, there.F, there.G_se))
    assert found.rates == pytest.approx(expected.rates)
    for field in ("theta", "theta_se", "parts", "norms"):
        torch.testing.assert_close(getattr(found, field), getattr(expected, field))
    magnitudes = compare.tangent.magnitudes(large, found)
    assert magnitudes == pytest.approx(compare.tangent.magnitudes(large, expected))
