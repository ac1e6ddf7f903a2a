"""The examples: short, offline, they train; the coordinate check passes them, and no wrong rate."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ("huggingface_gpt2.py", "plain_torch.py")
WIDTHS = ("64", "128", "256")


def run(*words):
    """A command in the repository's root, on one thread and without a network."""
    alone = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, *map(str, words)]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, **alone}
    )


def check(path, out):
    return run("-m", "measure.coordinate_check", path, "--seeds", 2, "--widths", *WIDTHS,
               "--out", out)


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_stay_short(name):
    lines = (ROOT / "examples" / name).read_text().splitlines()
    assert len(lines) < 60 and max(map(len, lines)) <= 100


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_learn(name):
    """A byte costs 5.5 nats at first and 3.3 by its frequency; below that, context helps."""
    result = run(f"examples/{name}")
    assert result.returncode == 0, result.stderr
    losses = [float(loss) for loss in re.findall(r"step \d+: ([\d.]+) nats", result.stdout)]
    assert losses[0] == pytest.approx(5.5, abs=0.3)
    assert len(losses) == 7 and min(losses[-3:]) < 2.9


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_pass_the_coordinate_check(name, tmp_path):
    result = check(f"examples/{name}", tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.search(r"^passed: \d+ ok$", result.stdout, re.M)
    assert "never called" not in result.stdout
    assert (tmp_path / "coordinate_check.csv").exists()


@pytest.mark.parametrize("name", EXAMPLES)
def test_one_rate_for_all_tensors_does_not_pass(name, tmp_path):
    text = (ROOT / "examples" / name).read_text()
    rule = "base_width=64)"
    assert text.count(rule) == 1
    wrong = tmp_path / name
    wrong.write_text(text.replace(rule, 'base_width=64, alignment="global")'))
    result = check(wrong, tmp_path)
    assert result.returncode == 1, result.stdout + result.stderr
    assert re.search(r"^FAILED: \d+ grows", result.stdout, re.M)
