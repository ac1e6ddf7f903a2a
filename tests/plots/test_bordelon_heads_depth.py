"""Figures 3, 4 and 5 of Bordelon et al.: what is measured, on known answers, and what is drawn."""

import csv
import functools
import json
import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import save_file
from scipy.integrate import quad

from plots import statistics as exponents
from plots import style
from plots.bordelon import depth as infinite_depth
from plots.bordelon import heads as infinite_heads
from plots.tables import TableError
from sweeps.sweep_file import load_sweep
from training import task as tasks
from training.config import describe, leaves, load
from vit_cifar5m import distances, initial, train
from vit_cifar5m.config import Config

ROOT = Path(__file__).resolve().parents[2]
SWEEPS = ROOT / "vit_cifar5m/sweeps"


@pytest.fixture(autouse=True)
def coarse(monkeypatch):
    """Few pixels: what is drawn is the same."""
    monkeypatch.setattr(style, "DPI", 30)


# ------------------------------------------------------------------------------------------------
# Sweeps


def test_the_sweep_over_heads_is_the_papers():
    sweep = load_sweep(SWEEPS / "figure_4.yaml")
    assert len(sweep.points) == 8 * 10
    assert sorted({p.config.model.heads for p in sweep.points}) == [2**k for k in range(4, 12)]
    config = sweep.points[0].config
    assert (config.model.layers, config.model.head_dim, config.training.steps) == (2, 4, 2500)
    rule = config.prescription
    assert (rule.gamma0, rule.beta0, rule.alpha_attention) == (0.05, 4, 0.5)
    assert (config.optimizer.name, config.optimizer.momentum) == ("sgd", 0)
    assert all(step % config.training.observe_every == 0 for step in infinite_heads.STEPS)
    assert sweep.config.metrics


def test_seeds_of_the_sweep_over_heads_share_their_data():
    points = load_sweep(SWEEPS / "figure_4.yaml", preset="laptop").points
    assert len(points) == 5 * 5 and {p.seed for p in points} == set(range(5))
    assert {p.config.data.seed for p in points} == {0}
    assert {p.config.training.observe_every for p in points} == {25}


def test_runs_of_one_data_seed_differ_in_their_initial_weights_alone():
    words = ["model.head_dim=2", "model.heads=2", "model.layers=1", "model.patch_size=16",
             "training.batch_size=4"]

    def begin(seed, *more):
        config = load(Config, ROOT / "vit_cifar5m/configs/laptop.yaml",
                      [*words, f"seed={seed}", *more])
        task = train.build_task(config)
        tasks.initialise(task)
        return task.model.readout.weight, next(iter(tasks.first_batches(task, 1)))[0]

    (one, images), (two, same) = begin(3, "data.seed=0"), begin(4, "data.seed=0")
    assert torch.equal(images, same) and not torch.equal(one, two)
    assert torch.equal(begin(0)[1], images)
    assert not torch.equal(begin(4)[1], images)


@pytest.mark.parametrize("preset, depths, seeds", [(None, [1, 4, 8, 16, 32], 3),
                                                   ("laptop", [1, 2, 4, 8, 16], 3)])
def test_the_sweep_over_depth_has_both_exponents_at_equal_width(preset, depths, seeds):
    sweep = load_sweep(SWEEPS / "figure_5.yaml", preset=preset)
    assert len(sweep.points) == 2 * len(depths) * seeds
    found = {(p.config.prescription.alpha_depth, p.config.model.layers) for p in sweep.points}
    assert found == {(alpha, depth) for alpha in (0.5, 1.0) for depth in depths}
    assert len({p.config.model.width for p in sweep.points}) == 1
    rates = {(p.config.prescription.alpha_depth, p.config.optimizer.lr) for p in sweep.points}
    assert len(rates) == 2
    assert sweep.config.metrics and sweep.config.observations
    settings = sweep.points[0].config.training
    assert settings.observe_every and settings.steps % settings.eval_every == 0


# ------------------------------------------------------------------------------------------------
# At initialisation

TINY = [
    "kernels.heads=[2,8,32]", "kernels.layers=2", "kernels.networks=10",
    "kernels.reference_networks=10", "attention.heads=[32]", "attention.head_dims=[1,4]",
    "attention.networks=8", "patch_size=16", "samples=3",
]


