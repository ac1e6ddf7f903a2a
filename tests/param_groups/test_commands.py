"""`python -m param_groups`: what it prints, and that a mistake is one line and exit code 2."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import param_groups
from param_groups.__main__ import everett_table, main
from tests.param_groups.table_1 import PAPER

ROOT = Path(__file__).parents[2]
SOLVE = "solve --parameterization {} --optimizer {} --alpha {} --omega {} --u {}"
COMMANDS = {*"exponents constraints solve trace check audit".split()}


def output(command, capsys):
    """What a command prints to standard output; nothing may go to standard error."""
    main(command.split())
    printed = capsys.readouterr()
    assert printed.err == ""
    return printed.out


def parsed(command, capsys):
    """What a command prints as JSON, refusing NaN and infinity, which are none."""
    return json.loads(output(command + " --json", capsys), parse_constant=pytest.fail)


def test_help_names_every_command_and_the_version_is_the_packages(capsys):
    for words, expected in (("--help", COMMANDS), ("--version", {param_groups.__version__})):
        with pytest.raises(SystemExit) as ended:
            main([words])
        printed = capsys.readouterr().out
        assert ended.value.code == 0 and expected <= {*re.split(r"[\s,]+", printed)}


def test_exponents_are_the_table_as_json(capsys):
    """Which is the paper's, tests/param_groups/test_exponents.py; every number is a text."""
    assert parsed("exponents", capsys) == everett_table()
    assert parsed("exponents", capsys)["mup"]["embedding"]["lr"]["adam"]["full"] == "-1/2"


@pytest.mark.parametrize("member", ["adamw", "adam_atan2", "adam_param_scaling"])
def test_solve_takes_every_optimiser_that_its_message_offers(member, capsys):
    family = "adafactor" if member == "adam_param_scaling" else "adam"
    command = lambda name: SOLVE.format("mup", name, "1", "1/2", "1")
    assert parsed(command(member), capsys) == parsed(command(family), capsys)


def test_solve_has_the_documented_shape(capsys):
    solution = parsed(SOLVE.format("mup", "adam", "1", "1/2", "1"), capsys)
    assert solution == {
        "lr": {"embedding": "-1/2", "hidden": "-1", "readout": "-1/2"},
        "residual": {"embedding": "0", "hidden": ["0"], "readout": "0"},
        **dict.fromkeys(("stable", "nontrivial", "feature_learning"), True),
    }


@pytest.mark.parametrize(
    ("case", "extra", "rates"),
    [
        (("standard", "adam", "1/2", "0.5", "1/2"), "", ("0", "-1/2", "-1/2")),
        (("mean_field", "sgd", "0.5", "0.5", "0.5"), "", ("1", "3/2", "1")),
        (("standard", "adam", "1", "1/2", "1"), " --omega-readout 1", ("-1/2", "-3/2", "-1")),
        (("mup", "adam", "1", "1/2", "1"), " --omega-readout 1", ("-1/2", "-1", "-1/2")),
        (("mup", "adam", "1", "1", "1"), "", ("-1", "-1", "-1/2")),
        (("mup", "adam", "1", "1", "1"), " --hidden-layers 8", ("-9/2", "-9/2", "-1/2")),
    ],
)
def test_solve_takes_fractions_and_decimals(case, extra, rates, capsys):
    solution = parsed(SOLVE.format(*case) + extra, capsys)
    assert tuple(solution["lr"].values()) == rates


@pytest.mark.parametrize(("extra", "features"), [("", True), (" --omega-readout 1", False)])
def test_solve_as_text_names_layers_and_properties(extra, features, capsys):
    """With its readout aligned, NTK moves its logits only while its features stand still."""
    text = output(SOLVE.format("ntk", "sgd", "1", "1/2", "1") + extra, capsys)
    power, left = ("1/2", "0") if features else ("0", "1/2")
    table = [line.split() for line in text.splitlines()[1:4]]
    assert table == [["embedding", power, left], ["hidden", power, left], ["readout", "0", "0"]]
    said = ["stable: True", "nontrivial: True", f"feature learning: {features}"]
    assert text.splitlines()[4:7] == said
    for symbol in ("alpha for", "omega for", "u for", "n^-residual"):
        assert symbol in " ".join(text.split())  # what the symbols mean


LAYERS = "layer learning rate n^ residual"
TABLES = {  # command: its rows, or some of them
    "exponents": "parameterization layer init variance multiplier gradient "
    f"sgd full adam full adafactor full sgd none adam none adafactor none{PAPER}",
    "constraints": "constraint sgd adam adafactor",
    SOLVE.format("mup", "adam", "1", "1/2", "1"): LAYERS,
    SOLVE.format("mup", "adam", "1", "1", "1") + " --hidden-layers 3": LAYERS
    + "\nembedding -2 3/2\nhidden 1 -2 1\nhidden 2 -2 1/2\nhidden 3 -2 0\nreadout -1/2 0",
}


@pytest.mark.parametrize("command", TABLES)
def test_tables_have_their_cells(command, capsys):
    text = [line.split() for line in output(command, capsys).splitlines()]
    for row in TABLES[command].splitlines():
        assert row.split() in text


@pytest.mark.parametrize(
    ("command", "word"),
    [
        ("", "required"),
        ("exponent", "exponent"),
        ("exponents --jsn", "--jsn"),
        ("solve --parameterization mup", "--optimizer, --alpha, --omega, --u"),
    ],
)
def test_a_wrong_command_line_says_how_it_is_used(command, word, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(command.split())
    printed = capsys.readouterr()
    assert (stopped.value.code, printed.out) == (2, "")
    assert printed.err.startswith("usage: param-groups")
    assert word in printed.err.splitlines()[-1]


def run(*arguments):
    """The command as a user types it, from the root of the repository."""
    command = [sys.executable, "-m", "param_groups", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_the_module_runs_as_a_program():
    done = run(*SOLVE.format("mup", "adam", "one", "1", "1").split())
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: 'one' is not an exact number; write it like 1/2, 0.5 or 1\n"
    done = run("exponents", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["ntk"]["readout"]["lr"]["adam"]["full"] == "-1/2"


@pytest.mark.parametrize("text", ["import sys\nsys.exit(0)\n", "1 / 0\n"])
def test_a_file_that_ends_a_trace_is_one_line(text, tmp_path, capsys):
    (tmp_path / "file.py").write_text(text)
    with pytest.raises(SystemExit, match="2"):
        main(["trace", str(tmp_path / "file.py")])
    printed = capsys.readouterr()
    assert not printed.out and printed.err.startswith(f"error: {tmp_path}/file.py, line ")
    assert printed.err.count("\n") == 1
