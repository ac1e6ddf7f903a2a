"""Studies: ranges that move, constants from trials, what is suggested next, where trials live."""

import itertools
import math
import re
import shutil

import numpy as np
import optuna
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sweeps.journal import Journal, distributions
from sweeps.progress import status
from sweeps.study import best_trial, equally_good, is_near_edge, next_ranges, suggest
from tests.sweeps.test_search import BASE, SEARCH, run, write_search
from tests.sweeps.toys import calls, make_toy, work_of
from training.errors import UserError

WIDE = (1e-2, 1e2)


def trial(number, values, loss=None, ranges=None):
    """A trial as Optuna has it: complete with a loss, else begun."""
    made = optuna.trial.create_trial(
        state=optuna.trial.TrialState.RUNNING if loss is None else optuna.trial.TrialState.COMPLETE,
        value=loss,
        params=values,
        distributions=distributions(ranges or dict.fromkeys(values, (1e-3, 1e3))),
    )
    made.number = number
    return made


def complete(losses, **values):
    """Trials with these losses; every value is a list as long."""
    return [
        trial(i, {key: column[i] for key, column in values.items()}, loss)
        for i, loss in enumerate(losses)
    ]


@pytest.mark.parametrize(
    ("exponent", "near"),
    [(-2, True), (-1.6, True), (-1.59, False), (0, False), (1.59, False), (1.6, True), (2, True)],
)
def test_near_an_edge_is_within_a_tenth_of_the_log_range(exponent, near):
    assert is_near_edge(10.0**exponent, WIDE, 0.1) is near
    assert is_near_edge(10.0 ** (exponent / 2), (0.1, 10), 0.1) is near  # of that range's width


def test_only_the_range_whose_best_value_is_near_an_edge_moves():
    ranges = {"low": WIDE, "inside": WIDE, "high": WIDE}
    best = {"low": 0.02, "inside": 3.0, "high": 100.0}
    moved = next_ranges(best, ranges, 0.1, 100, lambda values: True)
    assert moved == {"low": (0.0002, 2.0), "inside": WIDE, "high": (1.0, 10000.0)}


@given(
    best=st.floats(1e-300, 1e300),
    factor=st.floats(1.0001, 1e308),
    ends=st.tuples(st.floats(0, 1), st.floats(1, 1e300)),
)
def test_no_range_leaves_what_makes_a_config(best, factor, ends):
    """Whatever the key's valid values are, the best one is among them."""
    first, last = best * ends[0], min(best * ends[1], 1e308)
    moved = next_ranges(
        {"a": best}, {"a": (best, best * 2)}, 0.1, factor, lambda v: first <= v["a"] <= last
    )
    assert first <= moved["a"][0] <= best <= moved["a"][1] <= last
    wanted = (max(best / factor, first), min(best * factor, last))
    assert moved["a"] == pytest.approx(wanted, rel=1e-9)


def test_trials_within_a_thousandth_of_the_best_loss_are_as_good():
    trials = complete([2.0019, 2.0, 2.0021, 3.0], g=[8.0, 2.0, 100.0, 50.0], h=[1.0, 3.0, 9.0, 9.0])
    good = equally_good(trials, 0.001)
    assert [trial.number for trial in good] == [0, 1]


def test_the_first_of_equally_low_losses_is_the_best():
    assert best_trial(complete([3.0, 2.0, 2.0], g=[1.0, 2.0, 3.0])).number == 1


def bowl(values):
    return 3 + 0.3 * math.log10(values["a"] / 5) ** 2 + 0.3 * math.log10(values["b"] / 0.1) ** 2


@pytest.mark.parametrize("parallel", [pytest.param(1, marks=pytest.mark.thorough), 20])
def test_the_sampler_finds_the_minimum_of_a_parabola_in_the_log(parallel):
    """With 20 at once, in thorough tests one by one; 80 random trials come no closer than 0.2."""
    ranges, distances = {"a": WIDE, "b": WIDE}, []
    for seed in range(3):
        trials = []
        while len(trials) < 80:
            begun = [*trials]
            while len(begun) < len(trials) + parallel:
                values = suggest(begun, ranges, (seed, len(begun)))
                begun.append(trial(len(begun), values))
            trials = [trial(t.number, t.params, bowl(t.params)) for t in begun]
        best = best_trial(trials).params
        distances.append(math.hypot(math.log10(best["a"] / 5), math.log10(best["b"] / 0.1)))
    assert np.median(distances) < 0.15 and max(distances) < 0.4


