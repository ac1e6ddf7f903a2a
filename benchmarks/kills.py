"""Runs of every experiment that are killed where it hurts, and what they come to.

    python -m benchmarks.kills [--families ...] [--kills 52] [--json FILE]

The experiments at their smallest (tests/experiment_cases.py), from files, with a cache to be built,
in one process and in two. A run gets SIGKILL four times, once each, in random order, in the midst
of a training step, an evaluation and the writing of a checkpoint, after a first one while its data
are prepared: at a random call of the function concerned, after a random part of the time that it
takes in an undisturbed run. Of two processes one gets it and the other is ended as torchrun does.
Then the run goes on to its end, and its logs, observations and weights are compared byte for byte
with those of the undisturbed run, and its seal must hold. Beside each experiment's own optimiser
nanolm_c4 has all others. Family `search` kills the driver of a search at random moments, and counts
the trials that it ends with. Prints JSON.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import harness
from tests.experiment_cases import CASES, FILES, SHARDS, write_files
from training import loop, runs
from training.checkpoints import checkpoint
from training.config import load, parse_overrides
from training.experiment import Experiment, load_experiment

PHASES = ("data", "step", "evaluation", "checkpoint")
MUON = (
    "optimizer.name=muon",
    "prescription.parameterization=spectral",
    "prescription.alignment=null",
)
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
SEARCH, TRIALS = "search", 50  # a family of its own, and the trials of its search
# What makes a case's run read files: two of them are embedded by default.
SOURCES = {
    "vit_imagenet": [*SHARDS, "data.augmentation.mix_group=4"],
    "vit_cifar5m": [*FILES[:3], "data.repeat=true"],
}
RUN = (
    "training.steps=12",
    "training.eval_every=3",
    "training.log_every=1",
    "training.probe_every=4",
    "checkpoint.every=2",
    "checkpoint.minutes=null",
    "checkpoint.final=true",
)


@dataclass
class Aim:
    """Where a process kills itself: at the n-th call in a phase, after so many seconds of it."""

    phase: str
    call: int
    delay: float
    rank: int = 0


class Watched:
    """Times every phase of the run in this process, and kills it where the aim says."""

    def __init__(self, folder: Path, aim: Aim | None) -> None:
        self.folder, self.aim = folder, aim
        self.times: dict[str, list[float]] = {phase: [] for phase in PHASES}
        for owner, name, phase in (
            (Experiment, "run", "data"),
            (loop, "train", "train"),
            (loop.Loop, "_forward_backward", "step"),
            (loop, "evaluate", "evaluation"),
            (checkpoint, "save", "checkpoint"),
        ):
            setattr(owner, name, self.around(getattr(owner, name), phase))

    def around(self, function: Callable[..., Any], phase: str) -> Callable[..., Any]:
        """The function, as one call of a phase; data are prepared before training begins."""

        def watched(*args: Any, **kwargs: Any) -> Any:
            if phase == "train":
                self.end("data")
                return function(*args, **kwargs)
            self.begin(phase)
            result = function(*args, **kwargs)
            if phase != "data":
                self.end(phase)
            return result

        return watched

    def begin(self, phase: str) -> None:
        self.times[phase].append(time.perf_counter())
        aim = self.aim
        if aim and (aim.phase, aim.call) == (phase, len(self.times[phase])):
            threading.Timer(aim.delay, self.kill).start()

    def kill(self) -> None:
        """Ends this process, and says that it was the aim: one that fails is no kill."""
        (self.folder / "killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)

    def end(self, phase: str) -> None:
        self.times[phase][-1] = time.perf_counter() - self.times[phase][-1]
        aim = self.aim
        if aim and (aim.phase, aim.call) == (phase, len(self.times[phase])):
            (self.folder / "late").touch()  # the kill is still to come: it missed the phase


class Family:
    """One experiment's small run, with its files."""

    def __init__(self, name: str, root: Path) -> None:
        self.case_name, self.words, self.ranks = FAMILIES[name]
        self.case, self.files = CASES[self.case_name], root / "files"
        if not self.files.exists():
            self.files.mkdir(parents=True)
            write_files(self.case, self.files)
        self.experiment = load_experiment(self.case_name)
        for module in ("data", "model"):  # in this process, so that its children need not
            importlib.import_module(f"{self.case_name}.{module}")

    def lived(self, folder: Path, aim: Aim | None = None) -> bool:
        """Trains the run in `folder`, with a cache beside it; False if it was killed."""
        folder.mkdir(parents=True, exist_ok=True)
        for mark in ("late", "killed"):
            (folder / mark).unlink(missing_ok=True)
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
        pids = [self._fork(folder, aim, rank, port) for rank in range(self.ranks)]
        codes: dict[int, int] = {}
        while len(codes) < len(pids):
            pid, status = os.wait()
            codes[pid] = os.waitstatus_to_exitcode(status)
            for other in set(pids) - codes.keys() if codes[pid] else ():
                os.kill(other, signal.SIGTERM)
                time.sleep(0.2)
                os.kill(other, signal.SIGKILL)
        if (folder / "killed").exists():
            return False
        if any(codes.values()):
            raise SystemExit(f"{folder}: ended with {codes}\n{(folder / 'log').read_text()}")
        return True

    def _fork(self, folder: Path, aim: Aim | None, rank: int, port: int) -> int:
        pid = os.fork()
        if pid:
            return pid
        code = 1
        try:
            log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            if self.ranks > 1:
                os.environ.update(
                    RANK=str(rank),
                    LOCAL_RANK=str(rank),
                    WORLD_SIZE=str(self.ranks),
                    LOCAL_WORLD_SIZE=str(self.ranks),
                    MASTER_ADDR="127.0.0.1",
                    MASTER_PORT=str(port),
                )
            watched = Watched(folder, aim if aim and aim.rank == rank else None)
            words = [
                *self.case.small,
                *SOURCES.get(self.case_name, ()),
                *RUN,
                *self.words,
                f"data.cache_dir={folder}/cache",
            ]
            words = [word.format(files=self.files) for word in words]
            config = load(self.experiment.config, self.case.config, words)
            self.experiment.run(config, folder / "run")
            lines = [f"{phase} {t:.6f}" for phase, ts in watched.times.items() for t in ts]
            (folder / f"times-{rank}").write_text("\n".join(lines))
            code = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(code)

    def left(self, folder: Path) -> dict[str, bytes]:
        """What a run must end with, whatever has happened to it; RunError if its seal is broken."""
        run = folder / "run"
        if leftovers := [*(folder / "cache").glob(".*.tmp")]:
            raise SystemExit(f"not swept: {leftovers}")
        runs.done(run, str((runs.summary(run) or {}).get("run")))
        patterns = ("*.jsonl", "observations/*", "checkpoints/step-00000012/*.safetensors")
        return {
            str(path.relative_to(run)): path.read_bytes()
            for pattern in patterns
            for path in sorted(run.glob(pattern))
            if path.name != "timing.jsonl"
        }

    def sequence(self, folder: Path, times: Mapping[str, float], draw: random.Random) -> list[Aim]:
        """A run that is killed in every phase; where those kills were that hit their phase."""
        hit = []
        for phase in ("data", *draw.sample(PHASES[1:], 3)):
            call = draw.randint(1, 2) if phase in ("step", "checkpoint") else 1
            aim = Aim(phase, call, draw.uniform(0, times[phase]), draw.randrange(self.ranks))
            if not self.lived(folder, aim) and not (folder / "late").exists():
                hit.append(aim)
        if not self.lived(folder):
            raise SystemExit(f"{folder}: killed by nobody")
        return hit