SMALLEST = [
    "kernels.heads=[2,4]", "kernels.layers=2", "kernels.networks=2", "kernels.reference_networks=2",
    "attention.heads=[4]", "attention.head_dims=[2]", "attention.alphas=[0.5]",
    "attention.networks=2", "patch_size=16", "samples=2",
]


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
    found = exponents.exponent(
        infinite_heads.relative_errors(table), "network", "heads", "error"
    )
    assert found.value == pytest.approx(-1, abs=0.25) and 0 < found.error < 0.2
    assert found.groups == 10
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
    small, large = (next(networks.captures(networks.shape(4, heads, 1), 0.5, 1)).stream[0]
                    for heads in (2, 8))
    assert not torch.isclose(small[0, 0, :, None], large[0, 0, None, :], rtol=1e-4, atol=0).any()


def test_the_command_writes_tables_and_ships_them(tmp_path, monkeypatch, capsys):
    from plots import tables

    monkeypatch.setattr(tables, "DATA", tmp_path / "data")
    words = [*TINY, "kernels.networks=2", "kernels.heads=[2,4]", "attention.networks=2"]
    initial.main([*words, "--out", str(tmp_path / "out"), "--ship"])
    assert len(capsys.readouterr().out.splitlines()) == 3
    for name in initial.TABLES:
        text = (tmp_path / "out" / f"{name}.csv").read_text()
        assert (tmp_path / "data" / f"{name}.csv").read_text() == text
        origin = json.loads((tmp_path / "data" / f"{name}.json").read_text())
        assert origin["settings"]["kernels"]["heads"] == [2, 4] and origin["environment"]
    with open(tmp_path / "out/initial_kernels.csv", newline="") as file:
        assert len(list(csv.DictReader(file))) == (10 + 2) * 2


@pytest.mark.parametrize("change", [
    "kernels.head_dim=2", "kernels.layers=1", "kernels.heads=[2,8]", "kernels.networks=3",
    "kernels.reference_networks=3", "attention.head_dims=[1]", "attention.heads=[2]",
    "attention.alphas=[0.75]", "attention.layers=2", "attention.networks=3", "alpha_attention=1",
    "alpha_depth=0.5", "beta0=1", "patch_size=32", "samples=1", "seed=1", "data.source=cifar10",
])
def test_every_key_changes_a_table(change, pictures):
    words = [*SMALLEST, f"data.path={pictures}"]
    assert initial.compute(initial.read_settings("laptop", [*words, change])) != _base(*words)


def test_every_key_is_covered_above():
    keys = {key for key, _ in leaves(initial.Settings)}
    marks = test_every_key_changes_a_table.pytestmark[0].args[1]
    # The folder and the cache are where files of a source lie, tested in test_cifar5m_data.py.
    assert keys == {change.partition("=")[0] for change in marks} | {"data.path", "data.cache_dir"}
    assert "data.seed" not in describe(initial.Settings)


def test_both_presets_are_valid_and_the_paper_has_its_sizes():
    paper = initial.read_settings("paper", [])
    assert (paper.kernels.head_dim, paper.kernels.layers) == (4, 8)
    assert {1, 16} <= set(paper.attention.head_dims)
    assert paper.attention.heads == [32, 64, 128, 256]
    assert initial.read_settings("laptop", ["data.source=cifar10", "data.path=x"]).data.path == "x"


