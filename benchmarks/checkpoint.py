"""Seconds to save and to read back a checkpoint of the decoder with Adam's state.

    python -m benchmarks.checkpoint [--widths 256 512] [--repeats 5] [--folder DIR]
        [--processes 2 [--json benchmarks/results/cpu_checkpoint_sharded.json]]

The time of a save is that of training.checkpoint.save: the tensors' file, its checksum, and the
wait until all is on the disk of `--folder`. With several `--processes` the tensors are sharded over
them, and two ways take turns: all of them gathered and saved by the first process, and saved by
every process as sharded runs do (`save_shards`), for which the seconds until training goes on and
those until all is on the disk are told apart. Prints JSON.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import harness


def shapes(width: int) -> dict[str, Any]:
    """The decoder's tensors by name, without memory."""
    import torch

    with torch.device("meta"):
        model = harness.paper_decoder(width, 128)
    return {name: parameter.shape for name, parameter in model.named_parameters()}


PARTS = ("model", "optimizer/exp_avg", "optimizer/exp_avg_sq")


def measure(width: int, repeats: int, folder: Path) -> dict[str, Any]:
    """Seconds and size at one width."""
    import torch

    from training import checkpoint

    found = shapes(width)
    tensors = {f"{part}/{name}": torch.zeros(found[name]) for name in found for part in PARTS}
    saves, loads = [], []
    for step in range(1, repeats + 1):
        started = time.perf_counter()
        path = checkpoint.save(folder, step, tensors, {}, keep=1)
        saved = time.perf_counter()
        checkpoint.load(path)
        saves.append(saved - started)
        loads.append(time.perf_counter() - saved)
    return {
        "width": width,
        "parameters": sum(shape.numel() for shape in found.values()),
        "gigabytes": (path / "state.safetensors").stat().st_size / 1e9,
        "save_seconds": harness.spread(saves),
        "load_seconds": harness.spread(loads),
    }


def measure_sharded(rank: int, args: argparse.Namespace, folder: Path, rows: Any) -> None:
    """The same in one of several processes; the first one adds a row for every width."""
    import torch
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    from training import checkpoint

    distributed.init_process_group(
        "gloo", f"file://{folder}/processes", rank=rank, world_size=args.processes
    )
    torch.set_num_threads(1)
    mesh, group = init_device_mesh("cpu", (args.processes,)), distributed.new_group(backend="gloo")
    for width in args.widths:
        found = shapes(width)
        torch.manual_seed(width)
        tensors = {
            f"{part}/{name}": distribute_tensor(torch.rand(found[name]), mesh, [Shard(0)])
            for name in found
            for part in PARTS
        }
        seconds: dict[str, list[float]] = {"gathered": [], "blocked": [], "sharded": []}
        for step in range(1, args.repeats + 1):
            distributed.barrier()
            started = time.perf_counter()
            whole = {name: tensor.full_tensor() for name, tensor in tensors.items()}
            if rank == 0:
                checkpoint.save(folder / f"gathered{width}", step, whole, {}, keep=1)
            distributed.barrier()
            seconds["gathered"].append(time.perf_counter() - started)
            del whole
            sharded = folder / f"sharded{width}"
            distributed.barrier()
            started = time.perf_counter()
            writing = checkpoint.save_shards(sharded, step, tensors, {}, 1, group)
            distributed.barrier()
            seconds["blocked"].append(time.perf_counter() - started)
            checkpoint.finish(sharded, step, writing)
            seconds["sharded"].append(time.perf_counter() - started)
        if rank == 0:
            parameters = sum(shape.numel() for shape in found.values())
            rows.append(
                {
                    "width": width,
                    "parameters": parameters,
                    "gigabytes": 12e-9 * parameters,
                    "processes": args.processes,
                    **{f"{what}_seconds": harness.spread(times) for what, times in seconds.items()},
                }
            )
    distributed.destroy_process_group()


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = harness.parser(__doc__)
    parser.add_argument("--widths", type=int, nargs="+", default=[256, 512], metavar="D")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--processes", type=int, default=1, help="more than 1: sharded over them")
    parser.add_argument("--folder", type=Path, help="where to write (default: a temporary folder)")
    return parser.parse_args(argv)


def main() -> None:
    """The command."""
    args = parse()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        if args.processes > 1:
            import torch.multiprocessing as multiprocessing

            with multiprocessing.Manager() as manager:
                shared = manager.list()
                multiprocessing.spawn(
                    measure_sharded, (args, Path(folder), shared), nprocs=args.processes
                )
                rows = list(shared)
        else:
            widths = args.widths
            rows = [measure(width, args.repeats, Path(folder) / str(width)) for width in widths]
    harness.show(args, "cpu", rows)


if __name__ == "__main__":
    main()
