"""Data-loading processes end with the run, however it ends."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import all_end, finished

ROOT = Path(__file__).resolve().parents[2]

SCRIPT = """
import os, sys
from pathlib import Path
from torch.utils.data import DataLoader, Dataset
from training import loading, signals
from training.errors import UserError, one_line_errors

class Rows(Dataset):
    def __len__(self):
        return 100
    def __getitem__(self, index):
        Path(sys.argv[2], str(os.getpid())).touch()
        if sys.argv[1] in ("bad", "leave") and index == 7:
            raise UserError("row 7: cannot be read; mend it")
        if sys.argv[1] == "long" and index == 7:
            raise UserError("row 7: cannot be read\\nin two lines: so")
        return index

loader = DataLoader(Rows(), batch_size=5, num_workers=2, worker_init_fn=signals.follow_parent)
keep = []
with one_line_errors():
    if sys.argv[1] == "leave":  # this iterator lives as long as the process
        batches = loading.batches(loader)
        next(batches)
        keep.append(batches.gi_frame.f_locals["iterator"])
        batches.close()
    for batch in loading.batches(loader):
        if sys.argv[1] == "crash":
            raise RuntimeError("a mistake of ours")
        if sys.argv[1] == "leave":
            keep.append(batch)
            sys.exit(3)
"""


@pytest.mark.parametrize(
    ("how", "code", "error"),
    [
        ("whole", 0, ""),
        ("bad", 2, "error: row 7: cannot be read; mend it\n"),
        ("long", 2, "error: row 7: cannot be read in two lines: so\n"),
        ("crash", 1, "RuntimeError: a mistake of ours\n"),
        ("leave", 3, ""),
    ],
)
def test_no_process_outlives_the_run_or_keeps_it(tmp_path, how, code, error):
    script, notes = tmp_path / "script.py", tmp_path / "notes"
    script.write_text(SCRIPT)
    notes.mkdir()
    if how == "leave":  # Python itself takes down what is left
        result = subprocess.run(
            [sys.executable, script, how, notes],
            cwd=ROOT,
            env={"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=600,
        )
        told = result.stderr
    else:
        result = finished(script, how, notes, cwd=ROOT)
        told = result.err
    assert result.returncode == code, told
    assert told.endswith(error) and (how == "crash" or told == error)
    workers = [int(path.name) for path in notes.iterdir()]
    assert workers
    assert all_end(workers)
