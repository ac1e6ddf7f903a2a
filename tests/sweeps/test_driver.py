"""The driver: what it hands out, what it makes of each end of a run, and what it writes when."""

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import tracemalloc
from collections import Counter
from contextlib import ExitStack
from functools import partial

import pytest

from sweeps import __main__ as command
from sweeps import driver as driving
from sweeps import task
from sweeps.driver import LOST, Driver
from sweeps.pool import Job, Needs, RunFailed
from sweeps.progress import status
from sweeps.sweep import shortened
from tests.sweeps.toys import BASE, ROOT, FakePool, Lost, drive, make_toy, work_of, write_file
from training.errors import RunError, UserError
from training.files import Busy, locked

SWEEP = "grid: {width: [1, 2, 3, 4]}\ncurves: {a: {}}\n"
DONE = {"status": "finished", "step": 2, "steps": 2, "final_eval_loss": 1.0}


@pytest.fixture
def toy(tmp_path, monkeypatch):
    return make_toy(tmp_path, monkeypatch, BASE.replace("steps: 9", "steps: 2"))


@pytest.fixture
def work(toy):
    return work_of(toy, write_file(toy, SWEEP))


class Ends:
    """Performs jobs by a script: the widest run ends as told, time after time, others well."""

    def __init__(self, *ends):
        self.ends, self.calls = list(ends), Counter()

    def __call__(self, job):
        width = job.config["width"]
        self.calls[width] += 1
        end = self.ends.pop(0) if width == 4 and self.ends else DONE
        if isinstance(end, BaseException):
            raise end
        return end


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(driving, "BUSY_SECONDS", 0.02)
    monkeypatch.setattr(driving, "LOOK_SECONDS", 0.02)


def test_a_signal_that_comes_as_a_wait_ends_does_not_hold_the_driver(work, monkeypatch):
    """It would wait for the next run to end, and not stop those at work: hours."""
    monkeypatch.setattr(driving, "LOOK_SECONDS", 0.001)
    driver = Driver(work, FakePool())
    rescue = threading.Timer(20, driver.ended.put, [None])  # which is no run: KeyError
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    rescue.start()
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.00103, 0.00103)
        for _ in range(1000):
            driver._take()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        rescue.cancel()


OVER = f"lost its worker {LOST} times without progress: out of memory"
BROKEN = RunFailed("no such thing", "line\nof its log")


@pytest.mark.parametrize(
    ("ends", "calls", "reported"),
    [
        ([Lost("node gone")] * 3, 4, None),
        ([Lost("out of memory")] * 9, LOST, OVER),
        ([RunFailed("no such thing")], 2, None),
        ([BROKEN] * 2, 2, "failed 2 times: no such thing\nline\nof its log"),
        ([RunFailed("a"), Lost("b"), RunFailed("c")], 3, "failed 2 times: c"),
        ([RunError("damaged; delete it")], 1, "damaged; delete it"),
        ([Busy("held by another")] * 2, 3, None),
        ([{"status": "stopped"}] * 2, 3, None),
    ],
)
def test_every_end_of_a_run_is_answered_and_the_rest_goes_on(
    work, impatient, capsys, ends, calls, reported
):
    perform = Ends(*ends)
    drive(work, FakePool(2, perform=perform))
    assert perform.calls == {1: 1, 2: 1, 3: 1, 4: calls}
    assert bool(work.reasons) == (reported is not None) and len(work.results) == 4
    assert [line.partition(" ")[2] for line in work.report()] == ([reported] if reported else [])
    said = capsys.readouterr().err
    if isinstance(ends[0], (RunFailed, Lost, Busy)):
        assert str(ends[0]) in said
    assert said.count("held by another") <= 1  # said once


def test_a_run_that_gets_further_each_time_may_lose_its_place_as_often_as_it_likes(work):
    steps = iter(range(1, 100))

    def perform(job):
        if job.config["width"] == 4 and (step := next(steps)) < 3 * LOST:
            job.run_dir.mkdir(parents=True, exist_ok=True)
            (job.run_dir / "metrics.jsonl").write_text(json.dumps({"step": step}) + "\n")
            raise Lost
        return DONE

    drive(work, FakePool(1, perform=perform))
    assert not work.reasons


