"""The README holds: formulas stand where it says, commands parse, the example runs."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
FORMULAS = re.findall(r"\[([\w/]+\.py):(\d+)\]\(\1#L\2\) `([^`]+)`", README)
COMMANDS = sorted({
    command.split("  #")[0].strip()
    for command in re.findall(r"^((?:python -m|bash|accelerate launch) .*)$", README, re.M)
    + re.findall(r"`((?:python -m|bash|accelerate launch) [^`]+)`", README)
})


@pytest.mark.parametrize(("path", "line", "code"), FORMULAS)
def test_every_formula_stands_on_the_line_the_readme_names(path, line, code):
    assert code in (ROOT / path).read_text().splitlines()[int(line) - 1]


def test_formulas_and_commands_were_found():
    assert len(FORMULAS) >= 8 and len(COMMANDS) >= 10
    assert README.count("#L") == len(FORMULAS)


def parses(words):
    """Runs a command of ours only as far as its arguments and its config."""
    if words[0] == "accelerate":
        words = ["python", *words[words.index("-m"):]]
    if words[0] == "bash":
        assert (ROOT / words[1]).is_file()
        subprocess.run(["bash", "-n", words[1]], check=True, cwd=ROOT)
        return
    module, arguments = words[2], words[3:]
    if module in ("nanolm_c4.train", "nanolm_c4.data") and "--help" not in arguments:
        from nanolm_c4.config import Config
        from nanolm_c4.train import EXPERIMENT
        from training.config import load

        args = EXPERIMENT._parser().parse_intermixed_args(arguments)
        load(Config, ROOT / args.config, args.overrides)
        return
    if module == "measure.coordinate_check":  # tests/training runs it
        from measure import coordinate_check
        from nanolm_c4.config import Config
        from training.config import load

        args = coordinate_check._parser().parse_intermixed_args(arguments)
        assert (ROOT / args.target).exists()
        if args.rest:
            load(Config, ROOT / args.rest[0], args.rest[1:])
        return
    if module == "effective_theory.run":  # minutes
        from effective_theory import run

        assert run._job(run._parser().parse_intermixed_args(arguments)).kernels
        return
    if module == "vit_cifar5m.initial":  # a GPU's work at the paper's sizes
        from vit_cifar5m import initial

        args = initial._parser().parse_intermixed_args(arguments)
        assert initial.read_settings(args.preset, args.overrides)
        return
    if module == "measure.observe":  # of a run of the reader's
        from measure import observe

        assert observe._parser().parse_args(arguments).run
        return
    if module == "sweeps" and arguments[0] == "submit":  # there is no SLURM here
        from sweeps import on_slurm

        arguments = ["run", *on_slurm.read(arguments[1:])[2]]
    if module == "sweeps" and arguments[0] in ("run", "search") and "--dry-run" not in arguments:
        arguments = [*arguments, "--dry-run"]
    result = subprocess.run([sys.executable, "-m", module, *arguments], cwd=ROOT,
                            capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_documented_commands_parse(command):
    parses(shlex.split(command))


def test_the_example_for_ones_own_model_runs():
    code = re.search(r"```python\n(.*?)```", README, re.S)[1]
    assert len(code.strip().splitlines()) <= 11
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "blocks.*.attn.qkv.weight (12 tensors)" in result.stdout


def test_linked_files_exist():
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", README):
        assert (ROOT / target).exists(), target


def test_no_place_is_left_to_be_filled_in():
    for path in [ROOT / "README.md", *ROOT.glob("*/README.md")]:
        assert not re.findall(r"@[A-Z0-9]+@", path.read_text()), path
