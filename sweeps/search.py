"""Searches: the constants on each layer type's learning rate, by Bayesian optimisation.

    python -m sweeps search nanolm_c4/sweeps/constants.yaml --workers 2 [--preset laptop]

One study per combination of the grid: trials of an ordinary run each, log-uniform in the searched
keys, at most `parallel` in progress at a time. The first trial has every constant at 1, so that
what tuning gains is measured. If the best value of a constant lies at or near an edge of its range,
the range moves there and the study is repeated. `constants.yaml` has the averages over all trials
that are as good as the best (Everett et al., App. C.2), study by study as they are complete, and
`trials.csv` every trial that has ended.

A search can be stopped, killed and continued; several launchers, on machines that share the results
folder, can work on one. A trial whose launcher is gone is taken over, from its run's checkpoint.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import shlex
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from sweeps import search_rules, workers
from sweeps.search_file import RATE, Round, Search, Study, load_search
from sweeps.trials import Trial
from sweeps.workers import Worker
from training import environment, runs
from training.config import Section, read_yaml
from training.errors import RunError, one_line_errors
from training.files import is_locked, locked, write_text
from training.signals import STOPPED

POLL_SECONDS = 2.0  # between looks at trials that other launchers hold


@dataclass(frozen=True)
class Task:
    """A trial that a worker of this launcher runs."""

    round: Round
    number: int
    values: dict[str, float]
    config: Section
    run: str


class Scheduler:
    """Hands out trials: first those whose launcher is gone, then new ones, study by study."""

    def __init__(self, search: Search) -> None:
        self.search, self.journal = search, search.journal
        self.condition = threading.Condition(threading.RLock())
        self.claims: dict[str, ExitStack] = {}
        self.entries: dict[str, dict[str, Any]] = {}
        self.final_rows: dict[str, list[list[Any]]] = {}
        self.broken: dict[str, str] = {}
        self.reasons: list[str] = []
        self.stopped = False
        self.error: Exception | None = None
        with self.journal.held():
            # What failed in an earlier launch is replaced in this one.
            self.replaced = {
                (r.key, t.number) for s in search.studies for r in search.rounds(s)
                for t in r.trials if t.state == "failed"
            }  # fmt: skip
            self._write()

    def take(self) -> Task | None:
        """The next trial to run; waits while others hold what is left; None when all is done."""
        with self.condition:
            while not self.stopped:
                task = self._next()
                if task is not None:
                    return task
                if not self.unsettled():
                    return None
                self.condition.wait(POLL_SECONDS)
            return None

    def unsettled(self) -> list[Study]:
        """The studies that are neither complete nor given up in this launch."""
        settled = self.entries.keys() | self.broken.keys()
        return [study for study in self.search.studies if study.name not in settled]

    def _next(self) -> Task | None:
        for study in self.unsettled():
            with self.journal.held():
                task = self._next_of(study)
            if task is not None:
                return task
        return None

    def _next_of(self, study: Study) -> Task | None:
        """A trial of one study; trials whose run is done already are told on the way."""
        while True:
            rounds = self.search.rounds(study)
            if self._settles(rounds):
                self._write()
                return None
            task = self._orphan(rounds[-1]) or self._new(rounds)
            if task is None or not self._is_told(task):
                return task

    def _orphan(self, current: Round) -> Task | None:
        """A running trial that nobody is at work on."""
        for trial in current.running:
            task = self._task(current, trial)
            # A worker whose launcher was killed saves its run before it goes.
            mine = task.run in self.claims
            if not mine and not is_locked(self._run_dir(task)) and self._claim(task):
                return task
        return None

    def _new(self, rounds: Sequence[Round]) -> Task | None:
        """A new trial, if the study may have one more."""
        current = rounds[-1]
        fresh, parallel = self._fresh(current), self.search.config.parallel
        if len(fresh) >= current.wanted or len(current.running) >= parallel:
            return None
        values = self.search.next_values(rounds, fresh)
        task = self._task(current, self.journal.add(current.key, values, current.ranges))
        return task if self._claim(task) else None

    def _fresh(self, current: Round) -> list[Trial]:
        """The trials of a round without those that failed in an earlier launch."""
        return [t for t in current.trials if (current.key, t.number) not in self.replaced]

    def _task(self, current: Round, trial: Trial) -> Task:
        config, run = self.search.run(current.study, trial.values)
        return Task(current, trial.number, trial.values, config, run)

    def _run_dir(self, task: Task) -> Path:
        return self.search.folder / task.run

    def _claim(self, task: Task) -> bool:
        """Takes a trial for this launcher, until it is told or given back, or the launcher ends.

        The run's own lock would come too late for this: a worker takes it when it has loaded what
        it trains on.
        """
        folder = self._run_dir(task) / "claim"
        if is_locked(folder):
            return False
        claim = ExitStack()
        claim.enter_context(locked(folder, "trial"))
        self.claims[task.run] = claim
        return True

    def _release(self, task: Task) -> None:
        self.claims.pop(task.run).close()
        self.condition.notify_all()

    def _is_told(self, task: Task) -> bool:
        """Whether the trial's run was done, or is unusable, and the trial could be told now."""
        try:
            summary = runs.done(self._run_dir(task))
        except RunError as error:
            self._give_up(task, str(error))
            return True
        if summary is None:
            return False
        self._tell(task, summary)
        return True

    def finish(self, task: Task, summary: Mapping[str, Any]) -> None:
        """Records the result of a trial's run."""
        with self._changing():
            self._tell(task, summary)
            self._write()

    def put_back(self, task: Task) -> None:
        """Leaves a trial to whoever takes it next."""
        with self._changing():
            self._release(task)

    def fail(self, task: Task, reason: str) -> None:
        """Notes a failure; the trial is tried again, or ends as failed when tries are used up."""
        with self._changing():
            note = self.journal.notes(task.round.key).get(task.number, {})
            failures = [*note.get("failures", []), reason]
            self.journal.note(task.round.key, task.number, {"failures": failures})
            if len(failures) <= self.search.config.retries:
                self._release(task)
            else:
                self._give_up(task, f"failed {len(failures)} times: {reason}")
                self._write()

    def give_up(self, task: Task, reason: str) -> None:
        """Ends a trial as failed; the rest goes on."""
        with self._changing():
            self._give_up(task, reason)
            self._write()

    def stop(self, error: Exception | None = None) -> None:
        """Hands out nothing more; the first `error` given is what the launcher ends with."""
        self.stopped, self.error = True, self.error or error
        with self.condition:
            self.condition.notify_all()

    @contextmanager
    def _changing(self) -> Iterator[None]:
        with self.condition, self.journal.held():
            yield

    def _tell(self, task: Task, summary: Mapping[str, Any]) -> None:
        loss = objective(summary, task.config)
        if loss is None:
            self._give_up(task, "the loss before the first update is not finite")
            return
        note = {"status": summary["status"], "run": task.run}
        self._end(task, {**note, "commit": summary.get("environment", {}).get("commit")}, loss)
        self._show(task, summary, loss)

    def _give_up(self, task: Task, reason: str) -> None:
        self._end(task, {"status": "failed", "run": task.run, "reason": reason}, None)
        self.reasons.append(f"{task.run} {reason}")

    def _end(self, task: Task, note: Mapping[str, Any], loss: float | None) -> None:
        """Notes and tells; in this order, a crash in between leaves the trial to be told again."""
        before = next(t for t in self.journal.trials(task.round.key) if t.number == task.number)
        if before.state == "running":
            self.journal.note(task.round.key, task.number, note)
            self.journal.tell(task.round.key, task.number, loss)
        self._release(task)

    def _show(self, task: Task, summary: Mapping[str, Any], loss: float) -> None:
        study, trials = task.round.study, self.journal.trials(task.round.key)
        ended = [trial for trial in trials if trial.state == "complete"]
        values = " ".join(f"{key.rpartition('.')[2]}={v:.3g}" for key, v in task.values.items())
        result = f"eval loss {loss:.4f}" if summary["status"] == "finished" else summary["status"]
        best = search_rules.best_trial(ended).loss
        place = f"[{len(ended)}/{task.round.wanted}] {study.name} round {task.round.number}"
        line = f"{place} trial {task.number}  {values}  {result}  best {best:.4f}"
        print(line, file=sys.stderr, flush=True)

    def _settles(self, rounds: Sequence[Round]) -> bool:
        """Records the end of a study, good or bad, if it has come; whether it has."""
        last = rounds[-1]
        name = last.study.name
        if last.is_complete:
            if self.search.finished(last):
                self.entries[name] = entry(self.search, rounds)
                self.broken.pop(name, None)
            else:
                self.broken[name] = f"all {last.wanted} trials diverged; lower {RATE}"
            return True
        fresh = self._fresh(last)
        failed = sum(trial.state == "failed" for trial in fresh)
        if failed and not last.running and len(fresh) >= last.wanted:
            reason = f"{failed} trials failed; the same command replaces them"
            self.broken[name] = reason
            return True
        return False

    def _write(self) -> None:
        """constants.yaml and trials.csv, of all launchers' trials; needs the journal held."""
        rows: list[list[Any]] = []
        for study in self.search.studies:
            if study.name not in self.final_rows:
                rounds = self.search.rounds(study)
                found = [row for played in rounds for row in _rows(self.search, played)]
                if rounds[-1].is_complete and self._settles(rounds):
                    self.final_rows[study.name] = found
                rows += found
            else:
                rows += self.final_rows[study.name]
        _write_trials(self.search, rows)
        named = [study.name for study in self.search.studies if study.name in self.entries]
        write_constants(self.search, [self.entries[name] for name in named])

    def report(self) -> list[str]:
        """What a user should know at the end: optima near an edge, failures."""
        edges = [
            f"{name}: {', '.join(found['near_edge'])} still near an edge after "
            f"{found['rounds']} rounds"
            for name, found in self.entries.items() if found["near_edge"]
        ]  # fmt: skip
        broken = [f"{name}: {reason}" for name, reason in self.broken.items()]
        return [*edges, *self.reasons, *broken]