def test_a_users_mistake_that_a_run_finds_stops_the_others_and_is_raised(work):
    pool = FakePool(2, perform=Ends(UserError("no data; fetch it")))
    with pytest.raises(UserError, match="no data; fetch it"):
        drive(work, pool)
    assert pool.stops == 1 and not pool.open


def test_a_run_that_no_place_can_hold_is_reported_and_the_rest_goes_on(work):
    class Small(FakePool):
        def submit(self, job, needs):
            if job.config["width"] == 4:
                raise UserError("needs 8 GPUs, and no place has more than 2")
            return super().submit(job, needs)

    drive(work, Small(2, perform=Ends()))
    assert [line.partition(" ")[2] for line in work.report()] == [
        "needs 8 GPUs, and no place has more than 2"
    ]
    assert len(work.results) == 4


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_has_runs_saved_and_the_next_command_ends_the_sweep(toy, work, number):
    once = iter([number])

    def perform(job):
        for signal_ in once:  # a second one would not wait
            os.kill(os.getpid(), signal_)
        return {"status": "stopped"}

    pool = FakePool(2, perform=perform)
    assert not Driver(work, pool).run()
    assert pool.stops == 1 and not pool.open and len(work.results) == 0
    assert (work.folder / "results.csv").exists()
    again = drive(work_of(toy, toy / "s.yaml"), FakePool(2, perform=Ends()))
    assert len(again.results) == 4 and not again.reasons


def test_a_second_interrupt_does_not_wait_for_runs_to_save(work):
    release = threading.Event()

    class Slow(FakePool):
        def stop(self):
            super().stop()
            if self.stops == 1:
                os.kill(os.getpid(), signal.SIGINT)

    def perform(job):
        os.kill(os.getpid(), signal.SIGINT)
        release.wait(300)
        return {"status": "stopped"}

    pool = Slow(1, perform=perform)
    with pytest.raises(KeyboardInterrupt):
        Driver(work, pool).run()
    assert pool.stops == 2 and not pool.open
    release.set()


def test_failures_are_forgotten_with_the_driver(toy):
    path = write_file(toy, SWEEP)
    for _ in range(2):
        work, perform = work_of(toy, path), Ends(*[RunFailed("broken")] * 9)
        drive(work, FakePool(1, perform=perform))
        assert perform.calls[4] == 2 and list(work.reasons.values()) == ["failed 2 times: broken"]


def test_a_finished_run_that_has_lost_its_log_is_named_and_trained_again(toy):
    """As after `rm -rf results` in the midst of a sweep: rows of its metrics would be missing."""
    path = write_file(toy, SWEEP + "metrics: true\n")

    def perform(job):
        if job.config["width"] == 2:  # the last but one
            shutil.rmtree(job.run_dir.parent)
        job.run_dir.mkdir(parents=True, exist_ok=True)
        (job.run_dir / "metrics.jsonl").write_text('{"step": 1, "train_loss": 2.0}\n')
        (job.run_dir / "summary.json").write_text(json.dumps(DONE))
        return DONE

    work = drive(work_of(toy, path), FakePool(1, perform=perform))
    gone = {point.config.width for run, point in work.points.items() if run in work.reasons}
    assert gone == {1, 3, 4}
    assert all("is gone; the same command" in why for why in work.reasons.values())
    assert (work.folder / "metrics.csv").read_text().count("\n") == 1 + 1
    run = next(point.run for point in work.points.values() if point.config.width == 2)
    (work.folder / run / "metrics.jsonl").unlink()  # its summary says finished
    assert len(work_of(toy, path).left) == 4
    assert (work.folder / f"damaged-{run}").exists()  # nothing is lost
    assert not drive(work_of(toy, path), FakePool(1, perform=Ends())).reasons


