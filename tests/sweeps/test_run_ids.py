"""A run's name is a hash of its config: shipped tables and resumed sweeps rely on it not changing.

`run_ids.json` holds, for every shipped sweep file and preset, the number of runs of its grid and a
hash of their names, and for every shipped config its name. A change here makes finished runs of
users unfindable; it must be on purpose and said in the closing note and the changelog.
"""

import hashlib
import importlib
import json
from pathlib import Path

import pytest

from sweeps.sweep_file import load_sweep
from tests.tracked import tracked
from training import runs
from training.config import load, read_yaml

ROOT = Path(__file__).resolve().parents[2]
RECORDED = json.loads(Path(__file__).with_name("run_ids.json").read_text())


def test_every_shipped_file_is_recorded():
    expected = set()
    for path in tracked("*/sweeps/*.yaml"):
        data = read_yaml(path)
        if "search" not in data:
            name = str(path.relative_to(ROOT))
            expected |= {name, *(f"{name} --preset {preset}" for preset in data.get("presets", ()))}
    configs = (path.relative_to(ROOT) for path in tracked("*/configs/*.yaml"))
    expected |= {str(path) for path in configs if path.parts[0] != "effective_theory"}
    assert expected == RECORDED.keys()


@pytest.mark.parametrize("command", [key for key in RECORDED if "/sweeps/" in key])
def test_names_of_a_sweeps_runs_stay(command, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    file, _, preset = command.partition(" --preset ")
    sweep = load_sweep(Path(file), tmp_path, preset or None, draft=True)
    names = sorted(point.run for point in sweep.points)
    digest = hashlib.blake2b("\n".join(names).encode(), digest_size=8).hexdigest()
    assert [len(names), digest] == RECORDED[command]


@pytest.mark.parametrize("file", [key for key in RECORDED if "/configs/" in key])
def test_names_of_single_runs_stay(file):
    kind = importlib.import_module(f"{file.split('/')[0]}.config").Config
    assert runs.run_id(load(kind, ROOT / file)) == RECORDED[file]
