"""A search under way: its rounds and trials in Optuna's storage, and what it writes.

The first trial of a study has every constant at 1, so that what tuning gains is measured.
`constants.yaml` has the averages over all trials that are as good as the best, study by study as
they are complete, and `trials.csv` every trial that has ended. What a search knows stands in
Optuna's journal, a study of Optuna's for each round, and in the runs' folders; losing the journal
loses no training, as the next command finds the runs of the same trials.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from sweeps.rules import Summary
from sweeps.study import (
    RATE,
    Bounds,
    Ranges,
    Search,
    SearchConfig,
    Study,
    best_trial,
    distributions,
    equally_good,
    is_near_edge,
    next_ranges,
    objective,
    suggest,
)
from sweeps.sweep import Recall, Work, in_words
from sweeps.sweep_file import Point
from sweeps.tables import write_csv
from training import environment, runs
from training.errors import UserError
from training.files import write_text, writing

if TYPE_CHECKING:
    import optuna
    from optuna.trial import FrozenTrial


_NOTED = ("status", "step", "wall_seconds", "final_eval_loss")  # of a trial's summary


class Journal:
    """The trials of one search where Optuna keeps them: JSON lines in its folder, which
    optuna-dashboard opens. One driver writes them."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "journal.jsonl"
        self._studies: dict[str, optuna.Study] = {}
        self._is_whole = False

    def trials(self, name: str) -> list[FrozenTrial]:
        """All trials of a round by number; none, and no file made, if it has not begun."""
        if not self.path.exists():
            return []
        if name not in self._studies:
            import optuna

            try:
                self._studies[name] = optuna.load_study(study_name=name, storage=self._storage)
            except KeyError:
                return []
        return self._studies[name].get_trials(deepcopy=False)

    def begin(self, name: str, values: Mapping[str, float], ranges: Ranges, run: str) -> None:
        """Notes a new trial, whole or not at all."""
        import optuna

        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self._writing():
            if name not in self._studies:
                self._studies[name] = optuna.create_study(
                    study_name=name, storage=self._storage, load_if_exists=True
                )
            trial = optuna.trial.create_trial(
                state=optuna.trial.TrialState.RUNNING,
                params=dict(values),
                distributions=distributions(ranges),
                user_attrs={"run": run},
            )
            self._studies[name].add_trial(trial)

    def end(self, name: str, number: int, note: Mapping[str, Any], loss: float | None) -> None:
        """Ends a running trial, as failed without a loss.

        The note comes first: a crash in between leaves the trial to be ended again.
        """
        import optuna

        trial, state = self.trials(name)[number], optuna.trial.TrialState
        with self._writing():
            running = optuna.trial.Trial(self._studies[name], trial._trial_id)
            for key, value in note.items():
                running.set_user_attr(key, value)
            ended = state.FAIL if loss is None else state.COMPLETE
            self._studies[name].tell(number, loss, state=ended)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Removes first, once, half a line that a crash left: the next would stand behind it."""
        with writing(self.path), open(self.path, "ab+") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
            if not self._is_whole and file.read(1) not in (b"", b"\n"):
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)
            self._is_whole = True
            yield

    @functools.cached_property
    def _storage(self) -> optuna.storages.JournalStorage:
        """Optuna's own; UserError for a damaged journal."""
        import optuna
        from optuna.storages.journal import JournalFileBackend

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        # Optuna's own lock outlives a killed process by half a minute; there is one driver. A lock
        # of Python's has the same two methods, and is of no class of Optuna's.
        with writing(self.path):
            lock = threading.Lock()
            backend = JournalFileBackend(str(self.path), lock)  # type: ignore[arg-type]
        try:
            return optuna.storages.JournalStorage(backend)
        except ValueError as error:
            raise UserError(
                f"{self.path}: damaged ({error}); delete it: runs that are done are not trained "
                "again"
            ) from None


@dataclass(frozen=True)
class Round:
    """One pass of a study over given ranges."""

    study: Study
    number: int
    ranges: dict[str, Bounds]
    wanted: int
    journal: Journal

    @functools.cached_property
    def key(self) -> str:
        """The name of its trials in the storage; other settings or ranges have another one."""
        ranges = {key: list(bounds) for key, bounds in self.ranges.items()}
        text = json.dumps([self.study.identity, ranges])
        digest = hashlib.blake2b(text.encode(), digest_size=5).hexdigest()
        return f"{self.study.name} round {self.number} {digest}"

    @property
    def trials(self) -> list[FrozenTrial]:
        """All trials begun so far, by number."""
        return self.journal.trials(self.key)

    @property
    def counted(self) -> list[FrozenTrial]:
        """The complete trials, by number, up to the number wanted."""
        return [trial for trial in self.trials if trial.state.name == "COMPLETE"][: self.wanted]

    @property
    def finished(self) -> list[FrozenTrial]:
        """The counted trials that have not diverged."""
        return [trial for trial in self.counted if trial.user_attrs["status"] == "finished"]

    @property
    def running(self) -> list[FrozenTrial]:
        """Trials begun and not ended."""
        return [trial for trial in self.trials if trial.state.name == "RUNNING"]

    @property
    def missing(self) -> int:
        """How many of the trials wanted are not complete."""
        return self.wanted - len(self.counted)


def rounds_of(config: SearchConfig, study: Study, journal: Journal) -> list[Round]:
    """The rounds of a study that have begun, or whose turn it is."""
    rounds, ranges = [], dict(config.search)
    for number in range(1, config.rounds + 1):
        rounds.append(Round(study, number, ranges, config.trials, journal))
        if rounds[-1].missing or not rounds[-1].finished:
            break
        best = best_trial(rounds[-1].finished).params
        following = next_ranges(best, ranges, config.edge, config.extend)
        if following == ranges:
            break
        ranges = following
    return rounds