def test_a_driver_keeps_of_a_summary_what_it_needs():
    """Thousands of runs stay in memory: 10,000 took 70 MB with all that they say."""
    packages = dict.fromkeys("torch accelerate numpy datasets timm".split(), "1.0")
    environment = {"commit": "c0ffee", "packages": packages, "device": "AMD EPYC"}
    roles = {f"role_{i}": i for i in range(10)}
    sent = pickle.dumps({**DONE, "environment": environment, "parameters_by_role": roles})
    tracemalloc.start()
    held = [shortened(pickle.loads(sent)) for _ in range(100)]
    assert tracemalloc.get_traced_memory()[0] < 100 * 1500
    tracemalloc.stop()
    gone = {"parameters_by_role": None, "files": None}
    assert held[0] == {**DONE, "environment": {"commit": "c0ffee"}, **gone}


def test_no_stderr_or_a_full_one_ends_no_sweep(toy, monkeypatch):
    for seed, stderr in enumerate((None, open("/dev/full", "w"))):
        monkeypatch.setattr("sys.stderr", stderr)
        work = work_of(toy, write_file(toy, SWEEP), overrides=[f"training.steps={seed + 3}"])
        assert len(drive(work, FakePool(1, perform=Ends())).results) == 4


def test_a_run_whose_log_is_on_a_full_disk_still_has_an_outcome(tmp_path, monkeypatch):
    """Neither what it prints nor its traceback can be written there."""
    monkeypatch.setattr(task, "open_plain", lambda path, mode: open("/dev/full", mode))
    for number, name in ((1, "stdout"), (2, "stderr")):
        monkeypatch.setattr(sys, name, open(number, "w", closefd=False))
    before = [os.fstat(number) for number in (1, 2)]
    outcome = task.perform(Job("a", "no_such", {}, tmp_path / "run"), Needs())
    assert outcome["error"] == "user" and "no_such" in outcome["message"]
    assert [os.fstat(number).st_ino for number in (1, 2)] == [one.st_ino for one in before]


def test_tables_are_written_now_and_then_and_always_at_the_end(work, monkeypatch):
    written = []
    monkeypatch.setattr(work, "write", lambda final: written.append(final))
    drive(work, FakePool(2, perform=Ends()))
    assert written == [False, True]


def test_status_says_what_is_done_at_work_failed_and_left(toy, capsys):
    path = write_file(toy, SWEEP + "retries: 0\n")
    work = work_of(toy, path)
    slow = {**DONE, "wall_seconds": 7200.0}

    def perform(job):
        if job.config["width"] == 4:
            raise RunFailed("broken")
        if job.config["width"] == 1:
            return {"status": "stopped"}
        job.run_dir.mkdir(parents=True, exist_ok=True)
        (job.run_dir / "summary.json").write_text(json.dumps(slow))
        if job.config["width"] == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return slow

    Driver(work, FakePool(1, perform=perform)).run()
    names = {point.config.width: run for run, point in work.points.items()}
    (work.folder / names[1]).mkdir()
    (work.folder / names[1] / "metrics.jsonl").write_text('{"step": 1, "train_loss": 2.5}\n{"st')
    with locked(work.folder / names[1], "run"):
        command.main(["status", str(path), "--results", str(toy.parent / "results")])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("2 of 4 runs done, 1 at work, 1 failed, 0 left")
    assert lines[2].split() == [names[1], "1", "2", "2.5"]
    assert lines[3].startswith(f"failed: {names[4]}")
    assert lines[4].startswith("about ") and lines[4].endswith("left, with 1 at work")
    assert "1 left" in status(work_of(toy, path)).splitlines()[0]


def test_needs_stand_in_the_file(toy):
    """A run has a GPU, and a process for each of several, unless its file says otherwise."""

    def needs(text):
        path = write_file(toy, f"grid: {{width: [1, 2, 4]}}\ncurves: {{a: {{}}}}\n{text}")
        work = work_of(toy, path)
        return [work.needs(point) for point in work.points.values()]

    assert needs("") == [Needs(1, 1)] * 3
    four = "adjust: [{where: {width: [4]}, gpus: 8}]"
    assert needs(four) == [Needs(1, 1), Needs(1, 1), Needs(8, 8)]
    adjusted = "processes: 2\nadjust: [{where: {width: [2, 4]}, gpus: 16}"
    assert needs(adjusted + "]") == [Needs(1, 2), Needs(16, 16), Needs(16, 16)]
    assert needs(adjusted + ", {where: {width: [4]}, processes: 2}]")[2] == Needs(16, 2)
    assert [one.nodes for one in needs(adjusted + "]")] == [1, 2, 2]
    for text, message in (
        ("gpus: 12", "gpus 12, processes 12: above 8 GPUs a run has those of whole machines"),
        ("gpus: 16\nprocesses: 3", "gpus 16, processes 3: above 8 GPUs"),
        ("gpus: 0", "gpus: expected"),
    ):
        with pytest.raises(UserError, match=message):
            needs(text)


