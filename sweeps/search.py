"""A search under way: its studies, their trials, and what it writes.

One study per combination of the grid: trials of an ordinary run each, log-uniform in the searched
keys. The first trial has every constant at 1, so that what tuning gains is measured. If the best
value of a constant lies at or near an edge of its range, the range moves there and the study is
repeated. `constants.yaml` has the averages over all trials that are as good as the best (Everett et
al., App. C.2), study by study as they are complete, and `trials.csv` every trial that has ended.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from sweeps import study as rules
from sweeps.search_file import Search
from sweeps.storage import Storage
from sweeps.study import RATE, Round, Study, Trial
from training import environment
from training.config import Section, read_yaml
from training.errors import RunError
from training.files import write_text

Recall = Callable[[str], dict[str, Any] | None]


@dataclass(frozen=True)
class Task:
    """A trial to be run."""

    round: Round
    trial: Trial
    config: Section
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
        self.rounds: dict[str, list[Round]] = {}
        self.entries: dict[str, dict[str, Any]] = {}
        self.broken: dict[str, str] = {}
        self.reasons: list[str] = []
        self._last: dict[str, str] = {}  # how a run ended, as a line
        self._begun: list[Task] = []
        for study in search.studies:
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
                task = self._begin(study, answer.places[0])
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

    @property
    def done(self) -> int:
        """Trials that count."""
        return sum(len(played.counted) for found in self.rounds.values() for played in found)

    @property
    def total(self) -> int:
        """Trials of the rounds that are known."""
        return sum(played.wanted for found in self.rounds.values() for played in found)

    @property
    def todo(self) -> tuple[float, float]:
        """FLOPs and steps of the trials to come in the rounds that are known."""
        flops = steps = 0.0
        for study in self.search.studies:
            left = sum(played.wanted - len(played.counted) for played in self.rounds[study.name])
            config, _ = self.search.run(study, self.search.middle)
            flops += left * self.experiment.flops(config)
            steps += left * config.training.steps
        return flops, steps

    @property
    def left(self) -> list[Task]:
        """The trials that were begun and have not ended."""
        return self._begun

    def ended(self) -> Iterator[tuple[Task, dict[str, Any]]]:
        """The trials that count, and what their runs came to."""
        for study in self.search.studies:
            for played in self.rounds[study.name]:
                for trial in played.counted:
                    config, run = self.search.run(study, trial.values)
                    yield Task(played, trial, config, run), self.recall(run) or {}

    def failed_before(self) -> set[str]:
        """Runs that an earlier command, or one at work now, has given up, and none has replaced."""
        found: set[str] = set()
        for rounds in self.rounds.values():
            last = rounds[-1]
            open_places = last.wanted - len(last.counted) - len(last.running)
            failed = [trial.note["run"] for trial in last.trials if trial.state == "failed"]
            found.update(failed[max(0, len(failed) - max(0, open_places)) :])
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
        """constants.yaml and trials.csv."""
        self._settle_complete()
        write_trials(self.search, self.rounds)
        named = [study.name for study in self.search.studies if study.name in self.entries]
        write_constants(self.search, [self.entries[name] for name in named])

    def before(self) -> list[str]:
        """Names the studies whose constants were found at another rate: they are searched again."""
        path = self.folder / "constants.yaml"
        known = read_yaml(path).get("constants") or [] if path.exists() else []
        return [
            f"{study.name}: its rate is {study.rate:g}, its constants in {path} were found at "
            f"{old['rate']:g}; it is searched again, and has none until it is done"
            for study in self.search.studies
            for old in known
            if old.get("where") == study.where and old.get("rate") not in (None, study.rate)
        ]

    def dry_run(self) -> str:
        """What is to do, one line per study; later rounds are not known, and not counted."""
        lines = list(self.search.sources.assumed)
        for study in self.search.studies:
            last = self.rounds[study.name][-1]
            at = f"round {last.number} of at most {self.search.config.rounds}"
            rate = "" if study.rate is None else f"={study.rate:.4g}"
            lines.append(
                f"{study.name}: {RATE}{rate} ({study.rate_from}), {at}, "
                f"{last.wanted - len(last.counted)} of {last.wanted} trials to do"
            )
        lines.append(
            f"{len(self.search.studies)} studies, {self.total - self.done} trials to do in the "
            f"rounds that are known, about {self.todo[0]:.3g} FLOPs"
        )
        return "\n".join(lines)

    def table(self) -> str:
        """The file that holds what a user wants to know."""
        return str(self.folder / "constants.yaml")

    def _read(self, study: Study) -> None:
        """The rounds of a study; what was begun in a round that is new here is handed out again."""
        before = len(self.rounds.get(study.name, ()))
        found = self.search.config.rounds_of(study, self.storage.trials)
        self.rounds[study.name] = found
        for trial in found[-1].running if len(found) > before else ():
            config, run = self.search.run(study, trial.values)
            self._begun.append(Task(found[-1], trial, config, run))

    def _begin(self, study: Study, place: Sequence[float]) -> Task:
        """A new trial in a study's last round."""
        current = self.rounds[study.name][-1]
        values = dict(zip(self.search.config.search, place))
        config, run = self.search.run(study, values)
        number = len(current.trials)
        trial = self.storage.add(current.key, number, values, current.ranges, run)
        current.trials.append(trial)
        return Task(current, trial, config, run)

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
        ended = self.storage.end(task.round.key, task.trial, note, loss)
        task.round.trials[ended.number] = ended
        self._last[task.run] = _line(task, ended)
        if task.round.is_complete:
            self._read(task.round.study)  # perhaps with another round

    def _settle(self, study: Study, problem: str) -> None:
        """Records the end of a study, good or bad."""
        if problem:
            self.broken[study.name] = problem
        else:
            self.entries[study.name] = entry(self.search, self.rounds[study.name])

    def _settle_complete(self) -> None:
        """Records the studies that are complete, which nobody has asked for a trial since."""
        for study in self.search.studies:
            if study.name not in self.entries and self.rounds[study.name][-1].is_complete:
                answer = self.search.config.next(self.rounds[study.name])
                self._settle(study, answer.note)


