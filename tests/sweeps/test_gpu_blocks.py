"""The blocks of runs that wait for a GPU: each starts from the shipped tables, and stays small."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from sweeps.__main__ import main

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "nanolm_c4/README.md").read_text(encoding="utf-8")
LINES = re.search(r"<!-- gpu -->\n```bash\n(.*?)```", TEXT, re.DOTALL)[1].splitlines()
BLOCKS = [shlex.split(line, comments=True)[3:] for line in LINES if line.startswith("python")]
SEARCHED = "constants_embedding_1_desktop_800", "constants_desktop_800"  # by blocks before


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """A results folder with what the first lines put into it."""
    root = tmp_path_factory.mktemp("gpu")
    (root / "plots").symlink_to(ROOT / "plots")
    inputs = [line for line in LINES if not line.startswith("python")]
    subprocess.run(["bash", "-euc", "\n".join(inputs)], cwd=root, check=True)
    return root / "results"


@pytest.mark.parametrize("block", BLOCKS, ids=" ".join)
def test_a_block_starts_from_shipped_tables(block, results, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    main([*block, "--dry-run", "--verbose", "--results", str(results)])
    text = capsys.readouterr().out
    runs = int(re.search(r": (\d+) of \d+ runs to do", text)[1])
    assert 0 < runs <= 420, text
    missing = re.findall(r"(\S+) (?:does not exist|has no runs yet)", text)
    assert all(Path(path).parent.name in SEARCHED for path in missing), missing


def test_blocks_are_named_in_the_order_in_which_they_decide():
    order = [re.search(r"# (\d)", line)[1] for line in LINES if re.search(r"# \d", line)]
    assert order == ["1", "2", "3", "4", "5"]
