"""Does the best rate stay? What is trained next, what constructed losses say, and the command."""

import argparse
import json
import math
import os
import random
import sys
from multiprocessing import get_context

import pytest
import torch

from param_groups import Everett, Rule, plan
from param_groups.__main__ import main
from param_groups.check import transfer, transfer_command
from param_groups.check.judging import judge_optimizers
from param_groups.check.reading import read
from param_groups.check.transfer import MOVES, STAYS, UNDECIDED, Grid, Run, answer, wanted
from param_groups.check.transfer_command import train

GRID = Grid((64, 128, 256, 512), tuple(range(-9, -4)), 1.0, (0, 1), (2, 3))


def law(power, best=-7.0, noise=0.002, seed=0, curvature=0.05):
    """A run's loss: a parabola in log2 of the rate around 2^best (n/64)^power, a common part of
    every seed and width, and noise of its own."""

    def loss(run):
        draw = random.Random(f"{seed} {run.width} {run.seed}")
        common = draw.gauss(0, 0.05)
        own = random.Random(f"{seed} {run}").gauss(0, noise)
        off = run.octave - best - power * math.log2(run.width / 64)
        return 3.0 - 0.1 * math.log2(run.width / 64) + curvature * off**2 + common + own

    return loss


def trained(grid, loss):
    """Losses of everything that is wanted, as a command trains it."""
    losses = {}
    for _ in range(100):
        runs = wanted(grid, losses)
        if not runs:
            return losses
        assert len(set(runs)) == len(runs) and not losses.keys() & set(runs)
        losses |= {run: loss(run) for run in runs}
    raise AssertionError("the grid never ends")


@pytest.mark.parametrize(
    ("power", "verdict"), [(0.0, STAYS), (0.1, STAYS), (-0.5, MOVES), (-1.0, MOVES), (0.5, MOVES)]
)
def test_a_known_power_is_found_and_named(power, verdict):
    said = [answer(GRID, trained(GRID, law(power, seed=seed))) for seed in range(20)]
    assert [one.verdict for one in said] == [verdict] * 20
    covered = [abs(one.power.exponent - power) <= one.reach for one in said]
    assert sum(covered) >= 17  # of 20 intervals of 95 %


@pytest.mark.parametrize("fresh", [(), (2, 3)])
def test_a_rate_whose_logarithm_is_rounded_is_the_same_rate(fresh):
    octaves = (-2.5, -1.5, -0.5, 0.5)  # as SGD's
    assert math.log2(2.0**-0.5) != -0.5
    grid = Grid((64, 128, 256), octaves, 1.0, (0, 1), fresh)
    said = answer(grid, trained(grid, law(0.0, best=-0.5)))
    assert said.verdict == STAYS and all(math.isfinite(one.price) for one in said.at)


def test_a_power_between_the_words_is_undecided_and_says_what_would_decide():
    one = answer(GRID, trained(GRID, law(0.2, noise=0.02)))
    assert one.verdict == UNDECIDED and "--" in one.advice
    assert answer(GRID, trained(GRID, law(0.25))).verdict == UNDECIDED  # where the words part


def test_what_seeds_share_does_not_widen_the_error():
    """A seed's data is the same at every rate, so that its part of the loss moves no vertex."""
    assert answer(GRID, trained(GRID, law(0.0, noise=0.0005))).reach < 0.05


def test_a_steep_curve_has_a_known_noise_though_no_other_rate_is_near_its_best():
    two = Grid(GRID.widths[::3], GRID.octaves, 1.0, GRID.seeds, ())
    said = [answer(two, trained(two, law(0.0, curvature=0.3, seed=seed))) for seed in range(5)]
    assert [one.verdict for one in said] == [STAYS] * 5


def test_one_seed_decides_nothing_by_luck():
    alone = Grid(GRID.widths[:2], GRID.octaves, 1.0, (0,), ())
    one = answer(alone, trained(alone, law(0.0)))
    assert one.verdict == UNDECIDED and "--seeds" in one.advice


@pytest.mark.parametrize("best", [-13.0, -1.0])
def test_the_grid_grows_past_an_edge_at_the_widths_that_need_it(best):
    losses = trained(GRID, law(-0.5, best=best, noise=0.0))
    one = answer(GRID, losses)
    assert one.verdict == MOVES and one.power.exponent == pytest.approx(-0.5, abs=0.02)
    for width in GRID.widths:
        rates = transfer.means(GRID, losses, width)
        assert min(rates) < math.log2(one.power(width)) < max(rates)


def test_a_rate_without_neighbours_is_no_best_rate():
    falls = lambda run: -0.1 * run.octave
    one = answer(GRID, trained(GRID, falls))
    assert one.verdict == UNDECIDED and "no best rate between others at width 64" in one.advice


