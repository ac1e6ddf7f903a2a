"""A search under way: its studies, their trials, and what it writes.

One study per combination of the grid: trials of an ordinary run each, log-uniform in the searched
keys. The first trial has every constant at 1, so that what tuning gains is measured. If the best
value of a constant lies at or near an edge of its range, the range moves there and the study is
repeated. `constants.yaml` has the averages over all trials that are as good as the best (Everett et
al., App. C.2), study by study as they are complete, and `trials.csv` every trial that has ended.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import yaml

from sweeps import study as rules
from sweeps.pool import Needs
from sweeps.rules import FAILED, Summary
from sweeps.search_file import Search
from sweeps.storage import Storage
from sweeps.study import RATE, Round, Study, Trial
from sweeps.sweep import Recall, Work, in_words
from sweeps.sweep_file import Point
from sweeps.tables import write_csv
from training import environment
from training.config import read_yaml
from training.errors import RunError
from training.files import write_text


@dataclass(frozen=True, kw_only=True)
class Task(Point):
    """A trial of a round: begun, or counted, or to come, and then without values and a run."""

    round: Round
    trial: Trial

    @property
    def key(self) -> str:
        """The best of a round is tried in the next one, too: two trials may be one run."""
        return f"{self.round.key} {self.trial.number}"


class SearchWork(Work):
    """What is left of a search: trials that were begun and have not ended, then new ones.

    A round of a study has as many points as it wants trials, whose values are chosen when their
    turn comes. Trials that failed in an earlier command are replaced in this one.
    """

    table_name = "constants.yaml"

    def __init__(self, search: Search, recall: Recall, storage: Storage) -> None:
        super().__init__(search, recall)
        self.storage = storage
        self.rounds: dict[str, list[Round]] = {}
        self.entries: dict[str, dict[str, Any]] = {}
        for study in search.every:
            self._read(study)
        self.replaced = {
            (played.key, trial.number)
            for found in self.rounds.values()
            for played in found
            for trial in played.trials
            if trial.state == "fail"
        }

    def next(self) -> Task | None:
        """A trial to run; None while all wait for results. One whose run is done ends here."""
        while (task := super().next() or self._ask()) is not None:
            summary = self._recalled(task)
            if summary is None:
                return task
            self.record(task, summary)
        return None

    def record(self, task: Task, summary: Summary) -> None:
        """Takes the result of a trial's run; the last one of a round may open another round."""
        loss = None if summary["status"] == "failed" else objective(summary, task.config)
        if loss is not None:
            commit = summary.get("environment", {}).get("commit")
            note = {"status": summary["status"], "run": task.run, "commit": commit}
        else:
            summary, why = FAILED, "the loss before the first update is not finite"
            reason = self.reasons.setdefault(task.run, why)
            note = {"status": "failed", "run": task.run, "reason": reason}
        ended = self.storage.end(task.round.key, task.trial, note, loss)
        task.round.trials[ended.number] = ended
        self._take(task, summary)
        if not task.round.missing:
            self._read(task.round.study)

    def ended(self) -> list[tuple[Task, Summary]]:
        """The trials that count, and what their runs came to, or the storage's note of it."""
        return [(task, self._summary(task.run) or note) for task, note in super().ended()]

    def _summary(self, run: str) -> Summary | None:
        """The summary of a trial's run; None for a damaged one, whose trial counts as before."""
        with suppress(RunError):
            return self.recall(run)
        return None

    def has_begun(self, task: Task) -> bool:
        """Whether the storage has it as begun."""
        return task.trial.state == "running"

    def failed_before(self) -> set[str]:
        """Runs that an earlier command, or one at work now, has given up, and none has replaced."""
        found: set[str] = set()
        for study in self.file.studies:
            last = self.rounds[study.name][-1]
            open_places = max(0, last.missing - len(last.running))
            failed = [trial.note["run"] for trial in last.trials if trial.state == "fail"]
            found.update(failed[max(0, len(failed) - open_places) :])
        return found

    def outcome(self, task: Task) -> str:
        """A trial with its result and the best of its round, as a line for people."""
        complete = [trial for trial in task.round.trials if trial.state == "complete"]
        best = f"  best {rules.best_trial(complete).loss:.4f}" if complete else ""
        place = f"round {task.round.number} trial {task.trial.number}"
        return f"{place} of {super().outcome(task)}{best}"

    def may_add(self) -> tuple[int, float]:
        """The most trials of rounds that are not known yet, and their FLOPs."""
        runs, flops = 0, 0.0
        for study in self.file.studies:
            found = self.rounds[study.name]
            if found[-1].missing:
                later = (self.file.config.rounds - len(found)) * self.file.config.trials
                runs, flops = runs + later, flops + later * self.experiment.flops(study.config)
        return runs, flops

    def write(self, final: bool) -> None:
        """constants.yaml, one entry per complete study, and trials.csv."""
        every = self.file.every
        settings = self.file.config.model_dump(
            mode="json", include={"trials", "parallel", "equal_within", "edge", "extend", "rounds"}
        )
        made = {
            "file": self.file.path.name,
            "preset": self.file.sources.preset,
            "commit": environment.commit(),
        }
        entries = [self.entries[study.name] for study in every if study.name in self.entries]
        content = {"search": {**made, **settings}, "constants": entries}
        # One object may stand in several places; aliases would make the file hard to read.
        text = yaml.safe_dump(json.loads(json.dumps(content)), sort_keys=False)
        write_text(self.table, text)
        keys = [*self.file.config.grid, "round", "trial", *self.file.config.search]
        rows = [
            {
                **study.where,
                **trial.values,
                "study": study.name,
                "round": played.number,
                "trial": trial.number,
                "rate": study.rate,
                "loss": trial.loss,
                **trial.note,
            }
            for study in every
            for played in self.rounds[study.name]
            for trial in played.trials
            if trial.state != "running"
        ]
        header = ["study", *keys, "rate", "loss", "status", "run"]
        write_csv(self.folder / "trials.csv", header, rows)

    def before(self) -> list[str]:
        """Names the studies whose constants were found at another rate: they are searched again."""
        path = self.table
        known = read_yaml(path, own=True).get("constants") or [] if path.exists() else []
        return [
            f"{study.name}: its rate is {study.rate:g}, its constants in {path} were found at "
            f"{old['rate']:g}; it is searched again, and has none until it is done"
            for study in self.file.studies
            for old in known
            if old.get("where") == study.where and old.get("rate") not in (None, study.rate)
        ]

    def needs(self, point: Point) -> Needs:
        """What a trial needs of the place where it is trained."""
        return self.file.needs({})

    def dry_run(self) -> str:
        """What is to do, one line per study; later rounds are not known, and not counted."""
        lines = list(self.file.sources.assumed)
        for study in self.file.studies:
            last = self.rounds[study.name][-1]
            at = f"round {last.number} of at most {self.file.config.rounds}"
            rate = "" if study.rate is None else f"={study.rate:.4g}"
            lines.append(
                f"{study.name}: {RATE}{rate} ({study.rate_from}), {at}, "
                f"{last.missing} of {last.wanted} trials to do{in_words(self.file.needs({}))}"
            )
        lines.append(
            f"{len(self.file.studies)} studies, {len(self.left)} trials to do in the "
            f"rounds that are known, about {self.todo[0]:.3g} FLOPs"
        )
        return "\n".join(lines)

    def _read(self, study: Study) -> None:
        """The rounds of a study; of one that is new here, what was begun is handed out again."""
        before, config = len(self.rounds.get(study.name, ())), self.file.config
        found = self.rounds[study.name] = config.rounds_of(study, self.storage.trials)
        if not found[-1].missing and (problem := config.next(found).note):
            self.reasons[study.name] = problem
        elif not found[-1].missing:
            self.entries[study.name] = entry(self.file, found)
            if edges := ", ".join(self.entries[study.name]["near_edge"]):
                note = f"{study.name}: {edges} still near an edge after {len(found)} rounds"
                self.notes[study.name] = note
        for played in found[before:] if study in self.file.studies else ():
            begun, first = played.running[: played.missing], len(played.trials)
            to_come = range(first, first + played.missing - len(begun))
            waiting = (Trial(number, {}, "waiting") for number in to_come)
            for trial in (*played.counted, *begun, *waiting):
                task = self._task(played, trial)
                if trial.state == "running":
                    self.put_back(task, trial.number)
                elif trial.state == "complete":
                    self._take(task, trial.note)

    def _task(self, played: Round, trial: Trial) -> Task:
        """Takes up a trial; one that is not to be run now needs no config of its own."""
        study, run = played.study, trial.note.get("run", f"{played.key} {trial.number}")
        config = study.config
        if trial.state == "running":
            config, run = self.file.run(study, trial.values)
        values = tuple(trial.values.items())
        task = Task(study.name, values, config.seed, config, run, round=played, trial=trial)
        self._enter(task)
        return task

    def _ask(self) -> Task | None:
        """A new trial; None where every study waits for results or is over."""
        for study in self.file.studies:
            if study.name in self.entries.keys() | self.reasons.keys():
                continue
            played = self.rounds[study.name][-1]
            answer = self.file.config.next(self.rounds[study.name], self.replaced)
            if answer.done:
                self.reasons[study.name] = answer.note
            for place in answer.places:
                values = dict(zip(self.file.config.search, place, strict=True))
                task = self._task(played, Trial(len(played.trials), values, "running"))
                self.storage.add(played.key, task.trial, played.ranges, task.run)
                played.trials.append(task.trial)
                return task
        return None


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
    near_edge = [
        key
        for key, bounds in last.ranges.items()
        if rules.is_near_edge(best.values[key], bounds, settings.edge)
    ]
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
        "near_edge": near_edge,
        "rate": last.study.rate,
        "rate_from": last.study.rate_from,
        "commit": best.note["commit"],
    }
