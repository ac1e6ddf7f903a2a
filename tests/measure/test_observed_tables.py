"""Tables of what the runs of a sweep have observed."""

import csv
import json
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sweeps import tables
from sweeps.sweep import SweepWork, recall
from sweeps.sweep_file import load_sweep
from tests.run_folders import lines
from training.errors import RunError

pytestmark = pytest.mark.xdist_group("observe")  # what all look at is trained once


def writer(kind):
    return lambda asked, summaries: tables.write_table(asked, kind, asked.points, summaries)


write_observations = writer(tables.OBSERVATIONS)
write_observed_kernels = writer(tables.OBSERVED_KERNELS)
write_observed_attention = writer(tables.OBSERVED_ATTENTION)


def sweep(toy, **more):
    folder = Path(toy.__file__).parent
    (folder / "base.yaml").write_text(json.dumps(toy.settings))
    keys = {"experiment": folder.name, "config": "base.yaml", "grid": {"width": [8, 16]}}
    text = json.dumps({**keys, "curves": {"a": {}}, "set": {"training.steps": 3}, **more})
    (folder / "s.yaml").write_text(text)
    return load_sweep(folder / "s.yaml", toy.folder.parent.parent)


@pytest.fixture(scope="module")
def observed(package, tmp_path_factory):
    """A sweep that asks for observations, and the summaries of its two runs."""
    toy = package(tmp_path_factory.mktemp("sweep"))
    asked = sweep(toy, observations=True)
    return asked, {p.run: toy.run(p.config, asked.folder / p.run) for p in asked.points}


def table(path):
    """The rows of a table; what a run is and where it stands in the grid comes first."""
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    place = ["curve", "training.steps", "width", "horizon", "constants", "seed", "run", "step"]
    assert list(rows[0])[: len(place)] == place
    return rows


@contextmanager
def changed(path):
    """A file that is as before afterwards."""
    content = path.read_bytes()
    try:
        yield
    finally:
        path.write_bytes(content)


def test_only_finished_runs_are_in_the_tables(observed):
    """The last step that any other has observed is not after training."""
    asked, summaries = observed
    first, second = (point.run for point in asked.points)
    for write in (write_observations, write_observed_kernels, write_observed_attention):
        assert {row["run"] for row in table(write(asked, summaries))} == {first, second}
        for status in ("diverged", "stopped", "failed"):
            some = {**summaries, first: {**summaries[first], "status": status}}
            assert {row["run"] for row in table(write(asked, some))} == {second}


def test_a_sweeps_table_has_a_row_per_block_and_one_for_all(toy, observed):
    asked, summaries = observed
    rows = table(write_observations(asked, summaries))
    assert len(rows) == 2 * 3 * 3  # runs, steps, two blocks and all
    row = next(r for r in rows if (r["width"], r["step"], r["block"]) == ("16", "3", "1"))
    line = lines(asked.folder / row["run"], "observations.jsonl")[-1]
    assert float(row["key_change_weights"]) == line["blocks"][1]["key_change_weights"]
    assert row["function_change"] == "" and (row["curve"], row["seed"]) == ("a", "0")
    row = next(r for r in rows if (r["run"], r["step"], r["block"]) == (row["run"], "3", "all"))
    assert float(row["function_change"]) == line["all"]["function_change"]
    failed = {run: {"status": "failed"} for run in summaries}
    for write in (write_observations, write_observed_kernels, write_observed_attention):
        assert write(sweep(toy), summaries) is None and write(asked, failed) is None


