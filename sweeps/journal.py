"""The trials of a search where Optuna keeps them, and what is wrong with a file that holds them."""

from __future__ import annotations

import functools
import hashlib
import os
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.errors import UserError, reason
from training.files import checksum, open_plain, parse_json, read_text, write_json, writing

if TYPE_CHECKING:
    import optuna
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial

Bounds = tuple[float, float]
Ranges = Mapping[str, Bounds]
_BEGUN = '"datetime_start"'  # in the line that begins a trial


class Journal:
    """The trials of one search where Optuna keeps them: JSON lines in its folder, which
    optuna-dashboard opens. One driver writes them."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "journal.jsonl"
        self.seal = folder / "journal.sha256"
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
        trials = self._studies[name].get_trials(deepcopy=False)
        for trial in trials:
            wanted = {"run", "status", "commit"} if trial.state.name == "COMPLETE" else {"run"}
            if missing := wanted - trial.user_attrs.keys():
                raise self.damaged(f"trial {trial.number} of {name!r} has no {max(missing)}")
        return trials

    def begin(self, name: str, values: Mapping[str, float], ranges: Ranges, run: str) -> None:
        """Notes a new trial, whole or not at all: Optuna's `ask` writes a line per value."""
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
        """First removes, once, a partial last line left by a crash, which would spoil the next."""
        with writing(self.path), open(self.path, "ab+") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
            if not self._is_whole and file.read(1) not in (b"", b"\n"):
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)
            self._is_whole = True
            yield
        write_json(self.seal, checksum(self.path))

    @functools.cached_property
    def _storage(self) -> optuna.storages.JournalStorage:
        """Optuna's own; UserError for a damaged journal, as far as that shows without the runs."""
        import optuna
        from optuna.storages.journal import JournalFileBackend

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._compare()
        # Optuna's file lock outlives a killed process by half a minute. As there is one driver, a
        # threading.Lock will do: it has the two methods that are called, but not Optuna's type.
        with writing(self.path):
            open_plain(self.path, "a").close()  # a pipe would be waited on for ever
            lock = threading.Lock()
            backend = JournalFileBackend(str(self.path), lock)  # type: ignore[arg-type]
        try:  # a line that begins a trial has the time: no two are the same
            begun = Counter(line for line in read_text(self.path).splitlines() if _BEGUN in line)
            storage = optuna.storages.JournalStorage(backend)
        except Exception as error:  # whatever Optuna makes of lines that are not its own
            raise self.damaged(reason(error)) from None
        if twice := [line for line, count in begun.items() if count > 1]:
            raise self.damaged(f"a line stands twice: {twice[0][:80]}")
        return storage

    def _compare(self) -> None:
        """UserError unless the journal starts with what it held when it was sealed.

        Lines that are gone show in nothing else. After a kill it holds more than was sealed.
        """
        if not self.path.exists() or not self.path.stat().st_size:
            self.seal.unlink(missing_ok=True)  # of a journal that was deleted
        elif self.seal.exists():
            try:
                sealed = parse_json(read_text(self.seal))
                with open_plain(self.path, "rb") as file:
                    start = file.read()[: sealed["bytes"]]
                found = {"bytes": len(start), "sha256": hashlib.sha256(start).hexdigest()}
            except (OSError, ValueError, TypeError, KeyError) as error:
                raise self.damaged(f"{self.seal.name}: {reason(error)}") from None
            if found != sealed:
                raise self.damaged(f"lines are gone or changed that {self.seal.name} counts")

    def damaged(self, why: str) -> UserError:
        """The error of a journal that is not as it was written."""
        return UserError(
            f"{self.path}: damaged ({why}); delete it: runs that are done are not trained again"
        )


def distributions(ranges: Ranges) -> dict[str, BaseDistribution]:
    from optuna.distributions import FloatDistribution

    return {key: FloatDistribution(low, high, log=True) for key, (low, high) in ranges.items()}