def test_a_suggestion_depends_on_the_seed_and_the_trials_alone():
    ranges = {"a": WIDE, "b": (1.0, 2.0)}
    steps = range(15)
    values = {"a": [0.02 * 1.5**i for i in steps], "b": [1 + i / 20 for i in steps]}
    trials = complete([3 - 0.1 * i for i in steps], **values)
    first = suggest(trials, ranges, (0, "study", 15))
    assert suggest(list(trials), ranges, (0, "study", 15)) == first
    assert suggest(trials, ranges, (1, "study", 15)) != first
    assert suggest(trials[:14], ranges, (0, "study", 15)) != first
    running = [*trials, trial(15, first)]
    assert suggest(running, ranges, (0, "study", 15)) != first  # it keeps away from it
    assert 1e-2 <= first["a"] <= 1e2 and 1 <= first["b"] <= 2


def test_early_values_are_uniform_in_the_logarithm():
    drawn = [math.log10(suggest([], {"a": WIDE}, seed)["a"]) for seed in range(200)]
    counts, _ = np.histogram(drawn, bins=4, range=(-2, 2))
    assert counts.sum() == 200 and counts.min() > 30


RUN = {"status": "finished", "commit": None}


def shown(trials):
    return [(t.number, t.params, t.state.name, t.value, t.user_attrs) for t in trials]


def test_what_one_driver_notes_another_one_reads(tmp_path):
    folder = tmp_path / "s"
    ours = Journal(folder)
    assert ours.trials("x") == [] and not folder.exists()
    for number, value in enumerate((0.1 + 0.2, 1.0)):
        ours.begin("x", {"a": value}, {"a": WIDE}, f"x-{number}")
    assert shown(Journal(folder).trials("x")) == [
        (0, {"a": 0.1 + 0.2}, "RUNNING", None, {"run": "x-0"}),
        (1, {"a": 1.0}, "RUNNING", None, {"run": "x-1"}),
    ]
    ours.end("x", 0, RUN, 2.5)
    ours.end("x", 1, {"status": "failed"}, None)
    ended = [
        (0, {"a": 0.1 + 0.2}, "COMPLETE", 2.5, {"run": "x-0", **RUN}),
        (1, {"a": 1.0}, "FAIL", None, {"run": "x-1", "status": "failed"}),
    ]
    assert shown(Journal(folder).trials("x")) == shown(ours.trials("x")) == ended
    assert ours.trials("y") == []


def test_the_journal_is_one_that_optuna_opens_itself(tmp_path):
    ours = Journal(tmp_path)
    ours.begin("x", {"a": 1.0}, {"a": WIDE}, "x-0")
    ours.end("x", 0, RUN, 2.5)
    backend = optuna.storages.journal.JournalFileBackend(str(tmp_path / "journal.jsonl"))
    study = optuna.load_study(study_name="x", storage=optuna.storages.JournalStorage(backend))
    assert (study.best_value, study.best_params) == (2.5, {"a": 1.0})
    assert study.best_trial.user_attrs["run"] == "x-0"


def test_half_a_line_that_a_crash_left_is_dropped_and_a_damaged_journal_named(tmp_path):
    ours = Journal(tmp_path)
    ours.begin("x", {"a": 1.0}, {"a": WIDE}, "x-0")
    with open(ours.path, "a") as file:
        file.write('{"op_code": 6, "tri')
    again = Journal(tmp_path)
    assert [t.number for t in again.trials("x")] == [0]
    again.end("x", 0, RUN, 2.5)
    assert [t.value for t in Journal(tmp_path).trials("x")] == [2.5]
    ours.path.write_text("nonsense\n" + ours.path.read_text())
    with pytest.raises(UserError, match=r"journal.jsonl: damaged .*; delete it"):
        Journal(tmp_path).trials("x")


# A search's journal against the sealed summaries of its trials


@pytest.fixture
def toy(tmp_path, monkeypatch):
    return make_toy(tmp_path, monkeypatch, BASE)


def digit(text):
    """The file with the last digit of its first loss changed."""
    return re.sub(r"(\d\.\d{6,})(\d)", lambda m: m[1] + str(9 - int(m[2])), text, count=1)


