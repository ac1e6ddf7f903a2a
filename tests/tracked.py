"""Files of the repository: what a user has put beside them is no test's business."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def tracked(*patterns):
    """Paths that git tracks and that are there; without git, all that match."""
    if not (ROOT / ".git").exists():
        return sorted(path for pattern in patterns for path in ROOT.glob(pattern))
    command = ["git", "ls-files", *patterns]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in found.stdout.splitlines() if (ROOT / name).exists()]
