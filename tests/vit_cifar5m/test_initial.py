"""Networks at initialisation (Bordelon et al., Figure 3): what is measured, on known answers."""

import csv
import functools
import json
from fractions import Fraction

import numpy as np
import pandas as pd
import pytest
import torch

from training.config import describe, leaves
from vit_cifar5m import initial

TINY = (
    "kernels.heads=[2,8,32] kernels.layers=2 kernels.networks=10 kernels.reference_networks=10 "
    "attention.heads=[32] attention.head_dims=[1,4] attention.networks=8 patch_size=16 samples=3"
).split()


SMALLEST = (
    "kernels.heads=[2,4] kernels.layers=2 kernels.networks=2 kernels.reference_networks=2 "
    "attention.heads=[4] attention.head_dims=[2] attention.alphas=[0.5] attention.networks=2 "
    "patch_size=16 samples=2"
).split()


@functools.cache
def _base(*words):
    return initial.compute(initial.read_settings("laptop", words))


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """A folder with CIFAR-10's held-out batch alone, of random pixels."""
    folder = tmp_path_factory.mktemp("cifar10")
    rows = np.random.default_rng(0).integers(0, 256, (4, 3073), dtype=np.uint8)
    rows[:, 0] %= 10
    (folder / "test_batch.bin").write_bytes(rows.tobytes())
    return folder


@pytest.fixture(scope="module")
def measured():
    return initial.compute(initial.read_settings("laptop", TINY))


def test_variance_and_kurtosis_are_the_closed_forms(measured):
    """Given a normalised input q and k are Gaussian of variance 1: A has variance N^(1 - 2 alpha)
    and excess kurtosis 6 / N."""
    table = pd.DataFrame(measured["initial_attention"])
    assert len(table) == 2 * 2 * 8
    for (alpha, head_dim), rows in table.groupby(["alpha_attention", "head_dim"]):
        expected = head_dim ** float(1 - 2 * Fraction(alpha))
        assert rows["variance"].mean() == pytest.approx(expected, rel=0.2)
        assert rows["second_moment"].mean() == pytest.approx(expected, rel=0.2)
        kurtosis = rows["fourth_moment"].mean() / rows["second_moment"].mean() ** 2 - 3
        assert kurtosis == pytest.approx(6 / head_dim, rel=0.5)


def test_kernels_come_closer_as_one_over_heads(measured):
    table = pd.DataFrame(measured["initial_kernels"])
    assert len(table) == 3 * 10 * 2 and set(table["layer"]) == {1, 2}
    error = (table["square_error"] / table["reference_square"]).groupby(table["heads"]).mean()
    power = np.polyfit(np.log(error.index), np.log(error), 1)[0]
    assert power == pytest.approx(-1, abs=0.25) and table["network"].nunique() == 10
    references = table.groupby("heads")["references"].unique()
    assert {int(h): list(n) for h, n in references.items()} == {2: [10], 8: [10], 32: [9]}


def test_every_heads_logit_is_in_the_density(measured):
    table = pd.DataFrame(measured["initial_density"])
    assert set(table.groupby(["alpha_attention", "head_dim"])["count"].sum()) == {32 * 8}
    unit = table[table["head_dim"] == 4].groupby("alpha_attention")["high"].max()
    assert unit.to_dict() == {0.5: 5.0, 1.0: 2.5}
    near = table[(table["low"] >= -1.0) & (table["high"] <= 1.0) & (table["head_dim"] == 1)]
    # The integral of K_0(|a|) / pi from -1 to 1.
    for _, rows in near.groupby("alpha_attention"):
        assert rows["count"].sum() / 256 == pytest.approx(0.791, abs=0.1)


def test_networks_of_two_sizes_share_no_numbers(measured):
    settings = initial.read_settings("laptop", TINY)
    networks = initial.Networks(settings)
    small, large = (
        next(networks.captures(networks.shape(4, heads, 1), 0.5, 1)).stream[0] for heads in (2, 8)
    )
    assert not torch.isclose(small[0, 0, :, None], large[0, 0, None, :], rtol=1e-4, atol=0).any()


def test_the_command_writes_tables_and_ships_them(tmp_path, capsys):
    words = [*TINY, "kernels.networks=2", "kernels.heads=[2,4]", "attention.networks=2"]
    initial.main([*words, "--out", str(tmp_path / "out"), "--ship", str(tmp_path / "data")])
    assert len(capsys.readouterr().out.splitlines()) == 3
    for name in initial.TABLES:
        text = (tmp_path / "out" / f"{name}.csv").read_text()
        assert (tmp_path / "data" / f"{name}.csv").read_text() == text
        origin = json.loads((tmp_path / "data" / f"{name}.json").read_text())
        assert origin["settings"]["kernels"]["heads"] == [2, 4] and origin["environment"]
    with open(tmp_path / "out/initial_kernels.csv", newline="") as file:
        assert len(list(csv.DictReader(file))) == (10 + 2) * 2


CHANGES = """
kernels.head_dim=2 kernels.layers=1 kernels.heads=[2,8] kernels.networks=3
kernels.reference_networks=3 attention.head_dims=[1] attention.heads=[2] attention.alphas=[0.75]
attention.layers=2 attention.networks=3 alpha_attention=1 alpha_depth=0.5 beta0=1 patch_size=32
samples=1 seed=1 data.source=cifar10
""".split()


@pytest.mark.parametrize("change", CHANGES)
def test_every_key_changes_a_table(change, pictures):
    words = [change, *[f"data.path={pictures}"] * (change == "data.source=cifar10")]
    assert initial.compute(initial.read_settings("laptop", [*SMALLEST, *words])) != _base(*SMALLEST)


def test_every_key_is_covered_above():
    keys = {key for key, _ in leaves(initial.Settings)}
    # The folder and the cache are where files of a source lie, tested in test_cifar5m_data.py.
    assert keys == {one.partition("=")[0] for one in CHANGES} | {"data.path", "data.cache_dir"}
    assert "data.seed" not in describe(initial.Settings)
