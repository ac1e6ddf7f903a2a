"""What a run needs of the place where it is trained: a share of a GPU, one, or several."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sweeps.pool import Needs, gpu_memory
from training.config import validate
from training.errors import UserError
from training.experiment import Experiment


@dataclass(frozen=True)
class Gpu:
    """Dense peaks in FLOP/s by precision of the products, memory in bytes and rated power (TDP) in
    watts."""

    name: str
    bf16: float
    fp32: float
    memory: float
    watts: float
    source: str

    @property
    def fp16(self) -> float:
        """The same datasheets give tensor cores one number for both half precisions."""
        return self.bf16


GPUS = (
    Gpu("H100", 989e12, 67e12, 80e9, 700, "NVIDIA H100 datasheet, SXM, without sparsity"),
    Gpu("H200", 989e12, 67e12, 141e9, 700, "NVIDIA H200 datasheet, SXM, without sparsity"),
    Gpu("A100", 312e12, 19.5e12, 80e9, 400, "NVIDIA A100 80GB datasheet, SXM, without sparsity"),
)
SHARES = (0.125, 0.25, 0.5, 1.0)  # of one GPU
MARGIN, CONTEXT = 1.1, 1e9  # the closed forms are estimates; bytes of a process's CUDA context
NODE = 8  # GPUs of a machine


def memory_of(name: str | None) -> float | None:
    """Bytes of a GPU by its name; by default of those in this machine, None without any."""
    if name is None:
        return gpu_memory()
    return next(gpu.memory for gpu in GPUS if gpu.name == name)


def needs_of(
    experiment: Experiment, config: Any, said: Mapping[str, Any], gpu: float | None
) -> Needs:
    """What a run needs on GPUs of `gpu` bytes; what the sweep file has `said` counts most.

    A run that one GPU does not hold is sharded over as many as do. Raises UserError if no number
    does.
    """
    found = {} if gpu is None or "gpus" in said else _fitting(experiment.memory, config, gpu)
    return validate(Needs, {**found, **said}, "needs")


def _fitting(memory: Any, config: Any, gpu: float) -> dict[str, Any]:
    def bytes_of(shards: int) -> float:
        return MARGIN * memory(config, shards=shards)["total"] + CONTEXT

    whole = bytes_of(1)
    for share in SHARES:
        if whole <= share * gpu:
            return {"gpus": share}
    count, batch = 2, config.training.batch_size
    while batch % count == 0:
        if bytes_of(count) <= gpu:
            return {"gpus": count, "processes": count, "nodes": max(1, count // NODE)}
        count *= 2
    raise UserError(
        f"needs {whole / 1e9:.3g} GB, and no number of GPUs of {gpu / 1e9:.3g} GB among which its "
        "batch can be divided holds it; say `needs` in the sweep file"
    )