def series(name: str, kills: int, root: Path) -> dict[str, Any]:
    """Kills of one family until so many have hit their phase."""
    family, draw, begun = Family(name, root), random.Random(0), time.perf_counter()
    if not family.lived(root / "whole"):
        raise SystemExit(f"{root}: killed by nobody")
    whole = family.left(root / "whole")
    lines = [line.split() for line in (root / "whole" / "times-0").read_text().splitlines()]
    times = {
        phase: statistics.median(float(time) for own, time in lines if own == phase)
        for phase in PHASES
    }
    hits: list[Aim] = []
    differ: list[int] = []
    count = 0
    while len(hits) < kills:
        folder = root / str(count)
        hits += family.sequence(folder, times, draw)
        if family.left(folder) != whole:
            differ.append(count)
        count += 1
        print(f"{name}: {len(hits)} kills, {len(differ)} runs differ", file=sys.stderr)
    return {
        "family": name,
        "kills": len(hits),
        "runs": count,
        "runs_that_differ": differ,
        **{phase: sum(aim.phase == phase for aim in hits) for phase in PHASES},
        "files_compared": len(whole),
        "seconds": time.perf_counter() - begun,
    }


def searched(kills: int, root: Path) -> dict[str, Any]:
    """Kills of the driver of a search, in as many searches as that takes."""
    case, draw = CASES["nanolm_c4"], random.Random(0)
    (root / "files").mkdir()
    write_files(case, root / "files")
    words = [word.format(files=root / "files") for word in (*case.small, *RUN)]
    search = {
        "experiment": "nanolm_c4",
        "config": str(case.config),
        "set": {**parse_overrides([*words, f"data.cache_dir={root}/cache"])},
        "search": {"optimizer.lr": [1e-3, 1e-1], "optimizer.beta1": [0.1, 0.9]},
    }
    search |= {"trials": TRIALS, "parallel": 2, "rounds": 1}
    file = root / "search.yaml"
    file.write_text(json.dumps(search))  # JSON is YAML
    hits, searches, differ = 0, 0, list[int]()
    while hits < kills:
        results = root / str(searches)
        command = [sys.executable, "-m", "sweeps", "search", str(file), "--results", str(results)]
        command += ["--workers", "2", "--threads", "1"]
        with open(root / "log", "a") as log:
            driver = subprocess.Popen(command, stdout=log, stderr=log)
            try:
                # Half of them while it starts, the others while its trials run.
                code = driver.wait(draw.uniform(0, 30 if draw.random() < 0.5 else 8))
            except subprocess.TimeoutExpired:
                driver.kill()
                hits += driver.wait() == -signal.SIGKILL
                print(f"search {searches}: {hits} kills", file=sys.stderr)
                if hits < kills:
                    continue
                code = subprocess.call(command, stdout=log, stderr=log)
        if code:
            raise SystemExit(f"search: ended with {code}\n{(root / 'log').read_text()}")
        with open(results / "nanolm_c4/search/trials.csv", newline="") as table:
            trials = [int(row["trial"]) for row in csv.DictReader(table) if row["loss"]]
        if trials != [*range(TRIALS)]:
            differ.append(searches)
        searches += 1
    return {
        "family": "search",
        "kills": hits,
        "runs": searches,
        "runs_that_differ": differ,
        "trials": TRIALS,
    }


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = harness.parser(__doc__)
    parser.add_argument(
        "--families", nargs="+", choices=[*FAMILIES, SEARCH], default=[*FAMILIES, SEARCH]
    )
    parser.add_argument("--kills", type=int, default=52, help="of each family, at least")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Prints JSON; exit code 1 if a run differs."""
    args = parse(argv)
    torch.set_num_threads(1)
    rows = []
    for name in args.families:
        with tempfile.TemporaryDirectory() as folder:
            kill = searched if name == SEARCH else partial(series, name)
            rows.append(kill(args.kills, Path(folder)))
    harness.show(args, "cpu", rows, load=os.getloadavg())
    raise SystemExit(any(row["runs_that_differ"] for row in rows))


if __name__ == "__main__":
    main()