def objective(summary: Mapping[str, Any], config: Section) -> float | None:
    """What a trial minimises: the final evaluation loss, in nats per target.

    A run that diverged has the loss at which the loop calls it diverged, divergence_factor times
    the first training loss. None if even that one was not finite, which no learning rate mends.
    """
    if summary["status"] == "finished":
        return summary["final_eval_loss"]
    first = summary["first_train_loss"]
    return None if first is None else config.training.divergence_factor * first


def entry(search: Search, rounds: Sequence[Round]) -> dict[str, Any]:
    """What constants.yaml says about a complete study."""
    settings, last = search.config, rounds[-1]
    finished = search.finished(last)
    best = search_rules.best_trial(finished)
    good = search_rules.equally_good(finished, settings.equal_within)
    near = [
        key for key, bounds in last.ranges.items()
        if search_rules.is_near_edge(best.values[key], bounds, settings.edge)
    ]  # fmt: skip
    ones = (t for r in rounds for t in search.finished(r) if set(t.values.values()) == {1.0})
    note = search.journal.notes(last.key)[best.number]
    return {
        "where": last.study.where,
        "set": search_rules.arithmetic_means(good),
        "geometric_means": search_rules.geometric_means(good),
        "equally_good": len(good),
        "best": {"trial": best.number, "loss": best.loss, "run": note["run"], "set": best.values},
        "loss_with_all_at_1": next((trial.loss for trial in ones), None),
        "trials": len(last.counted),
        "diverged": len(last.counted) - len(finished),
        "rounds": last.number,
        "ranges": {key: list(bounds) for key, bounds in last.ranges.items()},
        "near_edge": near,
        "rate": last.study.rate,
        "rate_from": last.study.rate_from,
        "commit": note["commit"],
    }


