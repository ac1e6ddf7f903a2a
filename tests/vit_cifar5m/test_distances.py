"""Distances of logits to the limit of many heads (Bordelon et al., Figure 4b)."""

import csv
import json

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import save_file

from tests.run_folders import end_run
from vit_cifar5m import distances


def sweep_folder(folder, logits, status=None, data=None, grid="model.heads"):
    """A sweep's folder with runs of (heads, seed) -> {step: logits}."""
    entries = []
    for (heads, seed), steps in logits.items():
        name = f"heads-{heads}-{seed}"
        arrays = folder / name / "observations"
        arrays.mkdir(parents=True)
        for step, values in steps.items():
            save_file(
                {"outputs": values} if values is not None else {"x": torch.ones(1)},
                arrays / f"step_{step}.safetensors",
            )
        summary = {"status": (status or {}).get((heads, seed), "finished")}
        section = {"source": "embedded", **(data or {}).get((heads, seed), {})}
        (folder / name / "config.yaml").write_text(json.dumps({"data": section}))
        end_run(folder / name, summary)
        entries.append({"run": name, "curve": "heads", "values": {grid: heads}, "seed": seed})
    (folder / "manifest.json").write_text(json.dumps(entries))
    return folder


def ones(value):
    return torch.full((2, 3), float(value))


def table_of(folder):
    distances.main([str(folder)])
    with open(folder / "distances.csv", newline="") as file:
        return {
            (int(r["model.heads"]), int(r["seed"]), int(r["step"])): r for r in csv.DictReader(file)
        }


def test_distances_to_the_ensemble_are_unbiased(tmp_path, capsys):
    """Widest at -1, 0, 1; each run is compared with the two of other seeds: of seed 0 with 0 and 1,
    mean 1/2, variance 1/2, scatter of the mean 1/4."""
    runs = {(8, seed): {0: ones(seed - 1), 5: ones(7)} for seed in range(3)}
    runs[4, 0] = {0: ones(2), 5: ones(7)}
    rows = table_of(sweep_folder(tmp_path, runs))
    assert capsys.readouterr().out.strip() == str(tmp_path / "distances.csv")
    found = {key[:2]: float(row["square_distance"]) for key, row in rows.items() if not key[2]}
    assert found == pytest.approx(
        {(4, 0): 2.25 - 0.25, (8, 0): 2.25 - 0.25, (8, 1): -1, (8, 2): 2.25 - 0.25}
    )
    assert all(float(row["square_distance"]) == 0 for key, row in rows.items() if key[2] == 5)
    assert [rows[key]["references"] for key in [(4, 0, 0), (8, 0, 0)]] == ["2", "2"]
    assert [rows[key]["member"] for key in [(4, 0, 0), (8, 0, 0)]] == ["False", "True"]
    assert {row["widest"] for row in rows.values()} == {"8"}


def test_distances_of_scattered_functions_fall_with_heads(tmp_path):
    generator = torch.Generator().manual_seed(0)
    runs = {
        (heads, seed): {0: 3 + torch.randn(40, 10, generator=generator) / heads**0.5}
        for heads in (4, 16, 64)
        for seed in range(6)
    }
    table_of(sweep_folder(tmp_path, runs))
    rows = pd.read_csv(tmp_path / "distances.csv")
    means = rows.groupby("model.heads")["square_distance"].mean()
    power = np.polyfit(np.log(means.index), np.log(means), 1)[0]
    assert power == pytest.approx(-1, abs=0.1)


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
    sweeps = {
        alpha: {at: {step: logits + 10 * step} for at, logits in runs.items()}
        for alpha, step in ((1, 0), (0.5, 1))
    }
    distances.main([str(crossed(tmp_path, ALPHA, sweeps))])
    table = pd.read_csv(tmp_path / "distances.csv")
    assert list(table[ALPHA]) == [1.0] * 6 + [0.5] * 6 and set(table["references"]) == {2}
    # Against seeds 1 and 2, for example: mean 1/2 + 1/4, scatter of the mean 1/4.
    one = [
        (s - 1 - m + 0.75 * (h == 4)) ** 2 - v
        for h in (4, 16)
        for s, m, v in ((0, 0.5, 0.25), (1, 0, 1), (2, -0.5, 0.25))
    ]
    for _, rows in table.groupby(ALPHA):
        assert list(rows["square_distance"]) == pytest.approx(one)
    # What plots/bordelon/heads.py reads.
    assert {"model.heads", "seed", "step", "square_distance"} <= {*table} and len(table) == 12


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
OTHER = "heads-8-1: its observed steps, samples or data section are not those of heads-8-0"


@pytest.mark.parametrize(
    ("logits", "options", "line"),
    [
        (PAIR, {}, "2 seeds of the widest models (model.heads 8); expected at least three"),
        (PAIR, {"status": {(8, 1): "stopped"}}, "heads-8-1: not finished; run the sweep to its"),
        (PAIR, {"status": dict.fromkeys(PAIR, "diverged")}, "no finished run in it"),
        (PAIR, {"grid": "model.layers"}, "its grid has no model.heads; expected a sweep over head"),
        (PAIR, {"data": {(8, 1): {"path": "x"}}}, OTHER),
        ({**PAIR, (8, 1): {3: ones(1)}}, {}, OTHER),
        ({**PAIR, (8, 1): {0: torch.ones(4, 3)}}, {}, OTHER),
        ({**PAIR, (8, 1): {}}, {}, "heads-8-1: nothing was observed; set training.observe_every"),
        ({**PAIR, (8, 1): {0: None}}, {}, "step_0.safetensors: cannot read its outputs ('outputs'"),
    ],
)
def test_runs_that_cannot_be_compared_are_one_line(logits, options, line, tmp_path, capsys):
    folder = sweep_folder(tmp_path, logits, **options)
    with pytest.raises(SystemExit) as end:
        distances.main([str(folder)])
    error = capsys.readouterr().err.strip().splitlines()
    assert end.value.code == 2 and len(error) == 1 and line in error[0]
    assert not (folder / "distances.csv").exists()
