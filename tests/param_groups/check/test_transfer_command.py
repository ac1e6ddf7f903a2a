"""The command `transfer`: one rule that stays beside one that moves, stops, mistakes."""

import argparse
import json
import os
import sys

import pytest

from param_groups.__main__ import main
from param_groups.check import transfer_command
from param_groups.check.measuring import CheckError
from param_groups.check.transfer import Run
from param_groups.check.transfer_command import train

TASK = """
import torch
from param_groups import Everett, Rule, plan
from param_groups.check import Check

def task(width, seed):
    draw = torch.Generator().manual_seed(seed)
    xs = torch.randn(80, 32, 1, generator=draw)
    noise = torch.randn(80, 32, 1, generator=draw)
    model = torch.nn.Linear(width, 1, bias=False)
    rule = Everett("standard", width, 16, optimizer="sgd", alignment="{alignment}")
    numbers = plan(model, [Rule("weight", "readout")], rule, lr=0.1)

    def loss(model, batch):  # equal inputs: a step moves the output by the rate times the width
        x, noise = batch
        return (model(x.expand(-1, model.in_features)) - 4 * x - noise).square().mean()

    return Check(model=model, plan=numbers, batches=list(zip(xs, noise)), loss=loss)
"""
ALONE = """
    numbers.initialise(model, seed)
    optimizer = torch.optim.SGD(numbers.groups(model))
    return Check(model, None, list(zip(xs, noise)), loss, optimizer=optimizer)
"""
# The same runs, said in other ways: (what stands there, what comes in its place, the alignment).
SAID = {
    "an optimizer alone": (TASK[TASK.index("    return Check") :], ALONE, "full"),
    "a plan of traced rules": (
        "plan=numbers",
        "plan=lambda rules: plan(model, rules, rule, lr=0.1)",
        "full",
    ),
    "a rate that follows the width by hand": ("lr=0.1", "lr=0.1 * 16 / width", "global"),
}
WORDS = (
    "--widths 16 64 256 --lr 2^-10:2^-5 --seeds 3 --steps 80 --schedule constant --warmup 0".split()
)
WORDS += ["--workers", "1"]


def said(file, *words):
    """The exit code of the command."""
    with pytest.raises(SystemExit) as stop:
        main(["transfer", str(file), *WORDS, "--out", str(file.parent / "out"), *words])
    return stop.value.code


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(TASK.format(alignment="global"))
    return path


def strict(text):
    """JSON without NaN and infinity, which Python alone reads."""
    return json.loads(text, parse_constant=pytest.fail)


def test_a_rule_without_the_width_moves_and_one_with_it_stays(file, capsys, monkeypatch):
    assert said(file) == 1
    out = file.parent / "out"
    result = strict((out / "transfer.json").read_text())
    assert result["power"]["exponent"] == pytest.approx(-1.0, abs=0.25)
    assert (out / "transfer.png").exists()

    # What a stop has cut off is trained again, all else is kept.
    runs, whole = out / "runs.jsonl", (out / "runs.jsonl").read_text()
    lines = whole.splitlines(keepends=True)
    runs.write_text("".join(lines[:-1]) + lines[-1][:30])
    assert said(file) == 1
    assert sorted(runs.read_text().splitlines()) == sorted(whole.splitlines())

    # Results are written where nothing can be printed, and one seed has no error to write.
    (out / "transfer.json").unlink()
    with monkeypatch.context() as patch, open(os.devnull) as closed:
        patch.setattr(sys, "stdout", closed)
        assert said(file, "--seeds", "1", "--fresh", "0") == 2
    assert "not writable" in capsys.readouterr().err
    assert strict((out / "transfer.json").read_text())["at"][2]["error"] is None

    file.write_text(TASK.format(alignment="full"))
    capsys.readouterr()
    assert said(file) == 2
    assert "its runs are of another file or of other settings" in capsys.readouterr().err
    assert said(file, "--out", str(file.parent / "full")) == 0
    assert "verdict: stays" in capsys.readouterr().out

    # Another base: an optimizer's rates would have another meaning.
    file.write_text(TASK.format(alignment="global"))
    assert said(file, "--widths", "8", "16", "64") == 2
    assert "such as the smallest widths" in capsys.readouterr().err


def test_runs_of_a_helper_that_has_changed_are_of_another_file(file, capsys, monkeypatch):
    helper = file.with_name("helper_of_mine.py")
    file.write_text(f"import helper_of_mine\n{file.read_text()}")
    run, curve = transfer_command.Run(16, -9.0, 0), [1.0] * (transfer_command.POINTS + 1)
    monkeypatch.setattr(transfer_command, "_train_all", lambda *of: of[-1].keep(run, curve))
    answers = []
    for text in ("SIZE = 3", "SIZE = 3", "SIZE = 4"):
        helper.write_text(text)
        answers.append(said(file))
    del sys.modules["helper_of_mine"]
    assert answers == [2, 2, 2]
    assert capsys.readouterr().err.count("its runs are of another file") == 1


def curve(folder, text, width):
    """The losses of one run."""
    (folder / "mine.py").write_text(text)
    args = argparse.Namespace(
        file=folder / "mine.py", widths=[16, 64], steps=40, schedule="constant", warmup=0
    )
    return train(args, Run(width, -9.0, 1), 1)


@pytest.mark.parametrize("how", SAID)
def test_other_ways_to_say_a_run_train_alike(how, tmp_path):
    old, new, alignment = SAID[how]
    assert old in TASK
    for width in (16, 64):
        other = curve(tmp_path, TASK.replace(old, new).format(alignment=alignment), width)
        assert other == curve(tmp_path, TASK.format(alignment="full"), width)


@pytest.mark.parametrize(
    ("new", "message"),
    [
        ("    return Check(model, None, [(xs, noise)], loss)", "neither a plan nor an optimizer"),
        (
            ALONE.replace("model))", "model), lr=0)").replace(
                "numbers.groups", "list(model.parameters()) or "
            ),
            "are 0",
        ),
    ],
)
def test_what_has_no_rate_is_refused(new, message, tmp_path):
    with pytest.raises(CheckError, match=message):
        curve(
            tmp_path, TASK.replace(SAID["an optimizer alone"][0], new).format(alignment="full"), 64
        )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("raise ValueError('no data')", "ValueError: no data"),
        ("import os; os._exit(0)", "a process that trains has ended without a word"),
    ],
)
def test_a_file_that_fails_is_one_line(file, line, message, capsys):
    file.write_text(f"def task(width, seed):\n    {line}\n")
    assert said(file) == 2
    assert message in capsys.readouterr().err