def test_widths_that_always_diverge_are_named():
    one = answer(GRID, trained(GRID, lambda run: math.inf if run.width == 512 else law(0.0)(run)))
    assert one.verdict == UNDECIDED and one.advice.endswith("at width 512: give other --lr")
    assert transfer.answer(GRID, trained(GRID, lambda run: math.inf)).power is None


def test_rates_that_diverge_above_the_best_leave_a_verdict():
    cliff = lambda run: math.inf if run.octave > -6 else law(0.0, best=-6.6)(run)
    assert answer(GRID, trained(GRID, cliff)).verdict == STAYS


def test_the_price_is_that_of_fresh_seeds_at_the_bases_rate():
    one = answer(GRID, trained(GRID, law(-1.0, noise=0.0)))
    base, *_, last = one.at
    assert base.price == 0 and last.price == pytest.approx(0.05 * 3**2)  # three octaves off
    assert last.at_base - last.lowest == pytest.approx(last.price)


def test_student_covers_as_scipy_does():
    from scipy.special import stdtrit

    for freedom in (1, 2, 5, 12, 13, 20, 50, 1000):
        assert transfer.student(freedom) == pytest.approx(stdtrit(freedom, 0.975), abs=0.02)
    assert transfer.student(0) == math.inf


def test_curves_collapse_up_to_units():
    curve = [1 / (1 + x) for x in range(10)]
    same = {64: [curve] * 2, 128: [[2 + 3 * y for y in curve]] * 2}
    assert transfer.collapse(same) == pytest.approx((0.0, 0.0), abs=1e-12)
    other = {64: [curve] * 2, 128: [[y**3 for y in curve]] * 2}
    assert transfer.collapse(other)[0] > 0.05


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
# The same runs, said in other ways: what stands there, and what comes in its place.
OPTIMIZER = "loss=loss, optimizer=torch.optim.SGD(numbers.groups(model, check=False)))"
SAID = {
    "an optimizer alone": (TASK[TASK.index("    return Check") :], ALONE),
    "a plan of traced rules": (
        "plan=numbers",
        "plan=lambda rules: plan(model, rules, rule, lr=0.1)",
    ),
    "a plan and its optimizer": ("loss=loss)", OPTIMIZER),
    "a rate that follows the width by hand": ("lr=0.1", "lr=0.1 * 16 / width"),
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
    """Trained by processes that have torch; files that fail are tried in new ones."""
    monkeypatch.setattr(transfer_command, "get_context", lambda _: get_context("fork"))
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
    (folder / "mine.py").write_text(text)
    words = {"widths": [16, 64], "steps": 40, "schedule": "constant", "warmup": 0}
    args = argparse.Namespace(file=folder / "mine.py", **words)
    return train(args, Run(width, -9.0, 1), 1)


@pytest.mark.parametrize("how", SAID)
def test_other_ways_to_say_a_run_train_alike(how, tmp_path):
    old, new = SAID[how]
    alignment = "global" if "by hand" in how else "full"
    assert old in TASK
    for width in (16, 64):
        other = curve(tmp_path, TASK.replace(old, new).format(alignment=alignment), width)
        assert other == curve(tmp_path, TASK.format(alignment="full"), width)


@pytest.mark.parametrize("wrong", [0, 1])
@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_of_two_tensors_the_one_with_another_rate_is_named(wrong, factor):
    """As many have the plan's rate as another: no schedule has multiplied one of them."""
    model = torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.Linear(4, 9, bias=False))
    rules = [Rule("0.weight", "token_embedding"), Rule("1.weight", "readout")]
    made = plan(model, rules, Everett("mup", 4, 2), lr=0.1, absorb_multipliers=True)
    made.initialise(model, 0)
    groups = made.groups(model)
    groups[wrong]["lr"] *= factor
    optimizer, named = torch.optim.AdamW(groups), (f"{wrong}.weight", "optimiser's rate")
    held = {4: read(model, [optimizer], now=True)}
    for judged in (judge_optimizers({4: made}, held, **f) for f in ({"factor": 1.0}, {})):
        assert [(one.name, one.quantity) for one in judged] == [named]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("raise ValueError('no data')", "ValueError: no data"),
        ("import os; os._exit(0)", "a process that trains has ended without a word"),
    ],
)
def test_a_file_that_fails_is_one_line(file, line, message, capsys, monkeypatch):
    if "raise" in line:
        monkeypatch.setattr(transfer_command, "get_context", lambda _: get_context("fork"))
    file.write_text(f"def task(width, seed):\n    {line}\n")
    assert said(file) == 2
    assert message in capsys.readouterr().err
