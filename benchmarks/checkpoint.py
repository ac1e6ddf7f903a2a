"""Seconds to save and to read back a checkpoint of the decoder with Adam's state.

    python -m benchmarks.checkpoint [--widths 256 512] [--repeats 5] [--folder DIR]

The time of a save is that of training.checkpoint.save: the tensors' file, its checksum, and the
wait until all is on the disk of `--folder`. Prints JSON.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import harness


def measure(width: int, repeats: int, folder: Path) -> dict[str, Any]:
    """Seconds and size at one width: L = 8, context 512, V = 32,101."""
    import torch

    from nanolm_c4.model import Decoder
    from training import checkpoint

    heads = max(1, width // 128)
    model = Decoder(
        vocab_size=32_101, context=512, layers=8, heads=heads, head_dim=width // heads,
        mlp_ratio=4, attention_scale=1.0,
    )  # fmt: skip
    tensors = {
        f"{part}/{name}": torch.zeros_like(parameter)
        for name, parameter in model.named_parameters()
        for part in ("model", "optimizer/exp_avg", "optimizer/exp_avg_sq")
    }
    saves, loads = [], []
    for step in range(1, repeats + 1):
        started = time.perf_counter()
        path = checkpoint.save(folder, step, tensors, {}, keep=1)
        saved = time.perf_counter()
        checkpoint.load(path)
        saves.append(saved - started)
        loads.append(time.perf_counter() - saved)
    size = (path / "state.safetensors").stat().st_size
    seconds = {"save": saves, "load": loads}
    return {
        "width": width,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "gigabytes": size / 1e9,
        "n": repeats,
        **{f"{what}_seconds_median": statistics.median(times) for what, times in seconds.items()},
        **{f"{what}_seconds_all": times for what, times in seconds.items()},
    }


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = harness.parser(__doc__)
    parser.add_argument("--widths", type=int, nargs="+", default=[256, 512], metavar="D")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where to write (default: a temporary folder)")
    return parser.parse_args(argv)


def main() -> None:
    """The command."""
    args = parse()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        rows = [measure(width, args.repeats, Path(folder) / str(width)) for width in args.widths]
    harness.show(args, "cpu", rows)


if __name__ == "__main__":
    main()
