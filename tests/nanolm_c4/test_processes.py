"""Several processes: the same run as one, up to rounding, and never two runs in one folder."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OVERRIDES = [
    "model.width=16", "model.layers=1", "training.steps=8", "schedule.warmup_steps=2",
    "training.batch_size=8", "training.log_every=2", "training.eval_samples=33",
]


def launch(processes, folder, *overrides, cache):
    torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={processes}",
                "--standalone", "-m"]
    python = [sys.executable, "-m"]
    return subprocess.run(
        [*(torchrun if processes > 1 else python), "nanolm_c4.train",
         "nanolm_c4/configs/laptop.yaml", *OVERRIDES, f"data.cache_dir={cache}", *overrides,
         "--run-dir", str(folder)],
        capture_output=True, text=True, cwd=ROOT, timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_two_processes_train_the_run_that_one_does(tmp_path, cache):
    for processes, folder in ((1, "one"), (2, "two")):
        result = launch(processes, tmp_path / folder, "training.micro_batch_size=3", cache=cache)
        assert result.returncode == 0, result.stderr
        assert result.stderr.count("step 8/8") == 1  # one process speaks
    one, two = lines(tmp_path / "one"), lines(tmp_path / "two")
    assert [line["step"] for line in one] == [line["step"] for line in two]
    for first, second in zip(one, two):
        assert second == pytest.approx(first, rel=1e-5)
    summaries = [tmp_path / name / "summary.json" for name in ("one", "two")]
    targets = [json.loads(path.read_text())["targets"] for path in summaries]
    assert targets[0] == targets[1]


def test_a_batch_that_does_not_divide_is_refused(tmp_path, cache):
    result = launch(2, tmp_path / "run", "training.batch_size=7", cache=cache)
    assert result.returncode != 0
    assert "training.batch_size 7 does not divide by 2 processes" in result.stderr
