"""A search under way: its studies, their trials, and what it writes.

One study per combination of the grid: trials of an ordinary run each, log-uniform in the searched
keys. The first trial has every constant at 1, so that what tuning gains is measured. If the best
value of a constant lies at or near an edge of its range, the range moves there and the study is
repeated. `constants.yaml` has the averages over all trials that are as good as the best (Everett et
al., App. C.2), study by study as they are complete, and `trials.csv` every trial that has ended.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import yaml

from sweeps import study as rules
from sweeps.search_file import Search
from sweeps.storage import Storage
from sweeps.study import RATE, Round, Study, Trial
from sweeps.tables import write_csv
from training import environment
from training.config import read_yaml
from training.errors import RunError
from training.files import write_text

Recall = Callable[[str], dict[str, Any] | None]


@dataclass(frozen=True)
class Task:
    """A trial to be run."""

    round: Round
    trial: Trial
    config: Any
    run: str


class SearchWork:
    """What is left of a search: trials that were begun and have not ended, then new ones.

    `recall` gives the summary of a run that is done already. Trials that failed in an earlier
    command are replaced in this one.
    """

    def __init__(
        self, search: Search, storage: Storage, recall: Recall = lambda run: None
    ) -> None:
        self.search, self.storage, self.recall = search, storage, recall
        self.folder, self.experiment = search.folder, search.experiment
        self.name, self.retries = search.config.experiment, search.config.retries
        self.table = self.folder / "constants.yaml"  # what a user wants to know
        self.rounds: dict[str, list[Round]] = {}
        self.entries: dict[str, dict[str, Any]] = {}
        self.broken: dict[str, str] = {}
        self.reasons: list[str] = []
        self._last: dict[str, str] = {}  # how a run ended, as a line
        self._begun: list[Task] = []
        for study in search.every:
            self._read(study)
        known = [played for found in self.rounds.values() for played in found]
        self.replaced = {
            (played.key, trial.number)
            for played in known for trial in played.trials if trial.state == "failed"
        }  # fmt: skip

    def next(self) -> Task | None:
        """A trial to run; None while all wait for results. Those whose run is done end here."""
        while self._begun:
            task = self._begun.pop(0)
            if not self._is_told(task):
                return task
        for study in self.search.studies:
            while study.name not in self.entries.keys() | self.broken.keys():
                answer = self.search.config.next(self.rounds[study.name], self.replaced)
                if answer.done:
                    self._settle(study, answer.note)
                if not answer.places:
                    break
                current = self.rounds[study.name][-1]
                values = dict(zip(self.search.config.search, answer.places[0]))
                config, run = self.search.run(study, values)
                number = len(current.trials)
                trial = self.storage.add(current.key, number, values, current.ranges, run)
                current.trials.append(trial)
                task = Task(current, trial, config, run)
                if not self._is_told(task):
                    return task
        return None

    def put_back(self, task: Task) -> None:
        """A trial that was begun and did not end: it is handed out again."""
        self._begun.append(task)

    def record(self, task: Task, summary: Mapping[str, Any]) -> None:
        """Takes the result of a trial's run."""
        loss = objective(summary, task.config)
        if loss is None:
            self.fail(task, "the loss before the first update is not finite")
            return
        commit = summary.get("environment", {}).get("commit")
        self._end(task, {"status": summary["status"], "run": task.run, "commit": commit}, loss)

    def fail(self, task: Task, reason: str) -> None:
        """Ends a trial as failed; the rest goes on."""
        self.reasons.append(f"{task.run} {reason}")
        self._end(task, {"status": "failed", "run": task.run, "reason": reason}, None)

    def needs(self, task: Task) -> dict[str, Any]:
        """What the search file says that a run needs."""
        return self.search.config.needs.model_dump(exclude_unset=True)

    def flops(self, task: Task) -> float:
        """What a run costs."""
        return self.experiment.flops(task.config)

    def _rounds(self) -> Iterator[Round]:
        """The rounds that are known of the studies that are meant."""
        return chain(*(self.rounds[study.name] for study in self.search.studies))

    @property
    def done(self) -> int:
        """Trials that count."""
        return sum(len(played.counted) for played in self._rounds())

    @property
    def total(self) -> int:
        """Trials of the rounds that are known."""
        return sum(played.wanted for played in self._rounds())

    @property
    def todo(self) -> tuple[float, float]:
        """FLOPs and steps of the trials to come in the rounds that are known."""
        flops = steps = 0.0
        for played in self._rounds():
            config, _ = self.search.run(played.study, self.search.middle)
            flops += played.missing * self.experiment.flops(config)
            steps += played.missing * config.training.steps
        return flops, steps

    @property
    def left(self) -> list[Task]:
        """The trials that were begun and have not ended."""
        return self._begun

    def configs(self) -> list[Any]:
        """One config of every study that has trials left."""
        left = (played.study for played in self._rounds() if played.missing)
        return [self.search.run(study, self.search.middle)[0] for study in left]

    def ended(self) -> Iterator[tuple[Task, dict[str, Any]]]:
        """The trials that count, and what their runs came to."""
        for played in self._rounds():
            for trial in played.counted:
                config, run = self.search.run(played.study, trial.values)
                yield Task(played, trial, config, run), self.recall(run) or {}

    def failed_before(self) -> set[str]:
        """Runs that an earlier command, or one at work now, has given up, and none has replaced."""
        found: set[str] = set()
        for study in self.search.studies:
            last = self.rounds[study.name][-1]
            open_places = max(0, last.missing - len(last.running))
            failed = [trial.note["run"] for trial in last.trials if trial.state == "failed"]
            found.update(failed[max(0, len(failed) - open_places) :])
        return found

    @property
    def failed(self) -> bool:
        """Whether a study has come to no constants."""
        return bool(self.broken)

    def outcome(self, task: Task) -> str:
        """A trial with its result, as a line for people."""
        return self._last.get(task.run, f"{task.run} failed")

    def report(self) -> list[str]:
        """What a user should know at the end: optima near an edge, failures."""
        edges = [
            f"{name}: {', '.join(found['near_edge'])} still near an edge after "
            f"{found['rounds']} rounds"
            for name, found in self.entries.items() if found["near_edge"]
        ]  # fmt: skip
        broken = [f"{name}: {reason}" for name, reason in self.broken.items()]
        return [*edges, *self.reasons, *broken]

    def write(self, final: bool) -> None:
        """constants.yaml, one entry per complete study, and trials.csv."""
        for study in self.search.every:  # perhaps nobody has asked for a trial since
            if study.name not in self.entries and not self.rounds[study.name][-1].missing:
                self._settle(study, self.search.config.next(self.rounds[study.name]).note)
        settings = self.search.config.model_dump(
            mode="json", include={"trials", "parallel", "equal_within", "edge", "extend", "rounds"}
        )
        made = {
            "file": self.search.path.name,
            "preset": self.search.sources.preset,
            "commit": environment.commit(),
        }
        every = self.search.every
        entries = [self.entries[study.name] for study in every if study.name in self.entries]
        content = {"search": {**made, **settings}, "constants": entries}
        # One object may stand in several places; aliases would make the file hard to read.
        text = yaml.safe_dump(json.loads(json.dumps(content)), sort_keys=False)
        write_text(self.table, text)
        keys = [*self.search.config.grid, "round", "trial", *self.search.config.search]
        rows = [
            {**study.where, **trial.values, "study": study.name, "round": played.number,
             "trial": trial.number, "rate": study.rate, "loss": trial.loss, **trial.note}
            for study in every for played in self.rounds[study.name]
            for trial in played.trials if trial.state != "running"
        ]  # fmt: skip
        header = ["study", *keys, "rate", "loss", "status", "run"]
        write_csv(self.folder / "trials.csv", header, rows)

    def before(self) -> list[str]:
        """Names the studies whose constants were found at another rate: they are searched again."""
        path = self.table
        known = read_yaml(path).get("constants") or [] if path.exists() else []
        return [
            f"{study.name}: its rate is {study.rate:g}, its constants in {path} were found at "
            f"{old['rate']:g}; it is searched again, and has none until it is done"
            for study in self.search.studies
            for old in known
            if old.get("where") == study.where and old.get("rate") not in (None, study.rate)
        ]

    def dry_run(self, place: Callable[[Any, Mapping[str, Any]], str] = lambda *_: "") -> str:
        """What is to do, one line per study; later rounds are not known, and not counted.

        `place` says the GPUs of a config and its needs.
        """
        said = self.search.config.needs.model_dump(exclude_unset=True)
        lines = list(self.search.sources.assumed)
        for study in self.search.studies:
            last = self.rounds[study.name][-1]
            at = f"round {last.number} of at most {self.search.config.rounds}"
            rate = "" if study.rate is None else f"={study.rate:.4g}"
            lines.append(
                f"{study.name}: {RATE}{rate} ({study.rate_from}), {at}, "
                f"{last.missing} of {last.wanted} trials to do  "
                f"{place(self.search.run(study, self.search.middle)[0], said)}".rstrip()
            )
        lines.append(
            f"{len(self.search.studies)} studies, {self.total - self.done} trials to do in the "
            f"rounds that are known, about {self.todo[0]:.3g} FLOPs"
        )
        return "\n".join(lines)

    def _read(self, study: Study) -> None:
        """The rounds of a study; what was begun in a round that is new here is handed out again."""
        before = len(self.rounds.get(study.name, ()))
        found = self.search.config.rounds_of(study, self.storage.trials)
        self.rounds[study.name] = found
        if len(found) > before and study in self.search.studies:
            for trial in found[-1].running:
                config, run = self.search.run(study, trial.values)
                self._begun.append(Task(found[-1], trial, config, run))

    def _is_told(self, task: Task) -> bool:
        """Whether the trial's run was done, or is unusable, and the trial has ended with it."""
        try:
            summary = self.recall(task.run)
        except RunError as error:
            self.fail(task, str(error))
            return True
        if summary is not None:
            self.record(task, summary)
        return summary is not None

    def _end(self, task: Task, note: Mapping[str, Any], loss: float | None) -> None:
        """Ends a trial in the storage, and says so in a line for people."""
        played = task.round
        ended = self.storage.end(played.key, task.trial, note, loss)
        played.trials[ended.number] = ended
        values = " ".join(f"{key.rpartition('.')[2]}={v:.3g}" for key, v in ended.values.items())
        result = f"eval loss {loss:.4f}" if note["status"] == "finished" else note["status"]
        complete = [trial for trial in played.trials if trial.state == "complete"]
        best = f"  best {rules.best_trial(complete).loss:.4f}" if complete else ""
        place = f"{played.study.name} round {played.number} trial {ended.number}"
        self._last[task.run] = f"{place}  {values}  {result}{best}"
        if not played.missing:
            self._read(played.study)  # perhaps with another round

    def _settle(self, study: Study, problem: str) -> None:
        """Records the end of a study, good or bad."""
        if problem:
            self.broken[study.name] = problem
        else:
            self.entries[study.name] = entry(self.search, self.rounds[study.name])


