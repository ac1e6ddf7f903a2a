"""Run folders: where a run lives, whether it is done, and what it was made with.

    results/<experiment>/<sweep>/<run>/ config.yaml plan.json metrics.jsonl summary.json

A run is done when summary.json exists. Its name comes from its config, so the same config is the
same run and is never trained twice.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from param_groups.plan import Plan, dumps
from training import processes
from training.config import Section, read_yaml, to_yaml
from training.errors import UserError
from training.files import locked, write_text

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


def refuse_other(run_dir: Path, config: Section) -> None:
    """Raises UserError if the folder holds what another config has trained."""
    path, metrics = run_dir / "config.yaml", run_dir / "metrics.jsonl"
    trained = (run_dir / "summary.json").exists() or (metrics.exists() and metrics.stat().st_size)
    if trained and path.exists() and (changed := _differences(read_yaml(path), config)):
        raise UserError(
            f"{run_dir} holds a run of another config ({'; '.join(changed[:3])}); "
            "choose another --run-dir or delete the folder"
        )


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
    run_dir: Path, config: Section, plan: Plan, train: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """The summary of the run in `run_dir`, trained now unless it is done already.

    Prints the plan and writes it, with the config, before the first step. The main process reads
    and writes the folder and holds it while it trains.
    """
    process = processes.state()
    if not process.is_main_process:
        done = processes.from_main(None)
        return train() if done is None else done
    refuse_other(run_dir, config)
    done = processes.from_main(summary(run_dir))
    if done is not None:
        return done
    with locked(run_dir, "run"):
        print(plan.table(), file=sys.stderr, flush=True)
        write_text(run_dir / "config.yaml", to_yaml(config))
        write_text(run_dir / "plan.json", dumps(plan) + "\n")
        return train()