def test_kernels_of_the_first_and_the_last_step_are_in_a_table(observed):
    asked, summaries = observed
    rows = table(write_observed_kernels(asked, summaries))
    assert len(rows) == 2 * 2 * (6 + 6 + 21)  # runs, steps, halves of two 3 x 3 and one 6 x 6
    assert [r["width"] for r in rows] == sorted((r["width"] for r in rows), key=int)
    for point in asked.points:
        for step in (0, 3):  # and not the one between
            arrays = load_file(asked.folder / point.run / f"observations/step_{step}.safetensors")
            for kind in ("pooled", "spatial", "last_token"):
                own = {
                    (int(r["row"]), int(r["column"])): float(r["value"])
                    for r in rows
                    if (r["run"], r["step"], r["kind"]) == (point.run, str(step), kind)
                }
                kernel = arrays[f"{kind}_kernel"]
                for (row, column), value in own.items():
                    assert value == pytest.approx(kernel[row, column].item(), rel=1e-5)
                side = len(kernel)
                assert set(own) == {(i, j) for i in range(side) for j in range(i, side)}


def test_attention_logits_over_heads_are_in_a_table(observed):
    asked, summaries = observed
    rows = table(write_observed_attention(asked, summaries))
    assert len(rows) == 2 * 2 * 2 * 4 * 4  # runs, steps, blocks, places, heads
    for point in asked.points:
        arrays = load_file(asked.folder / point.run / "observations/step_3.safetensors")
        own = [r for r in rows if (r["run"], r["step"], r["block"]) == (point.run, "3", "1")]
        places = arrays["attention_places"].tolist()
        assert {(int(r["token"]), int(r["attended"])) for r in own} == set(map(tuple, places))
        for row in own:
            place = places.index([int(row["token"]), int(row["attended"])])
            value = arrays["attention_entries"][1, place, int(row["head"])].item()
            assert float(row["value"]) == pytest.approx(value, rel=1e-5)


def test_large_kernels_are_thinned_and_unknown_arrays_left_out(observed):
    asked, summaries = observed
    path = asked.folder / asked.points[0].run / "observations/step_3.safetensors"
    kernel = torch.arange(130.0 * 130).view(130, 130)
    kernel[2, 4] = torch.nan
    with changed(path):
        save_file({"spatial_kernel": kernel, "outputs": torch.ones(2, 3)}, path)
        rows = table(write_observed_kernels(asked, summaries))
        own = [r for r in rows if (r["run"], r["step"]) == (asked.points[0].run, "3")]
        assert {r["kind"] for r in own} == {"spatial"} and len(own) == 44 * 45 / 2
        assert {int(r["column"]) for r in own} == set(range(0, 130, 3))
        assert all(float(r["value"]) == 130 * int(r["row"]) + int(r["column"]) for r in own)
        rows = table(write_observed_attention(asked, summaries))
        assert (asked.points[0].run, "3") not in {(r["run"], r["step"]) for r in rows}
        kernel[0, 3] = torch.inf
        save_file({"spatial_kernel": kernel}, path)
        rows = table(write_observed_kernels(asked, summaries))
        assert [(r["row"], r["column"]) for r in rows if r["value"] == ""] == [("0", "3")]


def test_arrays_that_cannot_be_read_are_named_and_leave_no_table(observed):
    asked, summaries = observed
    path = asked.folder / asked.points[0].run / "observations/step_3.safetensors"
    for kept in asked.folder.glob("observed_*.csv"):
        kept.unlink()
    with changed(path):
        for damage in (lambda: path.write_bytes(path.read_bytes()[:-8]), path.unlink):
            damage()
            for write in (write_observed_kernels, write_observed_attention):
                with pytest.raises(RunError, match="cannot read the arrays of step 3") as error:
                    write(asked, summaries)
                assert str(path) in str(error.value) and "to run again" in str(error.value)
    assert not list(asked.folder.glob("observed_*.csv"))


def test_a_sweep_writes_every_table_it_is_asked_for(observed):
    asked, _ = observed
    SweepWork(asked, partial(recall, asked.folder)).write(final=True)  # all its runs are done
    written = {path.name for path in asked.folder.glob("*.csv")}
    assert {"observations.csv", "observed_kernels.csv", "observed_attention.csv"} <= written