def objective(summary: Mapping[str, Any], config: Any) -> float | None:
    """What a trial minimises: the final evaluation loss, in nats per target.

    A run that diverged has the loss at which the loop calls it diverged, divergence_factor times
    the first training loss. None if even that one was not finite, which no learning rate can fix.
    """
    if summary["status"] == "finished":
        return summary["final_eval_loss"]
    first = summary["first_train_loss"]
    return None if first is None else config.training.divergence_factor * first


def entry(search: Search, rounds: Sequence[Round]) -> dict[str, Any]:
    """What constants.yaml says about a complete study."""
    settings, last = search.config, rounds[-1]
    best = rules.best_trial(last.finished)
    good = rules.equally_good(last.finished, settings.equal_within)
    ones = (t for r in rounds for t in r.finished if set(t.values.values()) == {1.0})
    return {
        "where": last.study.where,
        "set": rules.arithmetic_means(good),
        "geometric_means": rules.geometric_means(good),
        "equally_good": len(good),
        "best": {
            "trial": best.number,
            "loss": best.loss,
            "run": best.note["run"],
            "set": best.values,
        },
        "loss_with_all_at_1": next((trial.loss for trial in ones), None),
        "trials": len(last.counted),
        "diverged": len(last.counted) - len(last.finished),
        "rounds": last.number,
        "ranges": {key: list(bounds) for key, bounds in last.ranges.items()},
        "near_edge": settings.near_edge(last),
        "rate": last.study.rate,
        "rate_from": last.study.rate_from,
        "commit": best.note["commit"],
    }
