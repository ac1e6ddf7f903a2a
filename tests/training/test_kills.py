"""A short series of kills; benchmarks/results/cpu_kills.json holds the long one."""

import json
from pathlib import Path

import pytest

from benchmarks.kills import PHASES
from tests.processes import finished


@pytest.mark.parametrize("family", ["vit_imagenet", "bart_span_denoise"])
def test_a_run_that_is_killed_in_every_phase_ends_as_if_nothing_had_been(family):
    done = finished(
        "-m",
        "benchmarks.kills",
        "--families",
        family,
        "--kills",
        "3",
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.err
    [row] = json.loads(done.out)["rows"]
    assert row["runs_that_differ"] == [] and row["files_compared"] >= 3
    assert sum(row[phase] for phase in PHASES) == row["kills"] >= 3
