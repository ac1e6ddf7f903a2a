"""Curves of a run in TensorBoard, Weights & Biases, MLflow or Trackio, by accelerate's classes.

The JSON lines of a run are the truth, and a tracker is told each of them. How many lines it knows
stands in `trackers.json` in the run's folder, so that a run that resumes tells it only what is new:
steps that are taken again are not told again, as they come to the same numbers, and a tracker that
is switched on later is told what came before. TensorBoard's files are local and are written anew.

The sweep is the tracker's group or experiment, the run's id its name. A tracker that fails is
dropped with a warning; the run goes on.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker, get_available_trackers

from training.errors import UserError, reason
from training.files import read_text, write_json
from training.log import Log

FOLDER = "tensorboard"  # of a run: its event files
STATE = "trackers.json"


def check_installed(names: Sequence[str]) -> None:
    """Raises UserError for a tracker whose package is not there."""
    for name in names:
        if name not in map(str, get_available_trackers()):
            raise UserError(
                f"training.trackers: {name} is not installed; pip install {name}, or leave it out"
            )


class Trackers:
    """The trackers of one run, in the process that writes its logs."""

    def __init__(
        self,
        names: Sequence[str],
        run_dir: Path,
        config: Mapping[str, Any],
        rates: Mapping[str, float],
    ) -> None:
        """`config` by dotted keys; `rates`: the peak learning rate of each group by name."""
        self.names, self.run_dir, self.rates = names, run_dir.absolute(), rates
        self.config = config
        self.open: dict[str, GeneralTracker] = {}
        self.told: dict[str, dict[str, Any]] = {}
        """Per tracker the lines it knows of each log, and the id that MLflow has given the run."""
        self.counts: dict[str, int] = {}

    def start(self, logs: Sequence[Log]) -> None:
        """Opens the trackers and tells them what the logs, cut back to a checkpoint, hold."""
        if not self.names:
            return
        try:
            self.told = json.loads(read_text(self.run_dir / STATE))
        except (OSError, ValueError):
            self.told = {}
        for name in self.names:
            self._guarded(name, lambda: self._open(name))  # noqa: B023
        lines = [(log, line) for log in logs for line in log.lines()]
        for log, line in sorted(lines, key=lambda item: item[1]["step"]):  # W&B wants rising steps
            self.tell(log, line)
        for log in logs:
            log.listener = self.tell

    def tell(self, log: Log, line: Mapping[str, Any]) -> None:
        """Tells every tracker a line of a log that it does not know yet."""
        file, name = log.path.name, log.path.stem
        self.counts[file] = count = self.counts.get(file, 0) + 1
        prefix = "" if name == "metrics" else f"{name}/"
        values = {prefix + key: value for key, value in _scalars(line) if key != "step"}
        if (factor := line.get("lr_factor")) is not None:
            values |= {f"lr/{group}": rate * factor for group, rate in self.rates.items()}

        def send(name: str, tracker: GeneralTracker) -> None:
            if count <= self.told[name].get(file, 0):
                return
            tracker.log(values, step=line["step"])
            self.told[name][file] = count
            if name != "tensorboard":
                write_json(self.run_dir / STATE, self.told)

        for name, tracker in list(self.open.items()):
            self._guarded(name, lambda: send(name, tracker))  # noqa: B023

    def finish(self) -> None:
        """Closes the trackers."""
        for name, tracker in list(self.open.items()):
            self._guarded(name, tracker.finish)

    def _open(self, name: str) -> None:
        run = self.run_dir.name
        sweep, experiment = (folder.name or "runs" for folder in self.run_dir.parents[:2])
        known = self.told.setdefault(name, {})
        make = LOGGER_TYPE_TO_CLASS[name]
        if name == "tensorboard":
            known.clear()
            if (self.run_dir / FOLDER).exists():
                shutil.rmtree(self.run_dir / FOLDER)  # refuses a link, and is dropped then
            tracker = make(FOLDER, self.run_dir)
        elif name == "wandb":
            tracker = make(
                experiment,
                group=sweep,
                name=run,
                id=f"{sweep}.{run}",
                resume="allow",
                dir=str(self.run_dir),
            )
        elif name == "mlflow":
            tracker = make(f"{experiment}/{sweep}", run_name=run, run_id=known.get("id"))
        else:
            tracker = make(experiment, group=sweep, name=f"{sweep}.{run}", resume="allow")
        tracker.start()
        self.open[name] = tracker
        if name == "tensorboard":  # accelerate's way to store a config opens a second run
            text = json.dumps(self.config, indent=1)
            tracker.writer.add_text("config", f"```\n{text}\n```")
        else:
            tracker.store_init_configuration(self.config)
        if name == "mlflow":
            known["id"] = tracker.tracker.info.run_id

    def _guarded(self, name: str, action: Callable[[], None]) -> None:
        """Does it; a tracker that raises is dropped, with one line."""
        try:
            action()
        except Exception as error:
            self.open.pop(name, None)
            print(
                f"training.trackers: {name} is dropped, the run goes on: {reason(error)}",
                file=sys.stderr,
            )


def _scalars(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """The finite numbers of nested data, by keys joined with slashes."""
    for key, value in data.items():
        if isinstance(value, Mapping):
            yield from _scalars(value, f"{prefix}{key}/")
        elif isinstance(value, (int, float)) and math.isfinite(value):
            yield prefix + key, value
