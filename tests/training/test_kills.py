"""Runs of every experiment that are killed where it hurts, and what they come to.

The experiments at their smallest, from files, with a cache to be built, in one process and in two.
A run gets SIGKILL four times, once each, in random order, in the midst of a training step, an
evaluation and the writing of a checkpoint, after a first one while its data are prepared: at a
random call of the function concerned, after a random part of the time that it takes in an
undisturbed run. Of two processes one gets it and the other is ended as torchrun does. Then the run
goes on to its end, and its logs, observations and weights are compared byte for byte with those of
the undisturbed run, and its seal must hold. Beside each experiment's own optimiser nanolm_c4 has
all others. Family `search` kills the driver of a search at random moments, and counts its trials.

`KILLS=52 python -m pytest -n 0 -rP -k family tests/training/test_kills.py` kills each family at
least 52 times and says how often in which phase, as in benchmarks/results/cpu_kills.json.
"""

import contextlib
import csv
import importlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
import traceback
from dataclasses import dataclass

import pytest

from tests.experiment_cases import CASES, FILES, MUON, ROOT, SHARDS, write_files
from tests.processes import meeting
from training import loop, runs
from training.checkpoints import checkpoint
from training.config import load, parse_overrides
from training.experiment import Experiment, load_experiment

pytestmark = pytest.mark.thorough
KILLS = int(os.environ.get("KILLS", 3))
PHASES = ("data", "step", "evaluation", "checkpoint")
OTHERS = ("sgd", "adam_atan2", "adafactor", "adam_param_scaling")
KINDS = {  # experiment and words of its command
    **{name: (name, ()) for name in CASES},
    **{f"nanolm_c4_{name}": ("nanolm_c4", (f"optimizer.name={name}",)) for name in OTHERS},
    "nanolm_c4_muon": ("nanolm_c4", MUON),
    "nanolm_c4_muon_observed": ("nanolm_c4", (*MUON, "training.observe_every=4")),
}
FAMILIES = {  # and number of processes
    **{name: (*kind, 1) for name, kind in KINDS.items()},
    **{f"{name}_two_processes": (*kind, 2) for name, kind in KINDS.items()},
}
OFTEN = ("vit_imagenet", "bart_span_denoise")  # the others where KILLS is given
TRIALS = 50  # of a search
# What makes a case's run read files: two of them are embedded by default.
SOURCES = {
    "vit_imagenet": [*SHARDS, "data.augmentation.mix_group=4"],
    "vit_cifar5m": [*FILES[:3], "data.repeat=true"],
}
RUN = (
    "training.steps=12 training.eval_every=3 training.log_every=1 training.probe_every=4 "
    "checkpoint.every=2 checkpoint.minutes=null checkpoint.final=true"
).split()


@dataclass
class Aim:
    """Where a process kills itself: at the n-th call in a phase, after so many seconds of it."""

    phase: str
    call: int
    delay: float
    rank: int = 0


