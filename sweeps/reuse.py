"""Results that are there already: a run's own, or those of the same run in another sweep."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from training import environment, runs
from training.errors import RunError
from training.files import scratch_folder, sync

# A finished run's own files; nothing else in its folder is a result.
_FILES = (
    *("config.yaml", "plan.json", "metrics.jsonl", "timing.jsonl"),
    *("probes.jsonl", "observations.jsonl", "summary.json"),
)
_FOLDER = "observations"  # the arrays of observations.jsonl


class Store:
    """The runs in a sweep's folder; what another sweep has finished is copied, unless it looks."""

    def __init__(self, folder: Path, looks: bool = False) -> None:
        self.folder, self.looks = folder, looks

    def recall(self, run: str) -> dict[str, Any] | None:
        """The summary of a run that is done, or None; RunError for one that cannot be read."""
        summary = runs.done(self.folder / run)
        if summary is not None:
            return summary
        for source in self._elsewhere.get(_hash(run), ()):
            with suppress(RunError, OSError, ValueError):
                summary = take_over(source, None if self.looks else self.folder / run)
                if summary is not None:
                    return summary
        return None

    @functools.cached_property
    def _elsewhere(self) -> dict[str, list[Path]]:
        """Hash -> run folders in the other sweeps of the experiment."""
        found: dict[str, list[Path]] = {}
        for other in sorted(self.folder.parent.glob("*/*-*/summary.json")):
            if other.parent.parent != self.folder:
                found.setdefault(_hash(other.parent.name), []).append(other.parent)
        return found


def _hash(run: str) -> str:
    """The part of a run's name that its config alone decides."""
    return run.rpartition("-")[2]


def of_other_commits(results: Iterable[Mapping[str, Any]]) -> list[str]:
    """A line on the results of runs, or notes of trials, that other code than this has made."""
    ours = environment.commit()
    commits = [result.get("environment", result).get("commit") for result in results]
    others = [commit for commit in commits if commit not in (None, ours)]
    if ours is None or not others:
        return []
    names = list(dict.fromkeys(_short(commit) for commit in others))
    shown = ", ".join(names[:3]) + (", ..." if names[3:] else "")
    return [
        f"runs that are done and were made at another commit than {_short(ours)}: {len(others)} "
        f"(at {shown}); delete a run's folder to train it again"
    ]


def of_other_data(ended: Iterable[tuple[Any, Mapping[str, Any]]]) -> list[str]:
    """A line on runs whose configs name the same data and that have read different ones: files that
    a config names were changed while a sweep was stopped."""
    read: dict[str, dict[str, list[str]]] = {}
    for point, summary in ended:
        if checksum := summary.get("data_checksum"):
            data = read.setdefault(repr(getattr(point.config, "data", None)), {})
            data.setdefault(checksum, []).append(point.run)
    return [
        "runs whose configs name the same data have read different ones, so that their losses do "
        "not compare: "
        + ", ".join(f"{len(names)} such as {names[0]}" for names in data.values())
        + "; delete the folders of those whose data are no longer there to train them again"
        for data in read.values()
        if len(data) > 1
    ]


def _short(commit: str) -> str:
    """The first figures of a commit, and whether files differ from it."""
    head, plus, changes = commit.partition("+")
    return f"{head[:7]}{plus}{changes}"


def take_over(source: Path, target: Path | None) -> dict[str, Any] | None:
    """The summary of a finished run of this commit, copied to `target` whole or not at all.

    None if it is not done, was made at another commit, or if `target` has begun to train. What has
    no commit, or changes since it, may be other code.
    """
    summary, ours = runs.done(source), environment.commit()
    if summary is None or ours is None or ours.endswith("+changes"):
        return None
    if summary.get("environment", {}).get("commit") != ours:
        return None
    if target is None:
        return summary
    if target.exists() and any(target.iterdir()):
        return None
    with scratch_folder(target, "--results") as aside:
        for name in _FILES:
            if (source / name).exists():
                shutil.copyfile(source / name, aside / name)
        if (source / _FOLDER).is_dir():
            shutil.copytree(source / _FOLDER, aside / _FOLDER, symlinks=True)
        for path in (*aside.rglob("*"), aside):  # a summary must not outlive what it sums up
            if not path.is_symlink():
                sync(path)
        aside.rename(target)  # over an empty folder at most; otherwise OSError
    return summary
