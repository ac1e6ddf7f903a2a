"""The package as users install it: a wheel in a fresh environment, away from the repository."""

import json
import os
import re
import shutil
import site
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.xdist_group("installed")  # one wheel, one environment, one program

# Imports take longer than the models: one process trains and checks them all, as a shell would. The
# last check ends the process with its exit code.
PROGRAM = """
import runpy, sys
import param_groups
assert "site-packages" in param_groups.__file__, param_groups.__file__
file, command = sys.argv[1:]
small = ["--widths", "64", "128", "256", "--steps", "1", "--seeds", "3"]
def call(path, *arguments):
    sys.argv = [path, *arguments]
    runpy.run_path(path, run_name="__main__")
call(file)
for what in ([file], ["hf:llama"], ["timm:vit_tiny_patch16_224", "--rule", "mup", "one_rate"]):
    try:
        call(command, "check", *what, *small)
    except SystemExit as ended:
        assert not ended.code or "one_rate" in what, ended.code
raise SystemExit(ended.code)
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
    words = ("-q", "--no-deps", "--no-build-isolation", "-w", str(folder), ".")
    run(*pip, "wheel", *words, cwd=source)
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
    assert installed[0].stat().st_size < 250_000


def test_the_command_of_the_wheel_needs_no_torch(installed, tmp_path):
    (packages,) = installed[1].parent.glob("lib/python*/site-packages")
    elsewhere = packages / "torch_of_the_tests.pth"
    hidden = elsewhere.rename(tmp_path / "hidden")
    try:
        text = run(installed[1] / "param-groups", "exponents", "--json", cwd=tmp_path)
        run(installed[1] / "python", "-c", "from param_groups import Everett, Rule", cwd=tmp_path)
    finally:
        hidden.rename(elsewhere)
    assert json.loads(text)["mup"]["hidden"]["lr"]["adam"]["full"] == "-1"


@pytest.mark.thorough
def test_models_that_people_have_train_and_pass_the_check_and_one_rate_does_not(
    installed, tmp_path
):
    file = shutil.copy(ROOT / "examples/nanogpt.py", tmp_path)
    words = ("-c", PROGRAM, file, installed[1] / "param-groups")
    text = run(installed[1] / "python", *words, cwd=tmp_path, code=1)  # that of the last check
    losses = [float(loss) for loss in re.findall(r"^step \d+: (\S+) nats", text, re.M)]
    assert losses[-1] < losses[0] - 1
    found = re.findall(r"^(passed:|FAILED: \d+ grows|figure:)", text, re.M)
    assert found[:-2] == ["passed:", "figure:"] * 4
    assert found[-2].startswith("FAILED: ") and found[-1] == "figure:"