@pytest.mark.parametrize("words, line", [
    (["kernels.head=4"], "preset laptop: unknown key 'kernels.head'"),
    (["kernels.heads=[4,4]"], "kernels.heads [4, 4]: a value stands there twice"),
    (["attention.alphas=[0.5,0.5]"], "attention.alphas [0.5, 0.5]: a value stands there twice"),
    (["data.seed=1"], "preset laptop: unknown key 'data.seed'"),
    (["data.repeat=true"], "preset laptop: unknown key 'data.repeat'"),
    (["data.train_images=9"], "preset laptop: unknown key 'data.train_images'"),
    (["data.validation_images=9"], "preset laptop: unknown key 'data.validation_images'"),
    (["kernels.reference_networks=1"], "kernels.reference_networks"),
    (["attention.alphas=[2]"], "attention.alphas"),
    (["data.source=cifar10"], "data.path is missing"),
    (["data.source=cifar10", "data.path=/nothing"], "data.path: /nothing is not a folder"),
])
def test_a_mistake_is_one_line(words, line, tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        initial.main([*words, "--out", str(tmp_path / "out")])
    error = capsys.readouterr().err.strip().splitlines()
    assert end.value.code == 2 and len(error) == 1 and line in error[0]
    assert not (tmp_path / "out").exists()


def test_a_file_in_the_way_is_one_line(tmp_path, capsys):
    (tmp_path / "out").write_text("")
    with pytest.raises(SystemExit):
        initial.main(["--out", str(tmp_path / "out")])
    assert "is not a folder; name one to write tables to" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------
# Distances


def sweep_folder(folder, logits, status=None, data=None, grid="model.heads"):
    """A sweep's folder with runs of (heads, seed) -> {step: logits}."""
    entries = []
    for (heads, seed), steps in logits.items():
        name = f"heads-{heads}-{seed}"
        arrays = folder / name / "observations"
        arrays.mkdir(parents=True)
        for step, values in steps.items():
            save_file({"outputs": values} if values is not None else {"x": torch.ones(1)},
                      arrays / f"step_{step}.safetensors")
        summary = {"status": (status or {}).get((heads, seed), "finished")}
        (folder / name / "summary.json").write_text(json.dumps(summary))
        section = {"source": "embedded", **(data or {}).get((heads, seed), {})}
        (folder / name / "config.yaml").write_text(json.dumps({"data": section}))
        entries.append({"run": name, "curve": "heads", "values": {grid: heads}, "seed": seed})
    (folder / "manifest.json").write_text(json.dumps(entries))
    return folder


def ones(value):
    return torch.full((2, 3), float(value))


def table_of(folder):
    distances.main([str(folder)])
    with open(folder / "distances.csv", newline="") as file:
        return {(int(r["model.heads"]), int(r["seed"]), int(r["step"])): r
                for r in csv.DictReader(file)}


def test_distances_to_the_ensemble_are_unbiased(tmp_path, capsys):
    """Widest at -1, 0, 1; each run is compared with the two of other seeds: of seed 0 with 0 and 1,
    mean 1/2, variance 1/2, scatter of the mean 1/4."""
    runs = {(8, seed): {0: ones(seed - 1), 5: ones(7)} for seed in range(3)}
    runs[4, 0] = {0: ones(2), 5: ones(7)}
    rows = table_of(sweep_folder(tmp_path, runs))
    assert capsys.readouterr().out.strip() == str(tmp_path / "distances.csv")
    found = {key[:2]: float(row["square_distance"]) for key, row in rows.items() if not key[2]}
    assert found == pytest.approx({(4, 0): 2.25 - 0.25, (8, 0): 2.25 - 0.25, (8, 1): -1,
                                   (8, 2): 2.25 - 0.25})
    assert all(float(row["square_distance"]) == 0 for key, row in rows.items() if key[2] == 5)
    assert [rows[key]["references"] for key in [(4, 0, 0), (8, 0, 0)]] == ["2", "2"]
    assert [rows[key]["member"] for key in [(4, 0, 0), (8, 0, 0)]] == ["False", "True"]
    assert {row["widest"] for row in rows.values()} == {"8"}


def test_distances_of_scattered_functions_fall_with_heads(tmp_path):
    generator = torch.Generator().manual_seed(0)
    runs = {(heads, seed): {0: 3 + torch.randn(40, 10, generator=generator) / heads**0.5}
            for heads in (4, 16, 64) for seed in range(6)}
    table_of(sweep_folder(tmp_path, runs))
    rows = pd.read_csv(tmp_path / "distances.csv")
    found = exponents.exponent(rows, "seed", "model.heads", "square_distance")
    assert found.value == pytest.approx(-1, abs=4 * found.error) and found.error < 0.05


def test_what_runs_of_one_seed_share_does_not_count_as_closeness(tmp_path):
    """Variance 1 each, correlation 0.8 between sizes: the distance to the limit is 1 for all."""
    generator = torch.Generator().manual_seed(0)
    runs = {}
    for seed in range(3):
        shared = torch.randn(2000, 10, generator=generator)
        for heads in (4, 8):
            own = torch.randn(2000, 10, generator=generator)
            runs[heads, seed] = {0: 0.8**0.5 * shared + 0.2**0.5 * own}
    rows = table_of(sweep_folder(tmp_path, runs))
    for heads in (4, 8):
        found = [float(rows[heads, seed, 0]["square_distance"]) for seed in range(3)]
        assert np.mean(found) == pytest.approx(1, abs=0.05)


ALPHA = "prescription.alpha_attention"


def crossed(folder, key, sweeps):
    """A folder whose grid crosses heads with another key: value -> runs, as for sweep_folder."""
    entries = []
    for value, runs in sweeps.items():
        part = sweep_folder(folder / str(value), runs)
        for entry in json.loads((part / "manifest.json").read_text()):
            values = {key: value, **entry["values"]}
            entries.append({**entry, "run": f"{value}/{entry['run']}", "values": values})
    (folder / "manifest.json").write_text(json.dumps(entries))
    return folder


def test_each_value_of_another_key_has_its_own_limit(tmp_path):
    """Logits of the two alphas lie ten apart, and they were observed at other steps."""
    runs = {(heads, seed): ones(seed - 1 + 4 / heads) for heads in (4, 16) for seed in range(3)}
    sweeps = {alpha: {at: {step: logits + 10 * step} for at, logits in runs.items()}
              for alpha, step in ((1, 0), (0.5, 1))}
    distances.main([str(crossed(tmp_path, ALPHA, sweeps))])
    table = pd.read_csv(tmp_path / "distances.csv")
    assert list(table[ALPHA]) == [1.0] * 6 + [0.5] * 6 and set(table["references"]) == {2}
    # Against seeds 1 and 2, for example: mean 1/2 + 1/4, scatter of the mean 1/4.
    one = [(s - 1 - m + 0.75 * (h == 4)) ** 2 - v for h in (4, 16)
           for s, m, v in ((0, 0.5, 0.25), (1, 0, 1), (2, -0.5, 0.25))]
    for _, rows in table.groupby(ALPHA):
        assert list(rows["square_distance"]) == pytest.approx(one)
    assert len(infinite_heads.read(tmp_path / "distances.csv", infinite_heads.DISTANCES)) == 12


def test_a_limit_with_too_few_seeds_is_named_with_its_values(tmp_path, capsys):
    runs = {(8, seed): {0: ones(seed)} for seed in range(3)}
    with pytest.raises(SystemExit):
        distances.main([str(crossed(tmp_path, ALPHA, {1: runs, 0.5: PAIR}))])
    line = "curve 'heads' with prescription.alpha_attention 0.5: 2 seeds of the widest models"
    assert line in capsys.readouterr().err


def test_runs_that_diverged_are_left_out(tmp_path):
    runs = {(heads, seed): {0: ones(seed)} for heads in (4, 8) for seed in range(3)}
    rows = table_of(sweep_folder(tmp_path, runs, status={(4, 1): "diverged"}))
    assert set(rows) == {(4, 0, 0), (4, 2, 0), (8, 0, 0), (8, 1, 0), (8, 2, 0)}


PAIR = {(8, 0): {0: ones(1)}, (8, 1): {0: ones(2)}}


@pytest.mark.parametrize("logits, options, line", [
    (PAIR, {}, "2 seeds of the widest models (model.heads 8); expected at least three"),
    (PAIR, {"status": {(8, 1): "stopped"}}, "heads-8-1: not finished; run the sweep to its end"),
    (PAIR, {"status": dict.fromkeys(PAIR, "failed")}, "no finished run in it"),
    (PAIR, {"grid": "model.layers"}, "its grid has no model.heads; expected a sweep over heads"),
    (PAIR, {"data": {(8, 1): {"path": "x"}}}, "heads-8-1: its data section differs from that of"),
    ({**PAIR, (8, 1): {}}, {}, "heads-8-1: nothing was observed; set training.observe_every"),
    ({**PAIR, (8, 1): {0: None}}, {}, "step_0.safetensors: no 'outputs' in it; delete the run"),
    ({**PAIR, (8, 1): {3: ones(1)}}, {}, "heads-8-1: observed steps 3, but heads-8-0 0; give all"),
    ({**PAIR, (8, 1): {0: torch.ones(4, 3)}}, {}, "have shape (4, 3), those of heads-8-0 (2, 3)"),
])
def test_runs_that_cannot_be_compared_are_one_line(logits, options, line, tmp_path, capsys):
    folder = sweep_folder(tmp_path, logits, **options)
    with pytest.raises(SystemExit) as end:
        distances.main([str(folder)])
    error = capsys.readouterr().err.strip().splitlines()
    assert end.value.code == 2 and len(error) == 1 and line in error[0]
    assert not (folder / "distances.csv").exists()


def test_damaged_logits_and_other_folders_are_one_line(tmp_path, capsys):
    with pytest.raises(SystemExit):
        distances.main([str(tmp_path)])
    assert "no manifest.json in it; expected the results folder" in capsys.readouterr().err
    folder = sweep_folder(tmp_path, PAIR)
    whole = (folder / "manifest.json").read_text()
    for damaged in (whole[:-9], "{}", '[{"run": "heads-8-0"}]', "[3]"):
        (folder / "manifest.json").write_text(damaged)
        with pytest.raises(SystemExit):
            distances.main([str(folder)])
        error = capsys.readouterr().err
        assert "manifest.json: cannot read it" in error and "run the sweep again" in error
    (folder / "manifest.json").write_text(whole)
    (folder / "heads-8-1/observations/step_0.safetensors").write_bytes(b"torn")
    with pytest.raises(SystemExit):
        distances.main([str(folder)])
    assert "step_0.safetensors: cannot read it" in capsys.readouterr().err
    (folder / "heads-8-0/summary.json").unlink()
    with pytest.raises(SystemExit):
        distances.main([str(folder)])
    assert "heads-8-0: not finished" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------
# Figures 3 and 4


def heads_tables(folder, late=-0.5):
    """Tables with exact powers; networks and seeds differ by a factor of their own."""
    kernels = [
        {"head_dim": 4, "layers": 2, "heads": h, "network": k, "layer": layer,
         "square_error": (1 + k / 10) * layer / h, "reference_square": layer}
        for h in (4, 8, 16) for k in range(3) for layer in (1, 2)
    ]
    attention = [
        {"alpha_attention": a, "head_dim": n, "heads": 8, "network": k,
         "second_moment": n ** (1 - 2 * a), "fourth_moment": (3 + 6 / n) * n ** (2 - 4 * a)}
        for a in (0.5, 1.0) for n in (1, 4, 16) for k in range(2)
    ]
    bins = [
        {"alpha_attention": 0.5, "head_dim": n, "heads": h, "networks": 1, "low": low,
         "high": low + 1, "count": 10}
        for n in (1, 4) for h in (8, 16) for low in (-1, 0)
    ]
    distance = [
        {"model.heads": h, "seed": s, "step": t, "square_distance": (1 + s / 10) * h**power}
        for h in (4, 8, 16) for s in range(3) for t, power in ((0, -1), (25, -1), (60, late))
    ]
    # H = 4 stays at chance, without a spread; the rest ends at 1 + 8 / H with one of 1 / H.
    metric = [
        {"model.heads": h, "seed": s, "step": t, "eval_loss": loss}
        for h in (4, 8, 16, 32) for s in range(3)
        for t, loss in ((0, math.nan), (30, 3.0), (60, 2.3 if h == 4 else 1 + (8 + s) / h / 2))
    ]
    paths = []
    for name, rows in zip("abcde", (kernels, attention, bins, distance, metric)):
        paths.append(folder / f"{name}.csv")
        pd.DataFrame(rows).to_csv(paths[-1], index=False)
    return paths


def test_known_powers_are_found(tmp_path, capsys):
    infinite_heads.main([*map(str, heads_tables(tmp_path)), "--out", str(tmp_path / "figures")])
    lines = capsys.readouterr().out.splitlines()

    def line(start):
        return next(line for line in lines if line.startswith(start))

    assert "-1.000 ± 0.000" in line("3a: H in the kernel's square error, layer 2")
    assert line("3a: the same, all layers").endswith("agrees within 95 %")
    assert "-1.000 ± 0.000" in line("3c: N in the variance of A, alpha_A = 1 ")
    assert "+0.000 ± 0.000" in line("3c: N in the variance of A, alpha_A = 1/2").replace("-0", "+0")
    assert "6.00, 6.00, 6.00" in line("3c: N x excess kurtosis, alpha_A = 1/2")
    assert "-1.000 ± 0.000" in line("3c: N in the excess kurtosis of A, alpha_A = 1 ")
    assert "-1.000" in line("4b: H in the logits' square error, step 25")
    assert "-0.500" in line("4b: the same, step 60")
    assert "+0.500" in line("4b: exponent at step 60 minus step 25")
    assert line("4b: exponent at").endswith("agrees")
    names = {path.name for path in (tmp_path / "figures").iterdir()}
    assert names == {f"{n}.{k}" for n in infinite_heads.FIGURES for k in ("png", "pdf")}


def test_a_rate_that_grows_disagrees(tmp_path):
    found = infinite_heads.read_all(heads_tables(tmp_path, late=-1.5))
    last = infinite_heads.findings(found)[-1]
    assert last.measured.startswith("-0.500") and last.verdict == "disagrees"


def test_loss_and_spread_over_heads(tmp_path):
    """The final loss is 1 + (8 + s) / (2 H) for seeds s = 0, 1, 2; H = 4 stays at chance."""
    found = infinite_heads.read_all(heads_tables(tmp_path))
    losses = {f.name: f for f in infinite_heads.findings(found) if f.name.startswith("4a")}
    fall = losses["4a: final loss, H = 4 minus H = 32 (nats)"]
    assert fall.measured.startswith("+1.159") and "(n = 3)" in fall.measured
    assert fall.verdict == "agrees"
    spread = losses["4a: standard deviation over seeds by H (nats)"].measured
    assert spread == "4: 0.000, 8: 0.062, 16: 0.031, 32: 0.016 (n = 3)"
    power = losses["4a: the same, of H that have learnt (8, 16, 32)"]
    assert power.measured.startswith("-1.000 ± 0.000") and power.verdict == "agrees"


def test_there_is_no_verdict_on_the_spread_of_what_has_not_learnt(tmp_path):
    metrics = infinite_heads.read_all(heads_tables(tmp_path))[-1]
    raised = metrics.assign(eval_loss=metrics["eval_loss"] + 1.2)
    last = infinite_heads._of_losses(raised)[-1]
    assert last.measured == "not measured" and last.verdict == "no verdict: at chance"


@pytest.mark.parametrize("other", [[0.1, 0.2, 0.3, 0.4], [0.12, 0.18, 0.3, 0.4]])
def test_the_expected_variation_is_the_mean_distance_of_draws(other):
    rng, shares = np.random.default_rng(0), np.array([0.1, 0.2, 0.3, 0.4])
    drawn = rng.multinomial(500, shares, size=4000) / 500
    expected = np.abs(drawn - other).sum(axis=1).mean() / 2
    found = infinite_heads.expected_variation(shares, np.array(other), 500)
    assert found == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("head_dim", [1, 4, 16])
@pytest.mark.parametrize("alpha", [0.5, 1.0])
def test_the_exact_density_has_its_moments(head_dim, alpha):
    def moment(power):
        def integrand(a):
            return a**power * float(infinite_heads.density(np.array([a]), head_dim, alpha)[0])

        return 2 * quad(integrand, 0, 60, points=[0.01, 1, 10], limit=200)[0]

    variance = head_dim ** (1 - 2 * alpha)
    assert moment(0) == pytest.approx(1, rel=1e-4)
    assert moment(2) == pytest.approx(variance, rel=1e-4)
    assert moment(4) == pytest.approx((3 + 6 / head_dim) * variance**2, rel=1e-4)


def test_tables_of_heads_that_are_wrong_are_one_line(tmp_path, monkeypatch):
    paths = heads_tables(tmp_path)
    again = pd.concat([pd.read_csv(paths[4])] * 2)
    again.to_csv(tmp_path / "again.csv", index=False)
    with pytest.raises(TableError, match="two runs with model.heads 4, seed 0, step 30; expected"):
        infinite_heads.read_all([*paths[:4], tmp_path / "again.csv"])
    with pytest.raises(TableError, match="1 table given, expected five"):
        infinite_heads.read_all(paths[:1])
    with pytest.raises(TableError, match="no column 'alpha_attention'; is it the initial_att"):
        infinite_heads.read_all([paths[0], paths[0], *paths[2:]])
    monkeypatch.setattr(infinite_heads.tables, "DATA", tmp_path)
    with pytest.raises(TableError, match="initial --ship` makes it"):
        infinite_heads.read(tmp_path / "initial_kernels.csv", "initial_kernels")
    with pytest.raises(TableError, match="vit_cifar5m.distances results/vit_cifar5m/figure_4_lap"):
        infinite_heads.read(tmp_path / f"{infinite_heads.DISTANCES}.csv", infinite_heads.DISTANCES)


# ------------------------------------------------------------------------------------------------
# Figure 5


def depth_tables(folder, statuses=("finished",) * 3, gain=0.05, level=1.0):
    observations, results, metrics = [], [], []
    for alpha in (0.5, 1.0):
        for layers in (1, 4, 16):
            for seed, status in enumerate(statuses):
                run = f"{alpha}-{layers}-{seed}"
                place = {"model.layers": layers, "prescription.alpha_depth": alpha, "seed": seed,
                         "run": run}
                for step, factor in ((0, 0.0), (20, 1 + seed / 10)):
                    for block in ("0", "all"):
                        moved = factor * layers ** (alpha - 1) if block == "all" else 99.0
                        observations.append({**place, "step": step, "block": block,
                                             "query_weight_relative": moved,
                                             "key_weight_relative": 2 * moved,
                                             "attention_change_weights": 3 * moved})
                results.append({**place, "optimizer.lr": 4 * alpha, "model.patch_size": 8,
                                "training.batch_size": 10, "status": status,
                                "parameters": 100 * layers})
                loss = level + seed / 10 - (gain * layers if alpha == 1 else 0)
                for step, eval_loss in ((0, math.nan), (10, 3.0), (20, loss)):
                    metrics.append({**place, "step": step, "eval_loss": eval_loss})
    paths = []
    for name, rows in zip("abc", (observations, results, metrics)):
        paths.append(folder / f"{name}.csv")
        pd.DataFrame(rows).to_csv(paths[-1], index=False)
    return paths


def test_movement_and_loss_over_depth_are_found(tmp_path, capsys):
    infinite_depth.main([*map(str, depth_tables(tmp_path)), "--out", str(tmp_path / "figures")])
    lines = capsys.readouterr().out.splitlines()
    moved = [line for line in lines if line.startswith("5a")]
    assert len(moved) == 12 and all(line.endswith("agrees within 95 %") for line in moved)
    powers = [float(line[62:].split()[0]) for line in moved]
    assert "alpha_L = 1/2" in moved[0]
    assert powers == pytest.approx([-0.5] * 6 + [0] * 6, abs=1e-9)
    assert moved[1].startswith("5a: the same, W_Q, L = 4 to 16 alone")
    gains = [line for line in lines if line.startswith("5b: final loss, alpha_L = 1/2 minus 1")]
    assert all(gain in line for gain, line in zip(("+0.050", "+0.200", "+0.800"), gains))
    assert "eta_0 = 2 (alpha_L = 1/2), 4 (alpha_L = 1)" in lines[0]
    assert gains[-1].endswith("agrees") and not any(map(lambda g: g.endswith("agrees"), gains[:-1]))
    growth = next(line for line in lines if line.startswith("5b: that gain at L = 16 minus at"))
    assert growth.endswith("+0.750 ± 0.000 (n = 3)")
    names = {path.name for path in (tmp_path / "figures").iterdir()}
    assert names == {"infinite_figure_5_depth.png", "infinite_figure_5_depth.pdf"}


def test_an_equal_gain_at_all_depths_is_none(tmp_path):
    _, losses = infinite_depth.read_all(depth_tables(tmp_path, gain=0))
    half = losses[infinite_depth.ALPHA] == 0.5
    apart = losses.assign(eval_loss=losses["eval_loss"] + 0.5 * half)
    gain, growth = infinite_depth._of_losses(apart)[-2:]
    assert gain.measured.startswith("+0.500") and gain.verdict == "agrees"
    assert growth.measured.lstrip("+-").startswith("0.000") and not growth.verdict
    assert infinite_depth._of_losses(losses)[-2].verdict == "within noise"


def test_there_is_no_verdict_on_curves_above_chance(tmp_path):
    _, losses = infinite_depth.read_all(depth_tables(tmp_path, level=2.4))
    gain, growth = infinite_depth._of_losses(losses)[-2:]
    assert growth.measured.startswith("+0.750") and not growth.verdict
    assert gain.verdict.startswith("no verdict: above chance")
    assert gain.verdict.endswith("alpha_L = 1/2, L = 1, 4, 16; alpha_L = 1, L = 1")


def test_depths_are_compared_on_the_seeds_that_have_both(tmp_path):
    """Losses differ by 1 between seeds: unpaired, a lost run would be a gain."""
    _, losses = infinite_depth.read_all(depth_tables(tmp_path, gain=0))
    apart = losses.assign(eval_loss=losses["eval_loss"] + losses["seed"])
    lost = (apart["seed"] == 2) & (apart["model.layers"] == 16) & (apart[infinite_depth.ALPHA] == 1)
    gain, growth = infinite_depth._of_losses(apart[~lost])[-2:]
    for found in (gain, growth):
        assert float(found.measured.split()[0]) == pytest.approx(0) and "(n = 2)" in found.measured
    assert gain.verdict == "undecided (n = 2)"


def test_compute_is_six_flops_per_parameter_and_token(tmp_path):
    _, losses = infinite_depth.read_all(depth_tables(tmp_path))
    rows = losses[(losses["model.layers"] == 4) & (losses["step"] == 20)]
    assert set(rows["flops"]) == {6 * 400 * 16 * 10 * 20}
    assert set(losses["step"]) == {10, 20}


def test_runs_that_did_not_finish_count_nowhere(tmp_path):
    paths = depth_tables(tmp_path, statuses=("finished", "diverged", "finished"))
    movement, losses = infinite_depth.read_all(paths)
    assert set(movement["seed"]) == set(losses["seed"]) == {0, 2}


def test_tables_of_depth_that_are_wrong_are_one_line(tmp_path, monkeypatch):
    paths = depth_tables(tmp_path)
    with pytest.raises(TableError, match="2 tables given, expected three: observations.csv"):
        infinite_depth.read_all(paths[:2])
    with pytest.raises(TableError, match="no column 'block'; is it the observations.csv"):
        infinite_depth.read_all(paths[::-1])
    results = pd.read_csv(paths[1])
    pd.concat([results, results.assign(run="again")]).to_csv(paths[1], index=False)
    with pytest.raises(TableError, match="two runs with model.layers 1, prescription.alpha_depth"):
        infinite_depth.read_all(paths)
    results.assign(**{"optimizer.lr": range(18)}).to_csv(paths[1], index=False)
    with pytest.raises(TableError, match="9 values of optimizer.lr with prescription.alpha_depth"):
        infinite_depth.read_all(paths)
    lost = depth_tables(tmp_path, statuses=("diverged",))
    with pytest.raises(TableError, match="no finished run in it; finish the sweep first"):
        infinite_depth.read_all(lost)
    observations, metrics = (pd.read_csv(paths[0]), pd.read_csv(paths[2]))
    depth_tables(tmp_path)
    observations.assign(run="other").to_csv(paths[0], index=False)
    with pytest.raises(TableError, match="no row with block all of a finished run"):
        infinite_depth.read_all(paths)
    depth_tables(tmp_path)
    metrics.assign(run="other").to_csv(paths[2], index=False)
    with pytest.raises(TableError, match="no evaluation of a finished run"):
        infinite_depth.read_all(paths)
    monkeypatch.setattr(infinite_depth.tables, "DATA", tmp_path / "data")
    with pytest.raises(TableError, match="figure_5_laptop/metrics.csv infinite_figure_5_metrics"):
        infinite_depth.read_all([*paths[:2], tmp_path / "data/infinite_figure_5_metrics.csv"])
