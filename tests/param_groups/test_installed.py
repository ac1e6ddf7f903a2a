"""The package as users install it: a wheel in a fresh environment, away from the repository."""

import json
import os
import shutil
import site
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

USE = """
import sys, param_groups
assert "torch" not in sys.modules, "importing the package imports torch"
import torch
from param_groups import Everett, Role, Rule, plan
assert "site-packages" in param_groups.__file__, param_groups.__file__
model = torch.nn.Sequential(torch.nn.Linear(8, 16, bias=False), torch.nn.Linear(16, 3, bias=False))
rules = [Rule("0.weight", Role.PATCH_EMBEDDING), Rule("1.weight", Role.READOUT)]
numbers = plan(model, rules, Everett("mup", 16, 8), lr=0.1, absorb_multipliers=True)
numbers.initialise(model, seed=0)
print(len(torch.optim.AdamW(numbers.groups(model)).param_groups))
"""


def run(*command, cwd, code=0, **settings):
    words = {"cwd": cwd, "env": {**os.environ, "OMP_NUM_THREADS": "1", **settings}}
    done = subprocess.run(command, capture_output=True, text=True, check=False, **words)
    assert done.returncode == code, (done.stdout, done.stderr)
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """(wheel, folder of the new environment's programs); torch is this environment's."""
    pytest.importorskip("flit_core")
    folder = tmp_path_factory.mktemp("installed")
    source = folder / "source"
    source.mkdir()
    shutil.copytree(ROOT / "param_groups", source / "param_groups")
    for name in ("pyproject.toml", "LICENSE"):
        shutil.copy(ROOT / name, source)
    before = sorted(source.rglob("*"))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    run(
        *pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(folder), ".", cwd=source
    )
    assert sorted(source.rglob("*")) == before  # a build leaves nothing in the tree
    (wheel,) = folder.glob("*.whl")
    venv.create(folder / "venv", symlinks=True)
    (packages,) = folder.glob("venv/lib/python*/site-packages")
    python = folder / "venv" / "bin" / "python"
    run(*pip, "--python", python, "install", "-q", "--no-deps", "--no-index", wheel, cwd=folder)
    (packages / "torch_of_the_tests.pth").write_text("\n".join(site.getsitepackages()))
    return wheel, folder / "venv" / "bin"


def test_the_wheel_holds_the_package_alone_and_is_typed(installed):
    names = zipfile.ZipFile(installed[0]).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"param_groups"}
    assert "param_groups/py.typed" in names and any(name.endswith("LICENSE") for name in names)
    assert installed[0].stat().st_size < 140_000


def test_a_plan_is_made_outside_the_repository(installed, tmp_path):
    assert run(installed[1] / "python", "-c", USE, cwd=tmp_path) == "2\n"


def test_the_command_of_the_wheel_needs_no_torch(installed, tmp_path):
    (packages,) = installed[1].parent.glob("lib/python*/site-packages")
    elsewhere = packages / "torch_of_the_tests.pth"
    hidden = elsewhere.rename(tmp_path / "hidden")
    try:
        text = run(installed[1] / "param-groups", "exponents", "--json", cwd=tmp_path)
    finally:
        hidden.rename(elsewhere)
    assert json.loads(text)["mup"]["hidden"]["lr"]["adam"]["full"] == "-1"


@pytest.mark.slow
@pytest.mark.parametrize("model", ["nanogpt", "llama", "vit"])
def test_models_that_people_have_are_planned_and_trained(model, installed, tmp_path):
    file = shutil.copy(Path(__file__).with_name("models_of_users.py"), tmp_path)
    assert run(installed[1] / "python", file, cwd=tmp_path, MODEL=model) == "learned\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "one_rate", "code", "word"),
    [
        *((model, "", 0, "passed:") for model in ("nanogpt", "llama", "vit")),
        ("nanogpt", "1", 1, "FAILED:"),  # of stock models test_stock_check has the same
    ],
)
def test_the_checks_verdict_is_its_exit_code(model, one_rate, code, word, installed, tmp_path):
    """muP passes, one rate for all tensors does not."""
    file = shutil.copy(Path(__file__).with_name("models_of_users.py"), tmp_path)
    sizes = ["--widths", "64", "128", "256", "--steps", "1", "--seeds", "3"]
    check = [installed[1] / "param-groups", "check", file, *sizes]
    assert word in run(*check, cwd=tmp_path, code=code, MODEL=model, ONE_RATE=one_rate)
