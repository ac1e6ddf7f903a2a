"""A sharded run is the same run as one process, with samples of all lengths."""

from pathlib import Path

import pytest

from tests.experiment_cases import CASES, write_texts
from tests.processes import finished
from tests.test_experiments import flat, lines

ROOT = Path(__file__).resolve().parents[2]
FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_ACTIVATION_CHECKPOINTING": "true"}


def test_sharded_with_recomputed_blocks_it_is_the_same_run(tmp_path):
    """FSDP2 over two processes, as R2C2 is launched; clip and the roles' numbers included."""
    write_texts(tmp_path)
    words = [
        *(word.format(files=tmp_path) for word in CASES["bart_span_denoise"].small),
        f"data.cache_dir={tmp_path}",
        "training.eval_every=3",
        "training.micro_batch_size=4",
        "prescription.strategy=neural_tangent",
        "optimizer.lr=0.2",
        "training.eval_samples=7",
        "model.dropout=0.0",
        "model.attention_dropout=0.0",  # every process drops out for itself
    ]
    for ranks, env in ((1, {}), (2, FSDP)):
        result = finished(
            "-m",
            "bart_span_denoise.train",
            "bart_span_denoise/configs/laptop.yaml",
            *words,
            "--run-dir",
            tmp_path / str(ranks),
            ranks=ranks,
            cwd=ROOT,
            **env,
        )
        assert result.returncode == 0, result.err
    one, two = (list(map(flat, lines(tmp_path / name))) for name in ("1", "2"))
    assert len(one) == len(two)
    for first, second in zip(one, two, strict=True):
        assert second == pytest.approx(first, rel=1e-4)
