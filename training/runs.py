"""Run folders: where a run lives, whether it is done, and what it was made with.

    results/<experiment>/<sweep>/<run>/ config.yaml plan.json metrics.jsonl summary.json
                                        probes.jsonl observations.jsonl observations/
                                        checkpoints/ .lock

A run is done when summary.json says finished or diverged; one that is stopped, or was killed, goes
on from its newest checkpoint. Its name comes from its config, so the same config is the same run
and is never trained twice.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.config import Section, read_yaml, set_keys, to_yaml
from training.errors import Damaged, RunError
from training.files import (
    checksum,
    if_present,
    locked,
    parse_json,
    read_text,
    refuse_file,
    write_json,
    write_text,
)
from training.log import Log, changed
from training.settings import RunConfig, default_epsilon

# Sweeps only ask for names and summaries; they start without torch.
if TYPE_CHECKING:
    from param_groups.plan import Plan

RESULTS = Path("results")
Summary = dict[str, Any]  # of a run, as in its summary.json
STATUSES = ("finished", "diverged", "stopped")  # of a run; the last is resumed


def identity(config: Section) -> dict[str, Any]:
    """The resolved config as JSON types, without the keys that change no result."""
    return _resolved(config.model_dump(mode="json"), type(config))


def _resolved(data: Mapping[str, Any], kind: type[Section]) -> dict[str, Any]:
    """What decides a run's result: an optimiser's own epsilon is the same, given or default."""
    kept = set_keys(data, getattr(kind, "constants", {}))
    for key in getattr(kind, "without_effect", ("checkpoint",)):
        section, _, name = key.rpartition(".")
        kept.pop(key, None)
        if isinstance(kept.get(section), dict):
            kept[section] = {k: v for k, v in kept[section].items() if k != name}
    optimizer = kept.get("optimizer")
    if isinstance(optimizer, dict) and optimizer.get("eps", 0) is None:
        kept["optimizer"] = optimizer | {"eps": default_epsilon(optimizer.get("name", "adam"))}
    return kept


def run_id(config: Section, label: str = "run") -> str:
    """A readable label and a hash of the resolved config."""
    text = json.dumps(identity(config), sort_keys=True)
    return f"{label}-{hashlib.blake2b(text.encode(), digest_size=5).hexdigest()}"


def summary(run_dir: Path) -> Summary | None:
    """What summary.json says, or None without one; RunError when the file is damaged."""
    path = run_dir / "summary.json"
    try:
        value = parse_json(read_text(path))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        refuse_file(run_dir)
        if isinstance(error, OSError):
            with if_present(path):
                raise error
        raise RunError(f"{path}: not a summary ({error}); delete it to run again") from None
    if not isinstance(value, dict) or value.get("status") not in STATUSES:
        raise RunError(f"{path}: no status in it; delete it to run again")
    return value


def write_summary(run_dir: Path, run: str, outcome: Summary, logs: Iterable[Log]) -> Summary:
    """Writes summary.json with a seal, and returns it: the run's id, the checksums of its files,
    and one of all that it says. The logs are whole, and on the disk, before."""
    there = [name for name in ("config.yaml", "plan.json") if (run_dir / name).exists()]
    files = {name: checksum(run_dir / name) for name in there}
    for log in logs:
        files |= log.sums()
    value = {**outcome, "run": run, "files": files}
    value["seal"] = _seal(value)
    write_json(run_dir / "summary.json", value)
    return value


def _seal(value: Mapping[str, Any]) -> str:
    text = json.dumps({key: part for key, part in value.items() if key != "seal"}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def sealed(run_dir: Path, run: str) -> Summary | None:
    """The summary of a run that needs no more training, or None.

    Raises Damaged unless it and the files that it names are as the run with this id (or another
    label of it) has left them; RunError without a seal, as before summaries had one.
    """
    value = summary(run_dir)
    if value is None or value["status"] == "stopped":
        return None
    if "seal" not in value:
        raise RunError(
            f"{run_dir}: summary.json has no seal, so that nobody can tell whether its results are "
            "as they were written; take the commit that trained it, or delete the folder to train "
            "it again"
        )
    if value["seal"] != _seal(value):
        raise Damaged(f"{run_dir / 'summary.json'} is not as the run has written it")
    if value["run"].rpartition("-")[2] != run.rpartition("-")[2]:
        raise Damaged(f"{run_dir / 'summary.json'} is of another run, {value['run']}")
    if other := changed(run_dir, value["files"]):
        raise Damaged(f"{run_dir / other} is not as the run has written it")
    for path in (*run_dir.glob("*.jsonl"), *run_dir.glob("observations/step_*")):
        if str(path.relative_to(run_dir)) not in value["files"]:
            raise Damaged(f"{path} is not of this run")
    return value


def done(run_dir: Path, run: str | None = None) -> Summary | None:
    """The same with a RunError for what is damaged; a folder is called as its run, unless `run`
    says the id."""
    try:
        return sealed(run_dir, run or run_dir.name)
    except Damaged as damage:
        raise RunError(f"{damage}; delete {run_dir} to train the run again") from None


def refuse_other(run_dir: Path, config: Section, plan: Plan) -> None:
    """Raises RunError if the folder holds what another config or plan has trained, or is a file."""
    from param_groups import Plan, PlanError

    refuse_file(run_dir)
    metrics, path = run_dir / "metrics.jsonl", run_dir / "plan.json"
    trained = (run_dir / "summary.json").exists() or (metrics.exists() and metrics.stat().st_size)
    if not trained or not (run_dir / "config.yaml").is_file():
        return
    try:
        planned = Plan.from_dict(parse_json(read_text(path)))
    except FileNotFoundError:  # its checkpoints know the plan, too
        planned = None
    except (OSError, ValueError, PlanError) as error:
        raise RunError(f"{path}: not a saved plan ({error}); delete the folder") from None
    refuse_differences(run_dir, read_yaml(run_dir / "config.yaml"), planned, config, plan)


def refuse_differences(
    where: Path, saved: Mapping[str, Any], saved_plan: Plan | None, config: Section, plan: Plan
) -> None:
    """Raises RunError, with the differences, unless `where` was made by this config and plan."""
    old, new = dict(flat(_resolved(saved, type(config)))), dict(flat(identity(config)))
    keys = [key for key in dict.fromkeys([*old, *new]) if old.get(key) != new.get(key)]
    if changed := [f"{key} {old.get(key)} -> {new.get(key)}" for key in keys]:
        raise RunError(
            f"{where} holds a run of another config ({_few(changed)}); "
            "choose another --run-dir or delete the folder"
        )
    if saved_plan is not None and (changed := saved_plan.differences(plan)):
        raise RunError(
            f"{where} holds a run of another plan ({_few(changed)}); the code that plans has "
            "changed: go back to the commit of the run, choose another --run-dir or delete the "
            "folder"
        )


def _few(lines: list[str], shown: int = 3) -> str:
    more = f"; and {len(lines) - shown} more" if len(lines) > shown else ""
    return "; ".join(lines[:shown]) + more


def flat(data: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Nested data as (dotted key, value)."""
    found = []
    for key, value in data.items():
        if isinstance(value, dict):
            found += flat(value, f"{prefix}{key}.")
        else:
            found.append((f"{prefix}{key}", value))
    return found


