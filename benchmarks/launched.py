"""Every experiment by its script, in two processes on a CPU, killed and resumed.

    python -m benchmarks.launched [--runs nanolm_c4 r2c2 ...] [--json FILE]

`GPUS=2 bash scripts/EXPERIMENT.sh` at the paper's config but for size, length and text or images
that need no download: `accelerate launch` with the shipped launch configs, DDP, and FSDP2 for R2C2.
Each is trained once undisturbed, and once with SIGKILL for all of its processes in the midst, after
two checkpoints, and the same command again. Logs and weights are compared bit for bit. Prints
JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks import harness
from training import checkpoint

COMMON = (
    "training.compile=false",
    "training.precision=fp32",
    "training.steps=120",
    "training.batch_size=8",
    "training.log_every=1",
    "training.eval_every=40",
    "training.eval_batch_size=4",
    "training.eval_samples=16",
    "training.data_workers=0",
    "schedule.warmup_steps=0",
    "checkpoint.every=10",
    "checkpoint.minutes=null",
    "checkpoint.final=true",
    "data.source=embedded",
    "data.path=null",
)
SMALL = ("model.width=32", "model.head_dim=16", "model.layers=2", "training.micro_batch_size=2")
BART = (
    *SMALL,
    "optimizer.lr=0.5",
    "model.vocab_size=null",
    "data.tokens_per_sample=64",
    "data.bpe_encoder=null",
    "data.bpe_vocab=null",
    "data.trained_vocab_size=512",
)
# Script, its own word, what makes the paper's config small.
RUNS: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "nanolm_c4": (
        "nanolm_c4",
        (),
        (
            *SMALL,
            "model.context=32",
            "model.vocab_size=null",
            "prescription.base_width=32",
            "data.tokenizer=null",
            "data.tokenizer_vocab_size=512",
            "data.max_train_tokens=null",
            "data.max_validation_tokens=null",
        ),
    ),
    "bart_large": ("bart_span_denoise", (), BART),
    "r2c2": ("bart_span_denoise", ("r2c2",), BART),
    "vit_imagenet": (
        "vit_imagenet",
        (),
        (
            *SMALL,
            "optimizer.lr=0.5",
            "model.patch_size=4",
            "model.image_size=16",
            "model.classes=10",
            "data.eval_resize=16",
            "data.augmentation.mix_group=2",
        ),
    ),
    "vit_cifar5m": (
        "vit_cifar5m",
        (),
        (
            "model.head_dim=8",
            "model.heads=4",
            "model.layers=2",
            "model.patch_size=8",
            "optimizer.lr=0.5",
            "data.validation_images=16",
        ),
    ),
}
CHECKPOINTS = 2  # there are, before a run is killed


def start(name: str, root: Path, folder: str) -> subprocess.Popen[bytes]:
    """The script's processes, training into a folder."""
    script, words, changes = RUNS[name]
    told = [*COMMON, *changes, f"data.cache_dir={root / 'cache'}", "--run-dir", str(root / folder)]
    own = {"GPUS": "2", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    with open(root / f"{folder}.log", "ab") as log:
        return subprocess.Popen(
            ["bash", str(harness.ROOT / f"scripts/{script}.sh"), *words, *told],
            env={**os.environ, **own},
            stdout=log,
            stderr=log,
        )


def finish(process: subprocess.Popen[bytes], log: Path) -> None:
    """Waits for a run; SystemExit, with what it said last, if it fails. Leaves no process."""
    try:
        if code := process.wait(600):
            raise SystemExit(f"{log}: exit code {code}\n{log.read_text()[-2000:]}")
    finally:
        if process.poll() is None:
            kill(process)


def below(pid: int) -> Iterator[int]:
    """A process and all that it has started, of whatever session."""
    yield pid
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            for child in task.read_text().split():
                yield from below(int(child))


def kill(process: subprocess.Popen[bytes]) -> int:
    """SIGKILL for a process and all below it; how many there were."""
    pids = list(below(process.pid))
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):  # it ended meanwhile
            os.kill(pid, signal.SIGKILL)
    process.wait()
    return len(pids)


def differences(one: Path, other: Path) -> list[str]:
    """Lines and tensors that differ between two runs; files of parts differ in their headers."""
    logs = ((folder / "metrics.jsonl").read_text().splitlines() for folder in (one, other))
    lines = [f"{a} != {b}" for a, b in itertools.zip_longest(*logs) if a != b]
    tensors, others = (
        {name: saved.read(name) for name in saved.parts}
        for folder in (one, other)
        for saved in [checkpoint.load(folder / "checkpoints/step-00000120")]
    )
    return lines + [
        name
        for name in sorted({*tensors, *others})
        if name not in tensors or name not in others or not torch.equal(tensors[name], others[name])
    ]


def killed(name: str, root: Path) -> dict[str, Any]:
    """One experiment's row."""
    begun = time.perf_counter()
    finish(start(name, root, "whole"), root / "whole.log")
    process, saved = start(name, root, "parts"), root / "parts/checkpoints"
    while len(list(saved.glob("step-*"))) < CHECKPOINTS:
        if process.poll() is not None:
            raise SystemExit(f"{name}: it was over before it could be killed")
        time.sleep(0.01)
    count = kill(process)
    newest = max(int(path.name[5:]) for path in saved.glob("step-*"))
    finish(start(name, root, "parts"), root / "parts.log")
    summary = json.loads((root / "parts/summary.json").read_text())
    return {
        "run": name,
        "status": summary["status"],
        "processes_killed": count,
        "newest_checkpoint": newest,
        "resumed_from": summary["resumed_from"],
        "differences": differences(root / "whole", root / "parts"),
        "seconds": time.perf_counter() - begun,
    }


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = harness.parser(__doc__)
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=[*RUNS])
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Prints JSON; exit code 1 if a run differs or did not resume."""
    args, rows = parse(argv), []
    for name in args.runs:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(killed(name, Path(folder)))
    harness.show(args, "cpu", rows)
    raise SystemExit(any(row["differences"] or not row["resumed_from"] for row in rows))


if __name__ == "__main__":
    main()
