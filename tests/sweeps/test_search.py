"""Searches for constants: what is tried, what is written, and what is refused."""

import csv
import hashlib
import json
import math
import random
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import yaml

from sweeps.__main__ import main
from sweeps.progress import status
from sweeps.request import Sources
from sweeps.search import SearchWork
from sweeps.study import load_search, objective
from tests.sweeps.toys import FakePool, calls, drive, make_toy, work_of, write_file
from training.config import validate
from training.errors import UserError
from training.files import locked

ROOT = Path(__file__).resolve().parents[2]
WIDE = (1e-2, 1e2)

BASE = """
width: 1
lr: 0.0625
optimizer: {lr: 0.01}
schedule: {}
training: {steps: 2, batch_size: 1}
"""
SEARCH = """
search: {gamma.a: [1.0e-2, 1.0e+2], gamma.b: [1.0e-2, 1.0e+2]}
trials: 12
rounds: 1
"""


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """A folder with the toy experiment in package `toy_<unique>`, ready to import."""
    return make_toy(tmp_path, monkeypatch, BASE)


def write_search(package, text=SEARCH):
    return write_file(package, text)


def load(package, path, **options):
    return load_search(path, package.parent / "results", **options)


def run(package, path, workers=1, seed=0):
    """Runs a search; its work, its rows and what constants.yaml says."""
    work = drive(work_of(package, path), FakePool(workers, seed))
    with open(work.folder / "trials.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    return work, rows, yaml.safe_load((work.folder / "constants.yaml").read_text())


def test_the_penalty_of_divergence_is_the_loss_at_which_a_run_counts_as_diverged(toy):
    search = load(toy, write_search(toy, "set: {training.divergence_factor: 2.5}\n" + SEARCH))
    config = search.studies[0].config
    assert objective({"status": "finished", "final_eval_loss": 3.0}, config) == 3.0
    assert objective({"status": "diverged", "first_train_loss": 4.0}, config) == 10.0
    assert objective({"status": "diverged", "first_train_loss": None}, config) is None


def test_constants_follow_from_the_table_of_trials(toy):
    path = write_search(toy, "set: {minimum_a: 3.0}\nequal_within: 0.02\n" + SEARCH)
    work, rows, constants = run(toy, path)
    assert work.report() == [] and len(rows) == 12
    assert [int(row["trial"]) for row in rows] == list(range(12))
    assert {row["status"] for row in rows} == {"finished"}
    losses = np.array([float(row["loss"]) for row in rows])
    values = {key: np.array([float(row[key]) for row in rows]) for key in ("gamma.a", "gamma.b")}
    [found] = constants["constants"]
    good = losses <= 1.02 * losses.min()
    assert 1 < good.sum() == found["equally_good"] < 12
    for key, column in values.items():
        assert found["set"][key] == pytest.approx(column[good].mean())
        assert found["geometric_means"][key] == pytest.approx(np.exp(np.log(column[good]).mean()))
        assert found["best"]["set"][key] == column[losses.argmin()]
    assert found["best"]["loss"] == losses.min()
    assert (found["trials"], found["diverged"], found["rounds"]) == (12, 0, 1)
    assert found["ranges"] == {"gamma.a": [0.01, 100.0], "gamma.b": [0.01, 100.0]}
    # The first trial is the untuned run, so that what tuning gains is measured.
    assert values["gamma.a"][0] == values["gamma.b"][0] == 1.0
    untuned = 3 + 0.2 * math.log10(3) ** 2 + 0.1 * math.log10(0.3) ** 2 + 0.001
    assert found["loss_with_all_at_1"] == losses[0] == pytest.approx(untuned)
    assert (found["rate"], found["rate_from"]) == (0.01, "config")


def test_an_optimum_outside_the_range_is_followed_and_the_other_range_stays(toy):
    three = SEARCH.replace("rounds: 1", "rounds: 3")
    path = write_search(toy, "set: {minimum_a: 1000.0}\n" + three)
    _work, rows, constants = run(toy, path)
    [found] = constants["constants"]
    first = [row for row in rows if row["round"] == "1"]
    edge = min(first, key=lambda row: float(row["loss"]))
    second = [row for row in rows if row["round"] == "2"]
    assert len(first) == len(second) == 12
    edge_a = float(edge["gamma.a"])
    assert edge_a > 10**1.6
    if found["rounds"] == 2:
        assert found["ranges"]["gamma.a"] == [edge_a / 100, edge_a * 100]
    assert max(float(row["gamma.a"]) for row in second) > 100
    assert all(edge_a / 100 <= float(row["gamma.a"]) <= edge_a * 100 for row in second)
    assert all(0.01 <= float(row["gamma.b"]) <= 100 for row in second)
    # The best of the round before is in the next one, and is not trained again.
    assert edge["run"] in {row["run"] for row in second}
    assert set(Counter(calls(toy)).values()) == {1}
    assert found["best"]["loss"] <= float(edge["loss"])


def test_an_optimum_at_the_edge_after_the_last_round_is_reported(toy):
    work, rows, constants = run(toy, write_search(toy, "set: {minimum_a: 1000.0}\n" + SEARCH))
    assert {row["round"] for row in rows} == {"1"}
    assert "gamma.a" in constants["constants"][0]["near_edge"]
    assert any(
        "gamma.a" in line and "still near an edge after 1 rounds" in line for line in work.report()
    )


def test_diverged_trials_have_the_penalty_and_no_say(toy):
    path = write_search(toy, "set: {diverge_above: 0.9}\nequal_within: 0.9\n" + SEARCH)
    work, rows, constants = run(toy, path)
    diverged = [row for row in rows if row["status"] == "diverged"]
    assert 1 <= len(diverged) < 11 and not work.reasons
    assert {float(row["loss"]) for row in diverged} == {12.0}  # divergence_factor 3 x 4
    [found] = constants["constants"]
    assert found["diverged"] == len(diverged)
    rest = [float(row["gamma.a"]) for row in rows if row["status"] == "finished"]
    assert found["set"]["gamma.a"] == pytest.approx(np.mean(rest))
    assert found["loss_with_all_at_1"] is None  # it diverged


def test_a_study_that_only_diverges_has_no_constants(toy):
    work, rows, constants = run(toy, write_search(toy, "set: {diverge_above: 0}\n" + SEARCH))
    assert len(rows) == 12 and constants["constants"] == []
    assert work.reasons == {"all": "all 12 trials diverged; lower optimizer.lr"}


GRID = "grid: {kind: [plain, other words], optimizer.lr: [0.1, 0.01]}\n"


def test_every_combination_of_the_grid_is_a_study_of_its_own(toy):
    path = write_search(toy, GRID + SEARCH.replace("trials: 12", "trials: 3"))
    _, rows, constants = run(toy, path, workers=2)
    wheres = [entry["where"] for entry in constants["constants"]]
    pairs = [(kind, lr) for kind in ("plain", "other words") for lr in (0.1, 0.01)]
    assert wheres == [{"kind": kind, "optimizer.lr": lr} for kind, lr in pairs]
    names = {f"{kind.replace(' ', '_')}-{lr}": 3 for kind, lr in pairs}
    assert Counter(row["study"] for row in rows) == names
    tried = {(row["study"], row["gamma.a"]) for row in rows}
    assert len({a for _, a in tried}) > 3  # not the same values in every study


def test_at_most_parallel_trials_are_in_progress_and_one_given_back_comes_first(toy):
    work = work_of(toy, write_search(toy, "parallel: 3\n" + SEARCH))
    tasks = [work.next() for _ in range(3)]
    assert [task.number for task in tasks] == [0, 1, 2] and work.next() is None
    work.put_back(tasks[0])
    assert work.next() == tasks[0]
    work.record(tasks[1], {"status": "finished", "final_eval_loss": 3.0})
    assert work.next().number == 3


def test_trials_that_were_begun_are_handed_out_again_before_new_ones(toy):
    """A driver that is killed leaves them running in the journal."""
    path = write_search(toy, "parallel: 3\n" + SEARCH)
    before = work_of(toy, path)
    begun = [before.next().run for _ in range(2)]
    work = work_of(toy, path)
    assert [work.next().run for _ in range(2)] == begun
    assert work.next().number == 2 and work.next() is None
    fewer = work_of(toy, write_search(toy, SEARCH.replace("trials: 12", "trials: 1")))
    assert [fewer.next().run, fewer.next()] == [begun[0], None]  # and no more than it wants
    rows = run(toy, write_search(toy, "parallel: 3\n" + SEARCH))[1]
    assert [int(row["trial"]) for row in rows] == list(range(12))


def test_failed_trials_are_tried_again_reported_and_replaced_in_the_next_launch(toy, monkeypatch):
    path = write_search(toy)
    monkeypatch.setenv("BREAK_ABOVE", "5")
    work, rows, constants = run(toy, path)
    failed = [row for row in rows if row["status"] == "failed"]
    assert failed and len(rows) == 12 and constants["constants"] == []
    assert work.reasons["all"] == f"{len(failed)} trials failed; the same command replaces them"
    assert {calls(toy).count(row["run"]) for row in failed} == {2}  # retries: 1
    assert sum(
        "failed 2 times: RuntimeError: something broke" in line for line in work.report()
    ) == len(failed)
    said = status(work_of(toy, path)).splitlines()[0]
    counts = f"{12 - len(failed)} of 12 runs done, 0 at work, {len(failed)} failed, 0 left"
    assert said.endswith(counts)
    monkeypatch.delenv("BREAK_ABOVE")
    again = work_of(toy, path)
    replaced, open_places = again.next(), len(failed) - 1
    counts = f"0 at work, {open_places} failed, 1 left"
    assert status(work_of(toy, path)).splitlines()[0].endswith(counts)
    assert replaced.number == 12
    work, rows, constants = run(toy, path)
    said = status(work_of(toy, path)).splitlines()[0]
    assert said.endswith("12 of 12 runs done, 0 at work, 0 failed, 0 left")
    assert work.report() == []
    assert Counter(row["status"] for row in rows) == {"finished": 12, "failed": len(failed)}
    assert constants["constants"][0]["trials"] == 12


def test_more_trials_continue_a_study_and_other_settings_begin_another(toy):
    _, rows, _ = run(toy, write_search(toy))
    _, more, constants = run(toy, write_search(toy, SEARCH.replace("12", "15")))
    assert more[:12] == rows and len(more) == 15 == constants["constants"][0]["trials"]
    _, _fewer, constants = run(toy, write_search(toy))
    assert constants["constants"][0]["trials"] == 12
    _, other, _ = run(toy, write_search(toy, "set: {optimizer.lr: 0.02}\n" + SEARCH))
    assert len(other) == 12 and not {r["run"] for r in other} & {r["run"] for r in more}


def test_a_search_that_is_killed_twenty_times_ends_with_its_number_of_trials(toy):
    """At any byte of its journal: in a line, or between the note of a trial and its end."""
    path = write_search(toy, "parallel: 3\n" + SEARCH.replace("trials: 12", "trials: 50"))
    kills = random.Random(0)
    for _ in range(20):
        work, left = work_of(toy, path), [None] * kills.randrange(3)

        def record(point, summary, work=work, left=left):
            if not left:
                raise KeyboardInterrupt
            left.pop()
            SearchWork.record(work, point, summary)

        work.record, pool = record, FakePool(3, kills.random())
        with pytest.raises(KeyboardInterrupt):
            drive(work, pool)
        pool.server.join()  # a run under way would go on beside those of the next command
        text = work.journal.path.read_bytes()
        text = text[: len(text) - kills.randrange(200)]
        work.journal.path.write_bytes(text)
        sealed = text[: kills.randrange(len(text))]  # at some time before
        seal = {"bytes": len(sealed), "sha256": hashlib.sha256(sealed).hexdigest()}
        work.journal.seal.write_text(json.dumps(seal))
    work, rows, constants = run(toy, path, 3)
    assert not work.reasons
    assert [int(row["trial"]) for row in rows] == list(range(50))
    assert constants["constants"][0]["trials"] == 50 and set(Counter(calls(toy)).values()) == {1}


def test_a_lost_journal_costs_no_training(toy):
    work, rows, _ = run(toy, write_search(toy))
    work.journal.path.unlink()
    _, again, _ = run(toy, write_search(toy))
    assert again == rows and set(Counter(calls(toy)).values()) == {1}


SWEEP = """
experiment: {}
config: base.yaml
grid: {{optimizer.lr: [0.1, 0.2, 0.4]}}
curves: {{c: {{}}}}
"""
RATES = """
grid: {kind: [plain, other]}
rates:
  - where: {kind: plain}
    around: {sweep: rates.yaml, match: [kind]}
  - where: {kind: [other]}
    around: {sweep: rates.yaml, match: [kind], where: {horizon: fixed}}
    factor: 0.5
"""


def write_rates(package):
    """A sweep and its table: the best rates are 0.2 for plain and 0.4 for other."""
    (package / "rates.yaml").write_text(SWEEP.format(package.name))
    rows = ["curve,kind,horizon,optimizer.lr,status,final_eval_loss"]
    for kind, best in (("plain", 0.2), ("other", 0.4)):
        rows += [f"c,{kind},fixed,{lr},finished,{3 + (lr - best) ** 2}" for lr in (0.1, 0.2, 0.4)]
    folder = package.parent / "results" / package.name / "rates"
    folder.mkdir(parents=True)
    (folder / "results.csv").write_text("\n".join(rows) + "\n")


def test_rates_are_the_best_of_another_sweep(toy):
    write_rates(toy)
    path = write_search(toy, RATES + SEARCH)
    search = load(toy, path)
    assert {study.name: study.rate for study in search.studies} == {"plain": 0.2, "other": 0.2}
    assert search.studies[1].config.optimizer.lr == 0.2
    assert search.studies[1].rate_from == "0.5 x best of rates.yaml"


def test_rates_that_are_not_there_name_the_command_and_a_dry_run_assumes_the_configs(toy):
    (toy / "rates.yaml").write_text(SWEEP.format(toy.name))
    path = write_search(toy, RATES + SEARCH)
    with pytest.raises(UserError, match=r"first run python -m sweeps run .*rates.yaml"):
        load(toy, path)
    work = work_of(toy, path, draft=True)
    assert len(work.file.sources.assumed) == 1
    assert "until then counted with the config's own rate" in work.file.sources.assumed[0]
    assert work.listed()[0].startswith("plain: optimizer.lr=0.01 (config)")


def test_a_dry_run_counts_what_is_left_and_writes_nothing(toy, capsys):
    path = write_search(toy, GRID + SEARCH.replace("trials: 12", "trials: 3"))
    words = ["run", str(path), "--dry-run", "--results", str(toy.parent / "results")]
    main([*words, "--verbose"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "s: 12 of 12 runs to do, 12 FLOPs, about 0.24 s on 1 CPU core"
    assert lines[1] == (
        "plain-0.1: optimizer.lr=0.1 (config), round 1 of at most 1, 3 of 3 trials to do"
    )
    assert len(lines) == 1 + 4 and not (toy.parent / "results").exists()
    run(toy, path)
    main(words)
    assert capsys.readouterr().out.startswith("s: 0 of 12 runs to do")


def test_a_second_driver_is_refused_before_it_reads_a_trial(toy, monkeypatch):
    """Both would number their trials alike, and a loss would belong to the other one's values."""
    monkeypatch.setattr("sweeps.search.Journal.trials", None)
    monkeypatch.setattr("sweeps.__main__.locked", partial(locked, patience=0))
    path, results = write_search(toy), toy.parent / "results"
    with locked(results / toy.name / "s", "sweep"), pytest.raises(SystemExit) as end:
        main(["search", str(path), "--results", str(results)])
    assert end.value.code == 2


def test_the_search_of_the_paper(tmp_path):
    """App. C.2: three constants in [1e-2, 1e2], 800 trials, 100 at once, one repetition."""
    path = ROOT / "nanolm_c4/sweeps/constants.yaml"
    search = load_search(path, tmp_path, draft=True)
    settings = search.config
    assert (settings.trials, settings.parallel, settings.rounds) == (800, 100, 2)
    assert (settings.equal_within, settings.extend) == (0.001, 100)
    assert [key.rpartition("_")[2] for key in settings.search] == ["embedding", "hidden", "readout"]
    assert set(settings.search.values()) == {WIDE}
    assert len(search.studies) == 16
    config = search.studies[0].config
    assert config.model.width == config.prescription.base_width == 1024
    assert config.training.steps == 50_000
    small = load_search(path, tmp_path, "laptop", draft=True)
    config = small.studies[0].config
    assert config.model.width == config.prescription.base_width < 100


def test_what_is_saved_is_json_and_yaml_without_surprises(toy):
    work, _, constants = run(toy, write_search(toy))
    for line in work.journal.path.read_text().splitlines():
        json.loads(line)
    assert "&" not in (work.folder / "constants.yaml").read_text()
    assert constants["search"]["file"] == "s.yaml"
    gamma = work.file.experiment.config.model_fields["gamma"].annotation
    values = constants["constants"][0]["set"]
    validate(gamma, {key.partition(".")[2]: values[key] for key in values}, "constants.yaml")


def test_constants_of_hundreds_of_studies_are_read(toy):
    """The limits of what people write by hand are not those of what a search writes."""
    many = [
        {"where": {"kind": str(i)}, "set": {"gamma.a": 2.0}, "near": "x" * 999} for i in range(300)
    ]
    many[1]["near_edge"] = ["gamma.a"]
    table = work_of(toy, write_search(toy)).table
    table.parent.mkdir(parents=True)
    table.write_text(yaml.safe_dump({"constants": many}))  # 300 KB
    sources = Sources(toy / "another.yaml", toy.parent / "results", None)
    assert sources.constants("s.yaml", {"kind": "299"}) == ({"gamma.a": 2.0}, True)
    assert sources.constants("s.yaml", {"kind": "1"}) == ({"gamma.a": 2.0}, "near_edge")
    table.write_text("constants: [{\n")
    with pytest.raises(UserError, match="constants.yaml, line 1: not valid YAML"):
        sources.constants("s.yaml", {"kind": "299"})
