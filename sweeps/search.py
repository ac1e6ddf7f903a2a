"""A search under way: the trials that are left of it, and what it writes.

The first trial of a study has every constant at 1, so that what tuning gains is measured.
`constants.yaml` has the averages over all trials that are as good as the best, study by study as
they are complete, and `trials.csv` every trial that has ended. What a search knows stands in
Optuna's journal, a study of Optuna's for each round, and in the runs' folders; losing the journal
loses no training, as the next command finds the runs of the same trials.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import yaml

from sweeps import study as studies
from sweeps.journal import Journal
from sweeps.study import Round, Search, Study
from sweeps.sweep import Recall, Work, in_words
from sweeps.sweep_file import Point
from sweeps.tables import write_csv
from training import environment, runs
from training.errors import UserError
from training.files import write_table
from training.runs import Summary

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

# Of a trial's summary
_NOTED = ("status", "step", "wall_seconds", "final_eval_loss", "data_checksum")


@dataclass(frozen=True, kw_only=True)
class TrialPoint(Point):
    """A trial of a round: running, complete, or not begun, which has no values and no run yet."""

    round: Round
    number: int

    @property
    def key(self) -> str:
        """The round and the number, not the run: a round repeats the best trial of the last one."""
        return f"{self.round.key} {self.number}"


class SearchWork(Work):
    """What is left of a search: trials that were begun and have not ended, then new ones.

    A round of a study has as many points as it wants trials, whose values are chosen when their
    turn comes. Trials that failed in an earlier command are replaced in this one.
    """

    table_name = "constants.yaml"

    def __init__(self, search: Search, recall: Recall) -> None:
        super().__init__(search, recall)
        self.search, self.config = search, search.config
        self.journal = Journal(search.folder)
        self.rounds: dict[str, list[Round]] = {}
        self.complete: dict[str, dict[str, Any]] = {}  # study -> its entry in constants.yaml
        for study in search.every:
            self._open(study)
        self.replaced = {
            (round_.key, trial.number)
            for rounds in self.rounds.values()
            for round_ in rounds
            for trial in round_.trials
            if trial.state.name == "FAIL"
        }

    def next(self) -> Point | None:
        """A trial to run; None while all wait for results. One whose run is done ends here."""
        while (point := super().next() or self._new()) is not None:
            summary = self._recalled(point)
            if summary is None:
                return point
            self.record(point, summary)
        return None

    def record(self, point: Point, summary: Summary) -> None:
        """Takes the result of a trial's run; the last one of a round may open another round."""
        assert isinstance(point, TrialPoint)
        loss = None if summary["status"] == "failed" else studies.objective(summary, point.config)
        note = _note(summary)
        if loss is None:
            why = "the loss before the first update is not finite"
            reason = self.reasons.setdefault(point.run, why)
            note = {"status": "failed", "reason": reason}
        self.journal.end(point.round.key, point.number, note, loss)
        self._take(point, note)
        if not point.round.missing:
            self._open(point.round.study)

    def failed_before(self) -> set[str]:
        """Runs that an earlier command, or one at work now, has given up, and none has replaced."""
        failed: set[str] = set()
        for study in self.search.studies:
            last = self.rounds[study.name][-1]
            vacant = max(0, last.missing - len(last.running))
            runs_ = [trial.user_attrs["run"] for trial in last.trials if trial.state.name == "FAIL"]
            failed.update(runs_[max(0, len(runs_) - vacant) :])
        return failed

    def outcome(self, point: Point) -> str:
        """A trial with its result and the best of its round, as a line for people."""
        assert isinstance(point, TrialPoint)
        counted = point.round.counted
        best = f"  best {studies.best_trial(counted).value:.4f}" if counted else ""
        return f"round {point.round.number} trial {point.number} of {super().outcome(point)}{best}"

    def may_add(self) -> tuple[int, float]:
        """The most trials of rounds that are not known yet, and their FLOPs."""
        count, flops = 0, 0.0
        for study in self.search.studies:
            rounds = self.rounds[study.name]
            if rounds[-1].missing:
                later = (self.config.rounds - len(rounds)) * self.config.trials
                count, flops = count + later, flops + later * self.experiment.flops(study.config)
        return count, flops

    def write(self, final: bool) -> None:
        """constants.yaml, one entry per complete study, and trials.csv."""
        every = self.search.every
        made = {
            "file": self.search.path.name,
            "preset": self.search.sources.preset,
            "commit": environment.commit(),
        }
        settings = self.config.model_dump(
            mode="json", include={"trials", "parallel", "equal_within", "edge", "extend", "rounds"}
        )
        entries = [self.complete[study.name] for study in every if study.name in self.complete]
        content = {"search": {**made, **settings}, "constants": entries}
        # One object may stand in several places; aliases would make the file hard to read.
        text = yaml.safe_dump(json.loads(json.dumps(content)), sort_keys=False)
        write_table(self.table, text)
        rows = [
            {
                **study.where,
                **trial.params,
                "study": study.name,
                "round": round_.number,
                "trial": trial.number,
                "rate": study.rate,
                "loss": trial.value,
                **trial.user_attrs,
            }
            for study in every
            for round_ in self.rounds[study.name]
            for trial in round_.trials
            if trial.state.name != "RUNNING"
        ]
        keys = [*self.config.grid, "round", "trial", *self.config.search]
        header = ["study", *keys, "rate", "loss", "status", "run"]
        write_csv(self.folder / "trials.csv", header, rows, write_table)

    def listed(self) -> list[str]:
        """What is to do, one line per study; later rounds are not known, and not counted."""
        lines = []
        for study in self.search.studies:
            last = self.rounds[study.name][-1]
            rate = studies.RATE + ("" if study.rate is None else f"={study.rate:.4g}")
            lines.append(
                f"{study.name}: {rate} ({study.rate_from}), round {last.number} of at most "
                f"{self.config.rounds}, {last.missing} of {last.wanted} trials to do"
                f"{in_words(self.search.needs({}))}"
            )
        return lines

    def _open(self, study: Study) -> None:
        """Takes up the rounds of a study that are new here; what was begun is handed out again."""
        known = len(self.rounds.get(study.name, ()))
        rounds = self.rounds[study.name] = studies.rounds_of(self.config, study, self.journal)
        last = rounds[-1]
        if not last.missing and not last.finished:
            self.reasons[study.name] = f"all {last.wanted} trials diverged; lower {studies.RATE}"
        elif not last.missing:
            self.complete[study.name] = studies.constants_of(self.config, rounds)
            if edges := ", ".join(self.complete[study.name]["near_edge"]):
                note = f"{study.name}: {edges} still near an edge after {len(rounds)} rounds"
                self.notes[study.name] = note
        for round_ in rounds[known:] if study in self.search.studies else ():
            counted, begun = round_.counted, round_.running[: round_.missing]
            for trial in counted:
                self._take(*self._believed(round_, trial))
            for trial in begun:
                self.put_back(self._point(round_, trial.number, trial.params), trial.number)
            first = len(round_.trials)
            for number in range(first, first + round_.missing - len(begun)):
                self._point(round_, number, {}, f"{round_.key} {number}")

    def _believed(self, round_: Round, trial: FrozenTrial) -> tuple[TrialPoint, Summary]:
        """A complete trial with its run's result; UserError where the journal has another one."""
        point = self._point(round_, trial.number, trial.params)
        summary = self.recall(point.run) or {"status": "failed"}
        loss = None if summary["status"] == "failed" else studies.objective(summary, point.config)
        if {**_note(summary), "run": point.run} != trial.user_attrs or loss != trial.value:
            run = self.folder / trial.user_attrs["run"]
            raise self.journal.damaged(
                f"trial {trial.number} of {round_.key!r} is not what {run} is"
            )
        return point, trial.user_attrs

    def _point(
        self, round_: Round, number: int, values: Mapping[str, float], run: str = ""
    ) -> TrialPoint:
        """Takes up a trial; one whose run has a name, or none yet, needs no config of its own."""
        study = round_.study
        config = study.config
        if not run:
            config = study.at(values)
            run = runs.run_id(config, study.name)
        point = TrialPoint(
            study.name, tuple(values.items()), config.seed, config, run, round=round_, number=number
        )
        self._enter(point)
        return point

    def _new(self) -> TrialPoint | None:
        """A new trial; None where every study waits for results or is over."""
        for study in self.search.studies:
            if study.name in self.complete.keys() | self.reasons.keys():
                continue
            last = self.rounds[study.name][-1]
            trials, running = last.trials, len(last.running)
            fresh = [t for t in trials if (last.key, t.number) not in self.replaced]
            while len(fresh) < last.wanted and running < self.config.parallel:
                values, number = (
                    studies.next_values(self.config, self.rounds[study.name], fresh),
                    len(trials),
                )
                try:
                    point, problem = self._point(last, number, values), ""
                except UserError as error:  # the values make no config: as a trial that has failed
                    point = self._point(last, number, values, f"{study.name} trial {number}")
                    problem = str(error)
                self.journal.begin(last.key, values, last.ranges, point.run)
                if not problem:
                    return point
                self.fail(point, problem)
                trials = last.trials
                fresh = [t for t in trials if (last.key, t.number) not in self.replaced]
            if len(fresh) >= last.wanted and not running:
                failed = sum(trial.state.name == "FAIL" for trial in fresh)
                note = f"{failed} trials failed; the same command replaces them"
                self.reasons[study.name] = note
        return None


def _note(summary: Summary) -> dict[str, Any]:
    """What a trial's journal keeps of its run's summary."""
    commit = summary.get("environment", {}).get("commit")
    return {**{key: summary[key] for key in _NOTED if key in summary}, "commit": commit}