def next_values(
    config: SearchConfig, rounds: Sequence[Round], fresh: Sequence[FrozenTrial]
) -> dict[str, float]:
    """The values of the last round's next trial, from its number and the trials so far.

    Before the sampler is asked, and where the ranges allow it, all constants are 1; and after a
    round, its best is tried, so that no later one ends worse: that run is done, and costs nothing.
    """
    last, tried = rounds[-1], [trial.params for trial in fresh]
    first = [dict.fromkeys(config.search, 1.0)]
    first += [best_trial(earlier.finished).params for earlier in rounds[:-1]]
    for values in first:
        inside = all(low <= values[key] <= high for key, (low, high) in last.ranges.items())
        if inside and values not in tried:
            return values
    trials = last.trials
    seed = (config.sampler_seed, last.study.name, last.number, len(trials))
    return suggest(trials, last.ranges, seed)


def constants_of(config: SearchConfig, rounds: Sequence[Round]) -> dict[str, Any]:
    """What constants.yaml says about a complete study."""
    last = rounds[-1]
    finished, counted = last.finished, last.counted
    best, good = best_trial(finished), equally_good(finished, config.equal_within)
    values = {key: [trial.params[key] for trial in good] for key in good[0].params}
    ones = (t for r in rounds for t in r.finished if set(t.params.values()) == {1.0})
    return {
        "where": last.study.where,
        "set": {key: sum(column) / len(good) for key, column in values.items()},
        # In the logarithm, in which they are searched.
        "geometric_means": {
            key: math.exp(sum(map(math.log, column)) / len(good)) for key, column in values.items()
        },
        "equally_good": len(good),
        "best": {
            "trial": best.number,
            "loss": best.value,
            "run": best.user_attrs["run"],
            "set": best.params,
        },
        "loss_with_all_at_1": next((trial.value for trial in ones), None),
        "trials": len(counted),
        "diverged": len(counted) - len(finished),
        "rounds": last.number,
        "ranges": {key: list(bounds) for key, bounds in last.ranges.items()},
        "near_edge": [
            key
            for key, bounds in last.ranges.items()
            if is_near_edge(best.params[key], bounds, config.edge)
        ],
        "rate": last.study.rate,
        "rate_from": last.study.rate_from,
        "commit": best.user_attrs["commit"],
    }


@dataclass(frozen=True, kw_only=True)
class TrialPoint(Point):
    """A trial of a round: begun, or counted, or to come, and then without values and a run."""

    round: Round
    number: int

    @property
    def key(self) -> str:
        """The best of a round is tried in the next one, too: two trials may be one run."""
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
        loss = None if summary["status"] == "failed" else objective(summary, point.config)
        note = {key: summary[key] for key in _NOTED if key in summary}
        note["commit"] = summary.get("environment", {}).get("commit")
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
        best = f"  best {best_trial(counted).value:.4f}" if counted else ""
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
        write_text(self.table, text)
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
        write_csv(self.folder / "trials.csv", header, rows)

    def listed(self) -> list[str]:
        """What is to do, one line per study; later rounds are not known, and not counted."""
        lines = []
        for study in self.search.studies:
            last = self.rounds[study.name][-1]
            rate = "" if study.rate is None else f"={study.rate:.4g}"
            lines.append(
                f"{study.name}: {RATE}{rate} ({study.rate_from}), round {last.number} of at most "
                f"{self.config.rounds}, {last.missing} of {last.wanted} trials to do"
                f"{in_words(self.search.needs({}))}"
            )
        return lines

    def _open(self, study: Study) -> None:
        """Takes up the rounds of a study that are new here; what was begun is handed out again."""
        known = len(self.rounds.get(study.name, ()))
        rounds = self.rounds[study.name] = rounds_of(self.config, study, self.journal)
        last = rounds[-1]
        if not last.missing and not last.finished:
            self.reasons[study.name] = f"all {last.wanted} trials diverged; lower {RATE}"
        elif not last.missing:
            self.complete[study.name] = constants_of(self.config, rounds)
            if edges := ", ".join(self.complete[study.name]["near_edge"]):
                note = f"{study.name}: {edges} still near an edge after {len(rounds)} rounds"
                self.notes[study.name] = note
        for round_ in rounds[known:] if study in self.search.studies else ():
            counted, begun = round_.counted, round_.running[: round_.missing]
            for trial in counted:
                point = self._point(round_, trial.number, trial.params, trial.user_attrs["run"])
                self._take(point, trial.user_attrs)
            for trial in begun:
                self.put_back(self._point(round_, trial.number, trial.params), trial.number)
            first = len(round_.trials)
            for number in range(first, first + round_.missing - len(begun)):
                self._point(round_, number, {}, f"{round_.key} {number}")

    def _point(
        self, round_: Round, number: int, values: Mapping[str, float], run: str = ""
    ) -> TrialPoint:
        """Takes up a trial; one whose run has a name, or none yet, needs no config of its own."""
        study = round_.study
        config = study.config
        if not run:
            config = self.search.validated(f"study {study.name!r}", {**study.settings, **values})
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
            if len(fresh) >= last.wanted and not running:
                failed = sum(trial.state.name == "FAIL" for trial in fresh)
                note = f"{failed} trials failed; the same command replaces them"
                self.reasons[study.name] = note
            elif len(fresh) < last.wanted and running < self.config.parallel:
                values = next_values(self.config, self.rounds[study.name], fresh)
                point = self._point(last, len(trials), values)
                self.journal.begin(last.key, values, last.ranges, point.run)
                return point
        return None
