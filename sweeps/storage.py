"""The trials of a search in Optuna's own storage, which optuna-dashboard opens.

By default a journal of JSON lines in the search's folder, without a server or a pickle; or any
database that Optuna knows, by its URL. One driver writes it. Deleting the journal loses no
training: the next command finds the runs of the same trials.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sweeps.study import Bounds, Trial, frozen
from training.errors import UserError
from training.files import writing

if TYPE_CHECKING:
    import optuna


class Storage:
    """The studies of one search: named lists of trials with notes on them."""

    def __init__(self, folder: Path, url: str | None = None) -> None:
        self.path, self.url = folder / "journal.jsonl", url
        self._studies: dict[str, optuna.Study] = {}
        self._storage: Any = None
        self._is_whole = url is not None

    def trials(self, key: str) -> list[Trial]:
        """All trials of a study by number; none, and no file made, if it is not there."""
        if self.url is None and not self.path.exists():
            return []
        try:
            study = self._study(key)
        except KeyError:
            return []
        notes = study.user_attrs
        return [
            Trial(
                t.number,
                dict(t.params),
                t.state.name.lower(),
                t.value,
                notes.get(str(t.number), {}),
            )
            for t in study.get_trials(deepcopy=False)
        ]

    def add(self, key: str, trial: Trial, ranges: Mapping[str, Bounds], run: str) -> None:
        """Notes a new trial, whole or not at all."""
        import optuna

        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self._writing():
            if key not in self._studies:
                self._studies[key] = optuna.create_study(
                    study_name=key, storage=self._opened(), load_if_exists=True
                )
            self._studies[key].add_trial(frozen(trial, ranges, {"run": run}))

    def end(self, key: str, trial: Trial, note: Mapping[str, Any], loss: float | None) -> Trial:
        """Ends a running trial, as failed without a loss.

        The note comes first: a crash in between leaves the trial to be ended again.
        """
        from optuna.trial import TrialState

        study, state = self._study(key), "fail" if loss is None else "complete"
        with self._writing():
            study.set_user_attr(str(trial.number), dict(note))
            study.tell(trial.number, loss, state=TrialState[state.upper()])
        return replace(trial, state=state, loss=loss, note=dict(note))

    def _study(self, key: str) -> optuna.Study:
        """A study that is there; KeyError otherwise."""
        import optuna

        if key not in self._studies:
            self._studies[key] = optuna.load_study(study_name=key, storage=self._opened())
        return self._studies[key]

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Removes first, once, half a line that a crash left: the next would stand behind it."""
        with writing(self.path):
            if not self._is_whole and self.path.exists():
                with open(self.path, "r+b") as file:
                    file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
                    if file.read(1) not in (b"", b"\n"):
                        file.seek(0)
                        file.truncate(file.read().rfind(b"\n") + 1)
            self._is_whole = True
            yield

    def _opened(self) -> Any:
        """Optuna's storage; UserError if the journal is damaged or the database cannot be had."""
        if self._storage is not None:
            return self._storage
        import optuna
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        if self.url is not None:
            try:
                self._storage = optuna.storages.get_storage(self.url)
            except Exception as error:  # sqlalchemy's own, or a driver's that is not installed
                raise UserError(
                    f"--storage {self.url}: cannot open it: {str(error).splitlines()[0]}"
                ) from None
        else:
            # Optuna's own lock outlives a killed process by half a minute; there is one driver.
            with writing(self.path):
                backend = JournalFileBackend(str(self.path), threading.Lock())
            try:
                self._storage = JournalStorage(backend)
            except ValueError as error:
                raise UserError(
                    f"{self.path}: damaged ({error}); delete it: runs that are done are not "
                    "trained again"
                ) from None
        return self._storage
