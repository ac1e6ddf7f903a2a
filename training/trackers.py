"""A run's curves elsewhere, by accelerate's trackers; metrics.jsonl stays the truth."""

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from accelerate import Accelerator
from accelerate.tracking import get_available_trackers

from training.errors import UserError, reason


def check_installed(names: Sequence[str]) -> None:
    """Raises UserError for a tracker whose package is not there; accelerate would ignore it."""
    for name in set(names) - set(map(str, get_available_trackers())):
        advice = f"pip install {name}, or leave it out"
        raise UserError(f"training.trackers: {name} is not installed; {advice}")


@contextlib.contextmanager
def harmless(accelerator: Accelerator) -> Iterator[None]:
    """Drops the trackers when one of them raises."""
    try:
        yield
    except Exception as error:
        accelerator.trackers = []
        print(f"training.trackers: dropped, the run goes on: {reason(error)}", file=sys.stderr)


def start(accelerator: Accelerator, run_dir: Path, config: Mapping[str, object], step: int) -> None:
    """Opens the trackers of a run that begins, or resumes, after a step."""
    experiment, sweep, run = (["runs"] * 3 + list(run_dir.absolute().parts))[-3:]
    name, group = f"{sweep}.{run}", {"group": sweep, "resume": "allow"}
    options: dict[str, dict[str, object]] = {"mlflow": {"run_name": name}}
    options |= {"trackio": {**group, "name": name}, "wandb": {**group, "name": run, "id": name}}
    if step:  # TensorBoard leaves out what was shown of the steps that are taken again
        options["tensorboard"] = {"purge_step": step + 1}
    with harmless(accelerator):
        accelerator.init_trackers(experiment, init_kwargs=options)
        for tracker in accelerator.trackers:
            if tracker.name != "tensorboard":  # which would show the config as a run of its own
                tracker.store_init_configuration(dict(config))
