"""Folders of runs: what is in them, and what the tests do to them."""

import json
from types import SimpleNamespace

import pytest

from training import files, loop, runs
from training.checkpoints import checkpoint, state

STATE = "shard-00001-model-00001-of-00001.safetensors"  # of a run in one process


class Death(BaseException):
    """The process ends here: nothing in the code may catch it."""


def dies_after(step, train, *args, **kwargs):
    """A call that trains ends abruptly before the update of the step after `step`."""
    update = loop.Loop._update

    def dying(self, now):
        if now == step + 1:
            raise Death
        update(self, now)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Death):
        patch.setattr(loop.Loop, "_update", dying)
        train(*args, **kwargs)


def lines(folder, name="metrics.jsonl"):
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def observed_bytes(folder):
    """All that a run has observed: its log and its arrays by name."""
    arrays = {path.name: path.read_bytes() for path in (folder / "observations").iterdir()}
    return (folder / "observations.jsonl").read_bytes(), arrays


def checkpoints(folder):
    return sorted(path.name for path in (folder / "checkpoints").glob("*"))


def end_run(run_dir, summary, run=None):
    """Writes a run's summary, with a seal of the files that are in its folder now."""
    names = [p.relative_to(run_dir) for p in (*run_dir.glob("*.jsonl"), *run_dir.glob("*/step_*"))]
    sums = {str(name): files.checksum(run_dir / name) for name in names}
    run_dir.mkdir(parents=True, exist_ok=True)
    return runs.write_summary(
        run_dir, run or run_dir.name, summary, [SimpleNamespace(sums=lambda: sums)]
    )


def seal(path, **more):
    """Gives a checkpoint the checksums of its files as they are now, and `more`."""
    names = (STATE, "meta.json")
    sums = {name: files.checksum(path / name) for name in names}
    (path / "checksums.json").write_text(json.dumps({**sums, **more}))


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


def newest(run):
    return sorted(run.glob("checkpoints/step-*"))[-1]


def kept(task, run):
    """The task with the values of a run's newest checkpoint."""
    task.plan.initialise(task.model, task.config.seed)  # which also sets the multipliers
    state.load_model(task.model, checkpoint.load(newest(run)))
    return task


def tensors(path):
    checkpoint.check(path)
    saved = checkpoint.load(path)
    return {name: saved.read(name) for name in saved.parts}
