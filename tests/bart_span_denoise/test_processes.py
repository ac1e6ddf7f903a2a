"""Several processes and accumulation: the same run as one process, with samples of all lengths."""

import json
from pathlib import Path

import pytest

from tests.processes import finished

ROOT = Path(__file__).resolve().parents[2]
OVERRIDES = [
    "model.width=16", "model.head_dim=8", "model.layers=1", "data.tokens_per_sample=24",
    "data.trained_vocab_size=300", "data.validation_fraction=0.02", "data.max_train_tokens=20000",
    "data.max_validation_tokens=2000", "training.steps=6", "training.batch_size=8",
    "training.log_every=2", "training.eval_every=3", "training.eval_samples=21",
    "schedule.warmup_steps=2",
    # Every process drops out for itself.
    "model.dropout=0.0", "model.attention_dropout=0.0",
]


FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_ACTIVATION_CHECKPOINTING": "true"}


def launch(processes, folder, cache, *overrides, env=None):
    return finished(
        "-m", "bart_span_denoise.train", "bart_span_denoise/configs/laptop.yaml", *OVERRIDES,
        f"data.cache_dir={cache}", *overrides, "--run-dir", folder,
        ranks=processes, cwd=ROOT, **(env or {}),
    )  # fmt: skip


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def flat(line):
    """A line with the groups' numbers beside the others."""
    groups = line.pop("gradient_to_epsilon", {})
    return {**line, **{f"group {name}": value for name, value in groups.items()}}


def test_sharded_with_recomputed_blocks_it_is_the_same_run(tmp_path):
    """FSDP2 over two processes, as R2C2 is launched; clip and the roles' numbers included."""
    for processes, env in ((1, None), (2, FSDP)):
        folder = tmp_path / str(processes)
        result = launch(processes, folder, tmp_path / "cache", "training.micro_batch_size=4",
                        "prescription.strategy=neural_tangent", "optimizer.lr=0.2", env=env)
        assert result.returncode == 0, result.err
    one, two = (list(map(flat, lines(tmp_path / name))) for name in ("1", "2"))
    assert len(one) == len(two)
    for first, second in zip(one, two):
        assert second == pytest.approx(first, rel=1e-4)
