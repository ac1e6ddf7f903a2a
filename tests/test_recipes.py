"""A recipe of a README, followed to the letter in a copy of the repository, passes its tests."""

import os
import shutil
import subprocess
import sys

import pytest

from tests.tracked import ROOT, tracked

pytestmark = pytest.mark.thorough
# Where, the line after which, and what: the five points of "A new optimiser" in training/README.md.
AMSGRAD = (
    (
        "training/optim/optimizers.py",
        "OPTIMIZERS = {",
        '    "amsgrad": Kind(lambda groups, fused, **numbers: torch.optim.AdamW('
        'groups, amsgrad=True, **numbers), ("betas",)),',
    ),
    ("param_groups/families.py", "OPTIMIZER_FAMILY = {", '    "amsgrad": "adam",'),
    ("tests/training/test_optimizers.py", "CASES = [", '    ("amsgrad", None),'),
    (
        "tests/training/test_optimizers.py",
        "def ref_sgd",
        """def ref_amsgrad(theta, g, state, t, eps):
    m, v = moments(g, state, t)
    state["most"] = np.maximum(state.get("most", 0), state["v"])
    return m / (np.sqrt(state["most"] / (1 - BETAS[1] ** t)) + eps)


""",
    ),
    ("tests/training/test_optimizers.py", "REFERENCES = {", '    "amsgrad": ref_amsgrad,'),
)


def test_a_new_optimiser_by_the_readmes_five_points(tmp_path):
    for path in tracked("*"):
        if path.suffix not in (".png", ".csv", ".jsonl") and path.is_file():
            copy = tmp_path / path.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, copy)
    for name, anchor, text in AMSGRAD:
        file = tmp_path / name
        lines = file.read_text(encoding="utf-8").split("\n")
        (at,) = (i for i, line in enumerate(lines) if line.startswith(anchor))
        lines.insert(at if anchor.startswith("def") else at + 1, text)
        file.write_text("\n".join(lines), encoding="utf-8")
    names = "tests/training/test_optimizers.py", "tests/test_imports.py"
    tests = ended("-m", "pytest", "-n", "0", "-m", "not thorough", *names, cwd=tmp_path)
    assert tests.returncode == 0, tests.stdout
    made = ended("-m", "nanolm_c4.train", *SET, cwd=tmp_path)
    assert "optimizer amsgrad" in made.stdout, made.stderr


SET = "nanolm_c4/configs/laptop.yaml --plan optimizer.name=amsgrad model.width=32".split()


def ended(*words, cwd):
    """Not tests.processes, whose server has imported the files that were copied."""
    outside = {key: value for key, value in os.environ.items() if "BUDGETS" not in key}
    options = {"cwd": cwd, "env": outside, "capture_output": True, "text": True, "check": False}
    return subprocess.run([sys.executable, *words], **options)