def write_constants(search: Search, entries: Sequence[Mapping[str, Any]]) -> Path:
    """constants.yaml: the search's settings and one entry per complete study."""
    settings = search.config.model_dump(
        mode="json", include={"trials", "parallel", "equal_within", "edge", "extend", "rounds"}
    )
    made = {"file": search.path.name, "preset": search.preset, "commit": environment.commit()}
    path = search.folder / "constants.yaml"
    content = {"search": {**made, **settings}, "constants": list(entries)}
    # One object may stand in several places; aliases would make the file hard to read.
    write_text(path, yaml.safe_dump(json.loads(json.dumps(content)), sort_keys=False))
    return path


def _rows(search: Search, played: Round) -> list[list[Any]]:
    """A round's rows of trials.csv."""
    notes, where = search.journal.notes(played.key), played.study.where
    rows = []
    for trial in played.trials:
        if trial.state != "running":
            note = notes[trial.number]
            place = [played.study.name, *where.values(), played.number, trial.number]
            values = [*trial.values.values(), played.study.rate]
            rows.append([*place, *values, trial.loss, note["status"], note["run"]])
    return rows


def _write_trials(search: Search, rows: Sequence[Sequence[Any]]) -> Path:
    """trials.csv: `loss` is what the search minimises, with the penalty of a diverged run."""
    keys = [*search.config.grid, "round", "trial", *search.config.search]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([["study", *keys, "rate", "loss", "status", "run"], *rows])
    path = search.folder / "trials.csv"
    write_text(path, text.getvalue())
    return path


