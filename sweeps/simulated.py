"""Simulated steps beside the closed forms: where a model fits, and how it is launched."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sweeps.asked import Asked
from sweeps.needs import GPUS, NODE, counted, gpus_of, holds, of_whole_tensors, peak_of
from sweeps.pool import Needs
from sweeps.progress import columns
from sweeps.task import Node, launch_command
from training import runs
from training.config import set_keys, validate
from training.errors import UserError
from training.memory import is_observation

TOLERANCE = 0.1  # a closed form is this near to the simulation, or said to disagree
_STEP = ("memory_bytes", "step_flops")
_steps: dict[Any, dict[str, Any]] = {}  # what has been simulated: files share sizes


def launches(asked: Asked, config: Any, sharded: int | None = None) -> list[dict[str, Any]]:
    """How a run is launched on every kind of GPU, as JSON types: one entry per number of GPUs.

    The simulation says how many, unless the run shall be `sharded` over so many; what the closed
    forms say stands beside it. FLOPs are those of a step on one GPU, where no forward pass is
    computed again.
    """
    experiment, batch = asked.experiment, config.training.batch_size

    def peak(shards: int) -> int:
        parts = experiment.memory(config, shards=shards)
        observed = parts["total"] if is_observation(parts) else 0
        return max(_step(asked, config, shards)["memory_bytes"], observed)

    unobserved = config
    if getattr(config.training, "observe_every", 0):
        training = config.training.model_copy(update={"observe_every": 0})
        unobserved = config.model_copy(update={"training": training})
    alike: dict[tuple[Any, ...], list[str]] = {}
    for gpu in GPUS:
        counts = [
            gpus_of(form, batch, gpu.memory)
            if sharded is None
            else sharded
            if holds(gpu.memory, form(sharded))
            else None
            for form in (peak, peak_of(experiment, config))
        ]
        alike.setdefault(tuple(counts), []).append(gpu.name)
    found = []
    for (gpus, by_closed_form), names in alike.items():
        shards = max(1, int(gpus or sharded or 1))
        share = -(-batch // shards)
        one, step = _step(asked, config, 1), _step(asked, config, shards)
        forms = {
            "gpus": by_closed_form,
            "memory_bytes": experiment.memory(unobserved, shards=shards)["total"],
            "step_flops": experiment.flops(config) / config.training.steps,
            "parameters": experiment.parameters(config)["total"],
        }
        entry = {
            "on": names,
            "gpus": gpus,
            "sharding": "FSDP2" if shards > 1 else "none",
            "micro_batch": min(config.training.micro_batch_size or share, share),
            "memory_bytes": step["memory_bytes"],
            "step_flops": one["step_flops"],
            "parameters": one["parameters"],
            "closed_forms": forms,
            "launch": None if gpus is None else _launch(asked, config, shards),
            "without": of_whole_tensors(config) if shards > 1 else [],
        }
        off = [key for key in _STEP if abs(forms[key] / entry[key] - 1) > TOLERANCE]
        off += ["parameters"] if forms["parameters"] != entry["parameters"] else []
        # Near a GPU's size the forms may ask for more GPUs than it takes, and not for fewer.
        off += ["gpus"] if (by_closed_form or math.inf) < (gpus or math.inf) else []
        entry["disagree"] = off
        found.append(entry)
    return found


def size_of(config: Any) -> str:
    """What the memory and FLOPs of a step can depend on: not the rates, seed and length."""
    content = config.model_dump(mode="json")
    content["optimizer"] = content["optimizer"]["name"]
    content["schedule"] = content["seed"] = content["training"]["steps"] = None
    return json.dumps(content, sort_keys=True)


def _step(asked: Asked, config: Any, shards: int) -> dict[str, Any]:
    """The simulated step."""
    from training.simulate import simulate  # torch, for which other commands do not wait

    key = asked.experiment.name, size_of(config), shards
    if key not in _steps:
        step = simulate(asked.experiment, config, shards)
        _steps[key] = {
            "memory_bytes": step.memory,
            "step_flops": step.flops,
            "parameters": step.parameters,
        }
    return _steps[key]


def _launch(asked: Asked, config: Any, shards: int) -> str:
    """The command that trains this one config, as an engine starts it."""
    base = asked.path.parent / asked.config.config
    written = dict(runs.flat(asked.base))
    before = dict(runs.flat(validate(type(config), asked.base, str(base)).model_dump(mode="json")))
    # A dump leaves out some keys at their default, and what follows from others.
    before |= {key: value for key, value in written.items() if key not in before}
    settings = {
        key: functools.reduce(lambda part, word: getattr(part, word, None), key.split("."), config)
        for key in before
    }
    settings |= dict(runs.flat(config.model_dump(mode="json")))
    if shards > 1 and (keys := of_whole_tensors(config)):
        settings |= dict.fromkeys(keys, 0)
        settings.pop("training.observe_samples", None)  # means nothing then
    changes = {
        key: value for key, value in settings.items() if key not in before or before[key] != value
    }
    for key in [key for key in changes if key.startswith("model.") and key not in written]:
        # The model's width, where the file has its heads, say: both would be refused.
        fewer = {other: value for other, value in changes.items() if other != key}
        with contextlib.suppress(UserError):  # it is needed
            changed = validate(type(config), set_keys(asked.base, fewer), str(base))
            changes = fewer if changed.model == config.model else changes
    needs = Needs(gpus=shards, processes=shards, nodes=max(1, shards // NODE))
    words = launch_command(needs, (), Node(0, "FIRST_NODE", 29500))
    start = ["accelerate", *words[words.index("launch") :], "-m"] if words else ["python", "-m"]
    file = base.resolve()
    shown = file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file
    said = [f"{key}={json.dumps(value)}" for key, value in changes.items()]
    return shlex.join([*start, f"{asked.experiment.name}.train", str(shown), *said])


def table(named: Iterable[tuple[str, Sequence[Mapping[str, Any]]]]) -> str:
    """Sizes, each with its entries, for people; closed forms that disagree are named below."""
    rows = [
        (
            "model",
            "on",
            "GPUs",
            "sharding",
            "micro-batch",
            "GB each",
            "closed form",
            "FLOPs / step",
            "closed form",
        )
    ]
    lines = []
    for name, entries in named:
        for entry in entries:
            forms = entry["closed_forms"]
            rows.append(
                (
                    name,
                    ", ".join(entry["on"]),
                    counted(entry["gpus"]),
                    entry["sharding"],
                    str(entry["micro_batch"]),
                    f"{entry['memory_bytes'] / 1e9:.3g}",
                    f"{forms['memory_bytes'] / 1e9:.3g}",
                    f"{entry['step_flops']:.4g}",
                    f"{forms['step_flops']:.4g}",
                )
            )
            if entry["disagree"]:
                words = ", ".join(
                    f"{key} {entry[key]} and not {forms[key]}" for key in entry["disagree"]
                )
                lines.append(f"the closed forms are wrong for {name} on {entry['on'][0]}: {words}")
    launched = [
        f"{name} on {', '.join(entry['on'])}"
        f"{', without ' * bool(entry['without'])}{' and '.join(entry['without'])}:\n"
        f"    {entry['launch']}"
        for name, entries in named
        for entry in entries
        if entry["launch"]
    ]
    return "\n".join([columns(rows), *lines, "", "one run of each by hand:", *launched])


def csv_rows(counts: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The entries of all files' sizes, one row each; columns as in CSV_COLUMNS."""
    rows = []
    for file in counts:
        for size in file["sizes"]:
            run, model = size["largest_run"], " ".join(f"{k}={v}" for k, v in size["model"].items())
            for entry in size["simulated"]:
                rows.append(
                    {
                        "file": file["file"],
                        "model": model,
                        "optimizer": run["optimizer"],
                        "precision": run["precision"],
                        **entry,
                        "on": " ".join(entry["on"]),
                        "disagree": " ".join(entry["disagree"]),
                        **{
                            f"{key}_by_closed_form": said
                            for key, said in entry["closed_forms"].items()
                        },
                    }
                )
    return rows


CSV_COLUMNS = (
    "file",
    "model",
    "optimizer",
    "precision",
    "parameters",
    "on",
    "gpus",
    "gpus_by_closed_form",
    "sharding",
    "micro_batch",
    "memory_bytes",
    "memory_bytes_by_closed_form",
    "step_flops",
    "step_flops_by_closed_form",
    "disagree",
    "launch",
)
