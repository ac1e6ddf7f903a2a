"""Trials of a search: what to try next, and a journal that launchers on several machines share.

The journal is Optuna's, a file of JSON lines in the search's folder; there is no server and no
pickle. Whoever reads it to decide and then writes holds the folder's lock, which goes with the
process. Deleting the journal loses no training: a search of one worker finds its runs again.
"""

from __future__ import annotations

import hashlib
import os
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import optuna
from optuna.distributions import FloatDistribution
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState

from training.errors import UserError
from training.files import Busy, locked, writing

optuna.logging.set_verbosity(optuna.logging.WARNING)

Bounds = tuple[float, float]
State = Literal["running", "complete", "failed"]

_STATES: dict[TrialState, State] = {
    TrialState.RUNNING: "running",
    TrialState.COMPLETE: "complete",
    TrialState.FAIL: "failed",
}
_OPTUNAS = {ours: theirs for theirs, ours in _STATES.items()}


@dataclass(frozen=True)
class Trial:
    """One trial of a study."""

    number: int
    """Position in the study, from 0."""
    values: dict[str, float]
    """Config key -> value tried."""
    state: State
    """Running means begun; its launcher may be gone."""
    loss: float | None = None
    """What the search minimises; a diverged run has a penalty. None unless complete."""


def suggest(
    trials: Sequence[Trial], ranges: Mapping[str, Bounds], seed: object
) -> dict[str, float]:
    """The values to try next, log-uniform at first: a pure function of its arguments.

    The sampler is a tree-structured Parzen estimator over all keys jointly. It looks at ranks, so
    the penalty of a diverged run bends nothing, and counts running trials as bad ones, which keeps
    a hundred at once apart. Optuna's Gaussian process, on a noisy bowl in three constants with a
    region that diverges, 300 trials, 100 at once: 95 s against 1 s, and a worse optimum.
    """
    digest = hashlib.blake2b(repr(seed).encode(), digest_size=4).digest()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        sampler = optuna.samplers.TPESampler(
            seed=int.from_bytes(digest, "big"), multivariate=True, constant_liar=True
        )
    study = optuna.create_study(sampler=sampler)
    study.add_trials([_frozen(trial, ranges) for trial in trials])
    return dict(study.ask(_distributions(ranges)).params)


def _distributions(ranges: Mapping[str, Bounds]) -> dict[str, FloatDistribution]:
    return {key: FloatDistribution(low, high, log=True) for key, (low, high) in ranges.items()}


def _frozen(trial: Trial, ranges: Mapping[str, Bounds]) -> FrozenTrial:
    return optuna.trial.create_trial(
        state=_OPTUNAS[trial.state],
        value=trial.loss,
        params=trial.values,
        distributions=_distributions(ranges),
    )


class FolderLock:
    """A folder's lock, waited for; a thread that has it may take it again.

    Optuna's own locks outlive a killed process by half a minute, and are then taken by force.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._thread, self._held, self._depth = threading.RLock(), ExitStack(), 0

    def acquire(self) -> bool:
        """Waits for the folder."""
        self._thread.acquire()
        try:
            while self._depth == 0:
                try:
                    self._held.enter_context(locked(self.folder, "search"))
                except Busy:
                    continue
                break
        except BaseException:
            self._thread.release()
            raise
        self._depth += 1
        return True

    def release(self) -> None:
        """Undoes one `acquire`."""
        self._depth -= 1
        if self._depth == 0:
            self._held.close()
        self._thread.release()


class _Backend(JournalFileBackend):
    """The journal's file; a line that a crash tore is cut off before another one is added."""

    def __init__(self, path: Path, lock: FolderLock) -> None:
        super().__init__(str(path), lock)
        self._path, self._folder_lock = path, lock

    def read_logs(self, log_number_from: int) -> Iterator[dict[str, Any]]:
        """The lines from a number on; UserError for one that is no JSON."""
        try:
            yield from super().read_logs(log_number_from)
        except ValueError as error:
            raise UserError(
                f"{self._path}: damaged ({error}); delete it: runs that are done are not trained "
                "again"
            ) from None

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Adds whole lines."""
        self._folder_lock.acquire()
        try:
            _cut_torn_line(self._path)
            super().append_logs(logs)
        finally:
            self._folder_lock.release()


def _cut_torn_line(path: Path) -> None:
    with open(path, "r+b") as file:
        if not file.seek(0, os.SEEK_END):
            return
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)


class Journal:
    """The studies of one search: named lists of trials with notes on them."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "journal.jsonl"
        self._lock = FolderLock(folder)
        self._storage: JournalStorage | None = None
        self._studies: dict[str, optuna.Study] = {}

    @contextmanager
    def held(self) -> Iterator[None]:
        """Nobody else reads or writes the search meanwhile."""
        self._lock.acquire()
        try:
            yield
        finally:
            self._lock.release()

    def trials(self, study: str) -> list[Trial]:
        """All trials of a study by number; none, and no file made, if it is not there."""
        found = self._load(study)
        if found is None:
            return []
        return [
            Trial(trial.number, dict(trial.params), _STATES[trial.state], trial.value)
            for trial in found.get_trials(deepcopy=False)
        ]

    def notes(self, study: str) -> dict[int, dict[str, Any]]:
        """What was noted about a study's trials, by number."""
        found = self._load(study)
        return {} if found is None else {int(k): v for k, v in found.user_attrs.items()}

    def add(self, study: str, values: Mapping[str, float], ranges: Mapping[str, Bounds]) -> Trial:
        """A new running trial, whole or not at all."""
        found = self._load(study) or self._create(study)
        number = len(found.get_trials(deepcopy=False))
        trial = Trial(number, dict(values), "running")
        with writing(self.path):
            found.add_trial(_frozen(trial, ranges))
        return trial

    def note(self, study: str, number: int, note: Mapping[str, Any]) -> None:
        """Replaces the note (JSON types) on a trial."""
        with writing(self.path):
            self._known(study).set_user_attr(str(number), dict(note))

    def tell(self, study: str, number: int, loss: float | None) -> None:
        """Ends a running trial, as failed without a loss; one that has ended stays as it is."""
        state = TrialState.FAIL if loss is None else TrialState.COMPLETE
        with writing(self.path):
            self._known(study).tell(number, loss, state=state, skip_if_finished=True)

    def _known(self, study: str) -> optuna.Study:
        found = self._load(study)
        if found is None:
            raise KeyError(study)
        return found

    def _load(self, study: str) -> optuna.Study | None:
        if study not in self._studies:
            if self._storage is None and not self.path.exists():
                return None
            try:
                self._studies[study] = optuna.load_study(study_name=study, storage=self._opened())
            except KeyError:
                return None
        return self._studies[study]

    def _create(self, study: str) -> optuna.Study:
        with writing(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            created = optuna.create_study(study_name=study, storage=self._opened())
        self._studies[study] = created
        return created

    def _opened(self) -> JournalStorage:
        if self._storage is None:
            self._storage = JournalStorage(_Backend(self.path, self._lock))
        return self._storage
