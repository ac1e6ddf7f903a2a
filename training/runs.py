"""Run folders: where a run lives, whether it is done, and what it was made with.

    results/<experiment>/<sweep>/<run>/ config.yaml plan.json metrics.jsonl summary.json

A run is done when summary.json exists. Its name comes from its config, so the same config is the
same run and is never trained twice.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from param_groups.plan import Plan, dumps
from training.config import Section, read_yaml, to_yaml
from training.errors import UserError
from training.files import write_text

RESULTS = Path("results")


def run_id(config: Section, label: str = "run") -> str:
    """A readable label and a hash of the whole resolved config."""
    text = json.dumps(config.model_dump(mode="json"), sort_keys=True)
    return f"{label}-{hashlib.blake2b(text.encode(), digest_size=5).hexdigest()}"


def summary(run_dir: Path) -> dict[str, Any] | None:
    """The summary of a done run, or None; UserError when the file is damaged."""
    path = run_dir / "summary.json"
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not a summary ({error}); delete it to run again") from None
    if not isinstance(value, dict) or "status" not in value:
        raise UserError(f"{path}: no status in it; delete it to run again")
    return value


def open_run(run_dir: Path, config: Section, plan: Plan) -> None:
    """Makes the folder and writes config and plan; UserError if it holds another config's run."""
    text = to_yaml(config)
    path = run_dir / "config.yaml"
    if path.exists() and (changed := _differences(read_yaml(path), config)):
        raise UserError(
            f"{run_dir} holds a run of another config ({'; '.join(changed[:3])}); "
            "choose another --run-dir or delete the folder"
        )
    write_text(path, text)
    write_text(run_dir / "plan.json", dumps(plan) + "\n")


def _differences(saved: dict[str, Any], config: Section) -> list[str]:
    old, new = (dict(_flat(data)) for data in (saved, config.model_dump(mode="json")))
    keys = dict.fromkeys([*old, *new])
    return [f"{k} {old.get(k)} -> {new.get(k)}" for k in keys if old.get(k) != new.get(k)]


def _flat(data: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    flat = []
    for key, value in data.items():
        if isinstance(value, dict):
            flat += _flat(value, f"{prefix}{key}.")
        else:
            flat.append((prefix + key, value))
    return flat


def train_once(
    run_dir: Path, config: Section, plan: Plan, train: Callable[[], dict[str, Any]], main: bool
) -> dict[str, Any]:
    """The summary of the run in `run_dir`, trained now unless it is done already.

    `main` says whether this is the process that writes.
    """
    if main:
        open_run(run_dir, config, plan)
    done = summary(run_dir)
    return done if done is not None else train()