def objective(summary: Mapping[str, Any], config: Any) -> float | None:
    """What a trial minimises: the final evaluation loss, in nats per target.

    A run that diverged has the loss at which the loop calls it diverged, divergence_factor times
    the first training loss. None if even that one was not finite, which no learning rate can fix.
    """
    if summary["status"] == "finished":
        return summary["final_eval_loss"]
    first = summary["first_train_loss"]
    return None if first is None else config.training.divergence_factor * first


def _line(task: Task, ended: Trial) -> str:
    """A trial that has ended, for people."""
    played = task.round
    values = " ".join(f"{key.rpartition('.')[2]}={v:.3g}" for key, v in ended.values.items())
    status = ended.note["status"]
    result = f"eval loss {ended.loss:.4f}" if status == "finished" else status
    complete = [trial for trial in played.trials if trial.state == "complete"]
    best = f"  best {rules.best_trial(complete).loss:.4f}" if complete else ""
    place = f"{played.study.name} round {played.number} trial {ended.number}"
    return f"{place}  {values}  {result}{best}"


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


def write_constants(search: Search, entries: Sequence[Mapping[str, Any]]) -> None:
    """constants.yaml: the search's settings and one entry per complete study."""
    settings = search.config.model_dump(
        mode="json", include={"trials", "parallel", "equal_within", "edge", "extend", "rounds"}
    )
    made = {"file": search.path.name, "preset": search.preset, "commit": environment.commit()}
    content = {"search": {**made, **settings}, "constants": list(entries)}
    # One object may stand in several places; aliases would make the file hard to read.
    text = yaml.safe_dump(json.loads(json.dumps(content)), sort_keys=False)
    write_text(search.folder / "constants.yaml", text)


def write_trials(search: Search, rounds: Mapping[str, Sequence[Round]]) -> None:
    """trials.csv: `loss` is what the search minimises, with the penalty of a diverged run."""
    keys = [*search.config.grid, "round", "trial", *search.config.search]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["study", *keys, "rate", "loss", "status", "run"])
    for study in search.studies:
        for played in rounds[study.name]:
            for trial in played.trials:
                if trial.state != "running":
                    place = [study.name, *study.where.values(), played.number, trial.number]
                    values = [*trial.values.values(), study.rate, trial.loss]
                    writer.writerow([*place, *values, trial.note["status"], trial.note["run"]])
    write_text(search.folder / "trials.csv", text.getvalue())