class Watched:
    """Times every phase of the run in this process, and kills it where the aim says."""

    def __init__(self, folder, aim):
        self.folder, self.aim = folder, aim
        self.times = {phase: [] for phase in PHASES}
        for owner, name, phase in (
            (Experiment, "run", "data"),
            (loop, "train", "train"),
            (loop.Loop, "_forward_backward", "step"),
            (loop, "evaluate", "evaluation"),
            (checkpoint, "save", "checkpoint"),
        ):
            setattr(owner, name, self.around(getattr(owner, name), phase))

    def around(self, function, phase):
        """The function, as one call of a phase; data are prepared before training begins."""

        def watched(*args, **kwargs):
            if phase == "train":
                self.end("data")
                return function(*args, **kwargs)
            self.begin(phase)
            result = function(*args, **kwargs)
            if phase != "data":
                self.end(phase)
            return result

        return watched

    def is_aimed(self, phase):
        return self.aim and (self.aim.phase, self.aim.call) == (phase, len(self.times[phase]))

    def begin(self, phase):
        self.times[phase].append(time.perf_counter())
        if self.is_aimed(phase):
            threading.Timer(self.aim.delay, self.kill).start()

    def kill(self):
        """Ends this process, and says that it was the aim: one that fails is no kill."""
        (self.folder / "killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)

    def end(self, phase):
        self.times[phase][-1] = time.perf_counter() - self.times[phase][-1]
        if self.is_aimed(phase):
            (self.folder / "late").touch()  # the kill is still to come: it missed the phase


class Family:
    """One experiment's small run, with its files."""

    def __init__(self, name, root):
        case, words, self.ranks = FAMILIES[name]
        self.case, files = CASES[case], root / "files"
        files.mkdir(parents=True)
        write_files(self.case, files)
        self.experiment = load_experiment(case)
        words = [*self.case.small, *SOURCES.get(case, ()), *RUN, *words]
        self.words = [word.format(files=files) for word in words]

    def whole(self, folder):
        """What an undisturbed run leaves, and the time of each phase. What it has imported is then
        imported here: two thirds of the time of a run with sharding, were every child to do so."""
        assert self.lived(folder)
        for module in (folder / "modules-0").read_text().split():
            with contextlib.suppress(Exception):
                importlib.import_module(module)
        times = json.loads((folder / "times-0").read_text())
        return self.left(folder), {name: statistics.median(times[name]) for name in PHASES}

    def lived(self, folder, aim=None):
        """Trains the run in `folder`, with a cache beside it; False if it was killed."""
        folder.mkdir(parents=True, exist_ok=True)
        for mark in ("late", "killed"):
            (folder / mark).unlink(missing_ok=True)
        told, store = meeting(self.ranks) if self.ranks > 1 else ({}, None)
        pids, codes = [self.fork(folder, aim, rank, told) for rank in range(self.ranks)], {}
        while len(codes) < len(pids):
            for pid in set(pids) - codes.keys():
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    codes[pid] = os.waitstatus_to_exitcode(status)
                    for other in set(pids) - codes.keys() if codes[pid] else ():
                        os.kill(other, signal.SIGTERM)
                        time.sleep(0.2)
                        os.kill(other, signal.SIGKILL)
            time.sleep(0.005)
        del store
        if (folder / "killed").exists():
            return False
        assert not any(codes.values()), f"{folder}: {codes}\n{(folder / 'log').read_text()}"
        return True

    def fork(self, folder, aim, rank, told):
        pid = os.fork()
        if pid:
            return pid
        code = 1
        try:
            log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)
            if told:
                os.environ.update(told, RANK=str(rank), LOCAL_RANK=str(rank))
            watched = Watched(folder, aim if aim and aim.rank == rank else None)
            words = [*self.words, f"data.cache_dir={folder}/cache"]
            self.experiment.run(
                load(self.experiment.config, self.case.config, words), folder / "run"
            )
            (folder / f"times-{rank}").write_text(json.dumps(watched.times))
            (folder / f"modules-{rank}").write_text("\n".join([*sys.modules]))
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)

    def left(self, folder):
        """What a run must end with, whatever has happened to it; RunError if its seal is broken."""
        run = folder / "run"
        assert not [*(folder / "cache").glob(".*.tmp")], "not swept"
        runs.done(run, str((runs.summary(run) or {}).get("run")))
        patterns = ("*.jsonl", "observations/*", "checkpoints/step-00000012/*.safetensors")
        return {
            str(path.relative_to(run)): path.read_bytes()
            for pattern in patterns
            for path in sorted(run.glob(pattern))
            if path.name != "timing.jsonl"
        }

    def sequence(self, folder, times, draw):
        """A run that is killed in every phase; the phases of those kills that hit theirs."""
        hit = []
        for phase in ("data", *draw.sample(PHASES[1:], 3)):
            call = draw.randint(1, 2) if phase in ("step", "checkpoint") else 1
            aim = Aim(phase, call, draw.uniform(0, times[phase]), draw.randrange(self.ranks))
            if not self.lived(folder, aim) and not (folder / "late").exists():
                hit.append(phase)
        assert self.lived(folder), f"{folder}: killed by nobody"
        return hit


@pytest.mark.parametrize("name", FAMILIES if "KILLS" in os.environ else OFTEN)
def test_a_run_of_a_family_that_is_killed_in_every_phase_ends_as_if_nothing_had_been(
    name, tmp_path
):
    family, draw, hits, count = Family(name, tmp_path), random.Random(0), [], 0
    whole, times = family.whole(tmp_path / "whole")
    assert len(whole) >= 3
    while len(hits) < KILLS:
        hits += family.sequence(tmp_path / str(count), times, draw)
        assert family.left(tmp_path / str(count)) == whole
        count += 1
    print(f"{name}: {count} runs,", *(f"{hits.count(phase)} {phase}" for phase in PHASES))


@pytest.mark.skipif("KILLS" not in os.environ, reason="takes minutes: KILLS=20")
def test_a_family_of_searches_whose_driver_is_killed_ends_with_its_number_of_trials(tmp_path):
    case, draw, hits, count = CASES["nanolm_c4"], random.Random(0), 0, 0
    (tmp_path / "files").mkdir()
    write_files(case, tmp_path / "files")
    words = [word.format(files=tmp_path / "files") for word in (*case.small, *RUN)]
    search = {
        "experiment": "nanolm_c4",
        "config": str(case.config),
        "set": {**parse_overrides([*words, f"data.cache_dir={tmp_path}/cache"])},
        "search": {"optimizer.lr": [1e-3, 1e-1], "optimizer.beta1": [0.1, 0.9]},
    } | {"trials": TRIALS, "parallel": 2, "rounds": 1}
    file = tmp_path / "search.yaml"
    file.write_text(json.dumps(search))  # JSON is YAML
    while hits < KILLS:
        results, done = tmp_path / str(count), False
        words = ["search", file, "--results", results, "--workers", "2", "--threads", "1"]
        while not done:
            with open(tmp_path / "log", "a") as log:
                driver = subprocess.Popen(
                    [sys.executable, "-m", "sweeps", *words], cwd=ROOT, stdout=log, stderr=log
                )
            # Half of them while it starts, the others while its trials run.
            seconds = draw.uniform(0, 30 if draw.random() < 0.5 else 8)
            try:
                code = driver.wait(seconds if hits < KILLS else None)
                assert code == 0, (tmp_path / "log").read_text()
                done = True
            except subprocess.TimeoutExpired:
                driver.kill()
                hits += driver.wait() == -signal.SIGKILL
        with open(results / "nanolm_c4/search/trials.csv", newline="") as table:
            trials = [int(row["trial"]) for row in csv.DictReader(table) if row["loss"]]
        assert trials == [*range(TRIALS)]
        count += 1
    print(f"search: {count} runs, {hits} kills")