def test_commands_that_only_look_start_without_torch(toy):
    """But for what the experiment's own cost takes; the toy's takes none."""
    path = str(write_file(toy, SWEEP))
    commands = [["--help"], ["run", "--help"], ["run", path, "--dry-run"], ["status", path]]
    code = (
        f"import sys\nfrom sweeps.__main__ import main\nfor words in {commands!r}:\n"
        "    try: main(words)\n    except SystemExit as end: assert not end.code, words\n"
        "    assert not {'torch', 'optuna'} & set(sys.modules), words"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_second_driver_is_refused_until_the_first_is_killed(toy, capsys, monkeypatch):
    monkeypatch.setattr(command, "locked", partial(locked, patience=0))
    file, results = write_file(toy, SWEEP), toy.parent / "results"
    hold = "import sys, time; from pathlib import Path; from training.files import locked\n"
    hold += "with locked(Path(sys.argv[1]), 'sweep'): print('held', flush=True); time.sleep(100)"
    folder = results / toy.name / "s"
    first = subprocess.Popen(
        [sys.executable, "-c", hold, folder], cwd=ROOT, text=True, stdout=subprocess.PIPE
    )
    assert first.stdout.readline() == "held\n"
    words = ["run", str(file), "--results", str(results)]
    with pytest.raises(SystemExit) as end:
        command.main(words)
    said = capsys.readouterr().err
    assert end.value.code == 2 and said.count("\n") == 1
    assert f"{folder}: another driver is at work here; `python -m sweeps status {file}`" in said
    command.main([*words, "--dry-run"])  # who only looks is not refused
    first.kill()
    first.wait()
    left = folder / ".results.csv.0a1b.tmp"  # as a driver leaves it that is killed while it writes
    left.touch()
    monkeypatch.setattr(Driver, "run", lambda self: False)
    with pytest.raises(SystemExit) as end:
        command.main(words)
    assert end.value.code == 75  # it drives, and is stopped
    assert not left.exists()


def test_a_run_that_another_process_holds_is_not_submitted_before_it_is_free(
    work, impatient, monkeypatch
):
    [held] = [work.folder / run for run, point in work.points.items() if point.config.width == 4]
    perform, before = Ends(Busy("held by another")), []
    with ExitStack() as stack:
        stack.enter_context(locked(held, "run"))

        def release():
            before.append(perform.calls[4])
            stack.close()

        looks = iter(range(9))  # at the folder, each after BUSY_SECONDS
        is_locked = driving.is_locked

        def look(folder):
            if next(looks) == 5:
                release()
            return is_locked(folder)

        monkeypatch.setattr(driving, "is_locked", look)
        drive(work, FakePool(2, perform=perform))
    assert before == [1] and perform.calls[4] == 2 and not work.reasons


@pytest.mark.parametrize("end", [Lost("node gone"), RunFailed("no"), {"status": "stopped"}])
def test_a_run_that_starts_anew_does_so_once(toy, impatient, end):
    """What it has trained in an earlier command is discarded, and not what it has in this one."""
    work = work_of(toy, write_file(toy, SWEEP + "set: {checkpoint.resume: never}\n"))
    pool = FakePool(2, perform=Ends(Busy("held by another"), end))
    drive(work, pool)
    configs = [job.config for job, _ in pool.submitted if job.config["width"] == 4]
    assert [one["checkpoint"]["resume"] for one in configs] == ["never", "never", "auto"]
