"""What a run needs of the place where it is trained: a share of a GPU, one, or several."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
    Gpu(
        "B200", 2250e12, 75e12, 180e9, 1000, "NVIDIA HGX B200 datasheet, per GPU, without sparsity"
    ),
    Gpu("A100", 312e12, 19.5e12, 80e9, 400, "NVIDIA A100 80GB datasheet, SXM, without sparsity"),
)
SHARES = (0.125, 0.25, 0.5, 1.0)  # of one GPU
# Beside what is counted: the allocator's gaps and kernels' scratch; a process's CUDA context.
MARGIN, CONTEXT = 1.1, 1e9
NODE = 8  # GPUs of a machine


def memory_of(name: str | None) -> float | None:
    """Bytes of a GPU by its name; by default of those in this machine, None without any."""
    if name is None:
        return gpu_memory()
    return next(gpu.memory for gpu in GPUS if gpu.name == name)


def needs_of(
    experiment: Experiment,
    config: Any,
    said: Mapping[str, Any],
    gpu: float | None,
    launched: int = 0,
) -> Needs:
    """What a run needs on GPUs of `gpu` bytes; what the sweep file has `said` counts most.

    A run that one GPU does not hold is sharded over as many as do; any other has a GPU and a
    core for each of the processes that a launch command has `launched` of every run; cores for
    processes that read its data are for the file to say. Raises UserError if no number does, and
    for a run that looks at whole tensors, which cannot be sharded.
    """
    found: dict[str, Any] = {}
    if gpu is not None and "gpus" not in said:
        peak = peak_of(experiment, config)
        gpus = gpus_of(peak, config.training.batch_size, gpu)
        needed = f"needs {peak(1) / 1e9:.3g} GB"
        if gpus is None:
            raise UserError(
                f"{needed}, and no number of GPUs of {gpu / 1e9:.3g} GB among which its batch can "
                "be divided holds it; say `needs` in the sweep file"
            )
        if gpus > 1 and (keys := of_whole_tensors(config)):
            raise UserError(
                f"{needed}, more than a GPU of {gpu / 1e9:.3g} GB holds, and {' and '.join(keys)} "
                "cannot be where tensors are sharded: set 0 there, or say `needs` in the sweep file"
            )
        found = {"gpus": gpus}
        if gpus > 1:
            found |= {"processes": gpus, "nodes": max(1, int(gpus) // NODE)}
        if said.get("processes", 1) > max(1, gpus):  # a GPU has one process of a run
            found["gpus"] = said["processes"]
    if launched and "processes" not in found:
        found |= {"gpus": launched, "cpus": launched}
    return validate(Needs, {**found, **said}, "needs")


def refuse_more_than_one_holds(experiment: Experiment, config: Any) -> None:
    """Raises UserError for a run that the smallest GPU cannot hold, where none is named."""
    peak, smallest = experiment.memory(config)["total"], min(GPUS, key=lambda gpu: gpu.memory)
    if not holds(smallest.memory, peak):
        raise UserError(
            f"needs {peak / 1e9:.3g} GB, more than one {smallest.name} holds: name the GPUs of the "
            "place by --gpu, so that it is sharded over as many as it needs, or say `needs` in the "
            "sweep file"
        )


def in_words(
    experiment: Experiment,
    config: Any,
    said: Mapping[str, Any],
    gpu: float | None,
    launched: int = 0,
) -> str:
    """The GPUs of `needs_of` or why there are none; empty where nothing is known of GPUs."""
    if gpu is None and "gpus" not in said:
        return ""
    try:
        needs = needs_of(experiment, config, said, gpu, launched)
    except UserError as error:
        return f"DOES NOT FIT: {error}"
    where = f" on {needs.nodes} nodes" if needs.nodes > 1 else ""
    return f"{counted(needs.gpus)} GPU{'s' if needs.gpus > 1 else ''}{where}"


def counted(gpus: float | None) -> str:
    """A number of GPUs as `gpus_of` has it."""
    if gpus is None:
        return "no number"
    return f"1/{1 / gpus:g}" if 0 < gpus < 1 else f"{gpus:g}"


def peak_of(experiment: Experiment, config: Any) -> Callable[[int], int]:
    """The closed form of a run's peak in bytes on each of the GPUs it is sharded over."""
    return lambda shards: experiment.memory(config, shards=shards)["total"]


def gpus_of(peak: Callable[[int], float], batch_size: int, gpu: float) -> float | None:
    """GPUs of `gpu` bytes that a run takes, below 1 a share of one; None if no number holds it.

    Above 1 the smallest power of two among which its batch and its state can be divided; `peak` is
    the number of bytes on each of so many.
    """
    whole = peak(1)
    for share in SHARES:
        if holds(share * gpu, whole):
            return share
    count = 2
    while batch_size % count == 0:
        if holds(gpu, peak(count)):
            return count
        count *= 2
    return None


def holds(gpu: float, peak: float) -> bool:
    """Whether a GPU of so many bytes holds a process that takes so many at its peak."""
    return MARGIN * peak + CONTEXT <= gpu


def of_whole_tensors(config: Any) -> list[str]:
    """The keys of a config by which its run cannot be sharded."""
    keys = "probe_every", "observe_every"
    return [f"training.{key}" for key in keys if getattr(config.training, key, 0)]