def run_search(
    search: Search, count: int, threads: int, launch: Sequence[str] = ()
) -> Scheduler:
    """Runs what is left of a search in `count` workers.

    Raises KeyboardInterrupt when interrupted, after every run at work here has saved a checkpoint
    (at once when interrupted again), and whatever ended a worker's thread.
    """
    for line in restarts(search):
        _say(line)
    scheduler = Scheduler(search)

    def serve(index: int, worker: Worker) -> None:
        """One thread: a worker process and the trials it runs."""
        while (task := scheduler.take()) is not None:
            workers.attempt(worker, scheduler, task, search, lambda *_: None, _say)

    crew = workers.crew(count, threads, launch) if scheduler.unsettled() else []
    workers.run_all(crew, scheduler, serve)
    return scheduler


def restarts(search: Search) -> list[str]:
    """Names the studies whose constants were found at another rate: they are searched anew."""
    path = search.folder / "constants.yaml"
    known = read_yaml(path).get("constants") or [] if path.exists() else []
    return [
        f"{study.name}: its rate is {study.rate:g}, its constants in {path} were found at "
        f"{old['rate']:g}; it is searched anew, and has none until it is done"
        for study in search.studies
        for old in known
        if old.get("where") == study.where and old.get("rate") not in (None, study.rate)
    ]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def dry_run(search: Search) -> str:
    """What a search would run, one line per study; later rounds are not known, and not counted."""
    lines, total, left = list(search.assumed), 0.0, 0
    for study in search.studies:
        last = search.rounds(study)[-1]
        todo = last.wanted - len(last.counted)
        config, _ = search.run(study, search.middle)
        total, left = total + todo * search.experiment.flops(config), left + todo
        at = f"round {last.number} of at most {search.config.rounds}"
        rate = "" if study.rate is None else f"={study.rate:.4g}"
        lines.append(
            f"{study.name}: {RATE}{rate} ({study.rate_from}), {at}, "
            f"{todo} of {last.wanted} trials to do"
        )
    lines.append(
        f"{len(search.studies)} studies, {left} trials to do in the rounds that are known, "
        f"about {total:.3g} FLOPs"
    )
    return "\n".join(lines)


@dataclass(frozen=True)
class Options:
    """One launcher: what the command line, or a job on a cluster, asks for."""

    search: Path
    preset: str | None = None
    workers: int = 1
    threads: int | None = None
    results: Path = runs.RESULTS
    launch: tuple[str, ...] = ()

    def load(self, draft: bool = False) -> Search:
        """The search with the chosen preset."""
        return load_search(self.search, self.results, self.preset, draft)


def run(options: Options) -> int:
    """Runs a search; the exit code: 0, 1 if a study failed, 75 when stopped. Or a UserError."""
    threads = workers.threads_each(options.workers, options.threads)
    search = options.load()
    try:
        scheduler = run_search(search, options.workers, threads, options.launch)
    except KeyboardInterrupt:
        print("stopped; the same command goes on from here", file=sys.stderr)
        return STOPPED
    for line in scheduler.report():
        print(line, file=sys.stderr)
    print(search.folder / "constants.yaml")
    return int(bool(scheduler.broken))


def main(argv: Sequence[str] | None = None) -> None:
    """The command: exit code 0, 1 if a study failed, 2 for a user's mistake, 75 when stopped."""
    parser = argparse.ArgumentParser(prog="python -m sweeps search", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("search", type=Path, help="YAML file, for example in nanolm_c4/sweeps/")
    parser.add_argument("--preset", help="another size of the search that its file holds")
    parser.add_argument("--workers", type=int, default=1, help="worker processes (default 1)")
    parser.add_argument("--threads", type=int, help="threads per worker (default: cores / workers)")
    parser.add_argument("--results", type=Path, default=runs.RESULTS, help="results folder")
    parser.add_argument(
        "--launch",
        type=shlex.split,
        default=[],
        metavar="COMMAND",
        help="start each run by this command, such as 'accelerate launch --config_file FILE'",
    )
    parser.add_argument("--dry-run", action="store_true", help="list what is to do and stop")
    args = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: workers go, too
    with one_line_errors(OSError):
        options = Options(
            args.search,
            args.preset,
            args.workers,
            args.threads,
            args.results,
            tuple(args.launch),
        )
        if args.dry_run:
            print(dry_run(options.load(draft=True)))
            return
        code = run(options)
    if code:
        raise SystemExit(code)


if __name__ == "__main__":
    main()