JOURNALS = {
    "a line twice": lambda lines: [lines[0], lines[1], *lines[1:]],
    "the last beginning twice": lambda ls: [*ls, [x for x in ls if "datetime_start" in x][-1]],
    "lines swapped": lambda lines: [lines[0], lines[2], lines[1], *lines[3:]],
    "a line lost": lambda lines: [*lines[:3], *lines[4:]],
    "a commit lost": lambda lines: [line for line in lines if '"commit"' not in line],
    "a value": lambda lines: [line.replace('"gamma.a":1.0', '"gamma.a":2.0') for line in lines],
    "a loss": lambda lines: [line.replace('"values":[3.', '"values":[2.') for line in lines],
    "a status": lambda lines: [line.replace("finished", "diverged") for line in lines],
    **{
        f"{kind}": lambda lines, kind=kind: [*lines[:5], f"{kind}\n", *lines[5:]]
        for kind in ("null", "[]", "{}", "3", "[[", "[" * 100_000, "word")
    },
}


def test_a_damaged_journal_is_one_line_and_its_advice_brings_the_same_trials(toy):
    path = write_search(toy)
    work, _, _ = run(toy, path)
    trials, journal = (work.folder / file for file in ("trials.csv", "journal.jsonl"))
    whole, before = trials.read_bytes(), len(calls(toy))
    lines = journal.read_text().splitlines(keepends=True)
    work.journal.seal.unlink()  # as of lines that came after it
    for name, damage in JOURNALS.items():
        journal.write_text("".join(damage(lines)))
        with pytest.raises(UserError) as caught:
            status(work_of(toy, path))
        said = str(caught.value)
        assert said.startswith(f"{journal}: damaged (") and "; delete it: runs that" in said, name
        assert "\n" not in said
    journal.unlink()
    run(toy, path)
    assert trials.read_bytes() == whole and len(calls(toy)) == before


def test_whatever_is_gone_from_a_journal_is_missed(toy):
    """Without its beginning or its end a trial would be run twice, or another one in its place."""
    path = write_search(toy)
    work, _, _ = run(toy, path)
    lines = work.journal.path.read_text().splitlines(keepends=True)
    for first, count in itertools.product(range(len(lines)), (1, 2, len(lines) - 1)):
        left = lines[:first] + lines[first + count :]
        work.journal.path.write_text("".join(left))
        with pytest.raises(UserError, match="lines are gone or changed"):
            Journal(work.folder).trials(work.rounds["all"][0].key)
    work.journal.path.write_text("".join(lines))
    for seal in ("", "[]", "{}", '{"bytes": -1}', '{"bytes": 1e99}'):
        work.journal.seal.write_text(seal)
        with pytest.raises(UserError, match=r"journal.sha256.*; delete it"):
            work_of(toy, path)


def test_a_trial_is_what_its_runs_sealed_summary_says(toy):
    path = write_search(toy)
    work, _, _ = run(toy, path)
    whole = (work.folder / "trials.csv").read_bytes()
    summary = next(work.folder.glob("*/summary.json"))
    for damage in (digit, lambda text: text[:20], lambda text: ""):
        summary.write_text(damage(summary.read_text()))
        with pytest.raises(UserError, match=f"{summary.parent.name}.*delete it"):
            work_of(toy, path)
        shutil.rmtree(summary.parent, ignore_errors=True)
        (work.folder / "journal.jsonl").unlink()
        assert run(toy, path)[0] and (work.folder / "trials.csv").read_bytes() == whole


def test_a_search_whose_best_value_is_at_the_end_of_what_is_valid_ends(toy):
    """Its next range would leave that: it goes as far as values make a config."""
    train = toy / "train.py"
    train.write_text(train.read_text().replace("loss = 3 +", "loss = 3 - config.optimizer.beta1 +"))
    text = SEARCH.replace("gamma.b: [1.0e-2, 1.0e+2]", "optimizer.beta1: [0.5, 0.9]")
    path = write_search(toy, text.replace("rounds: 1", "rounds: 3"))
    work, _, constants = run(toy, path)
    assert [*work.complete] == ["all"] and not work.reasons
    low, high = constants["constants"][0]["ranges"]["optimizer.beta1"]
    assert 0 < low < high < 1