def train_once(
    run_dir: Path,
    config: RunConfig,
    plan: Plan,
    train: Callable[[], Summary],
    data: str | None = None,
) -> Summary:
    """The summary of the run in `run_dir`, trained now unless it is done already.

    Prints the plan and writes it, with the config, before the first step. The main process reads
    and writes the folder and holds it while it trains; Busy if another one does. RunError if it was
    done with another config or plan, or on other `data`, by their checksum.
    """
    from training import processes

    with ExitStack() as held:
        value = processes.on_main(lambda: _enter(run_dir, config, plan, data, held))
        return train() if value is None else value


def _enter(
    run_dir: Path, config: RunConfig, plan: Plan, data: str | None, held: ExitStack
) -> Summary | None:
    """The summary of a run that is done, or None with the folder held and ready for training."""
    from param_groups.plan import dumps
    from training.checkpoints import checkpoint

    def finished() -> Summary | None:
        refuse_other(run_dir, config, plan)
        value = done(run_dir, run_id(config))
        if value is not None and value.get("data_checksum") != data:
            raise RunError(
                f"{run_dir}: the run was trained on other data than its config's files hold now; "
                "bring those back, choose another --run-dir or delete the folder"
            )
        return value

    def keeps() -> bool:  # as this command or the one that trained the run says
        return config.checkpoint.final or read_yaml(written)["checkpoint"]["final"]

    saved, written = run_dir / "checkpoints", run_dir / "config.yaml"
    if (value := finished()) is not None and (not saved.exists() or keeps()):
        return value
    held.enter_context(locked(run_dir, "run"))
    # Another process may have finished it since; what the lock protects is read under it.
    if (value := finished()) is None:
        print(plan.table(), file=sys.stderr, flush=True)
        # The plan first: a config without one beside it is the user's, not a run's.
        write_text(run_dir / "plan.json", dumps(plan) + "\n")
        write_text(written, to_yaml(config))
    elif not keeps():
        checkpoint.discard(saved)  # it ended between its summary and the removal of what it saved
    return value
