"""The processes of one run: how many there are, and what only one of them may do."""

import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import (
    DistributedDataParallelKwargs,
    TorchDynamoPlugin,
    broadcast_object_list,
)

from training import environment
from training.errors import UserError
from training.settings import LoopConfig

# accelerate joins the processes of a CPU-only launch only when told that there is no GPU.
ON_CPU = not torch.cuda.is_available()
TORCHRUN = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
EMULATE_BF16 = "TRAINING_EMULATE_BF16"
Value = TypeVar("Value")

# The others wait while the main process writes a checkpoint or tokenises a corpus.
TIMEOUT = timedelta(hours=6)


def state() -> PartialState:
    """accelerate's view of the processes; UserError when it does not see those torchrun started."""
    told = " ".join(f"{name}={os.environ[name]}" for name in TORCHRUN if name in os.environ)
    try:
        launched = int(os.environ.get("WORLD_SIZE", "1"))
        if launched > 1 and int(os.environ.get("RANK", "0")) >= launched:
            raise ValueError("RANK goes from 0 to WORLD_SIZE - 1")
        process = PartialState(cpu=ON_CPU, timeout=TIMEOUT)
    except ValueError as error:
        raise UserError(
            f"{told}: no process joins others by this ({error}); launch with torchrun, or unset it"
        ) from None
    if launched != process.num_processes:
        raise UserError(
            f"{launched} processes were launched, but accelerate sees {process.num_processes}; "
            "each would train a separate run. Launch with torchrun or accelerate launch"
        )
    return process


def on_main(function: Callable[[], Value]) -> Value:
    """The function's value in every process; only the main one calls it.

    If it raises a UserError there, the other processes end silently.
    """
    process, answer = state(), None
    problem: UserError | None = None
    if process.is_main_process:
        try:
            answer = function()
        except UserError as error:
            problem = error
    value, refused = broadcast_object_list([(answer, problem is not None)])[0]
    if problem is not None:
        raise problem
    if refused:
        raise SystemExit(2)
    return value


def accelerator(settings: LoopConfig, run_dir: Path) -> Accelerator:
    """accelerate, as a run uses it: processes, DDP, compilation and trackers."""
    # accelerate keeps its state per process; runs of one worker may differ in it.
    AcceleratorState._reset_state()
    # The mesh of processes is sharding's; accelerate would make another, and refuses on CPUs.
    os.environ.pop("ACCELERATE_USE_PARALLELISM_CONFIG", None)
    return Accelerator(
        cpu=ON_CPU,
        mixed_precision="no",  # see `sharding.place`
        dynamo_plugin=TorchDynamoPlugin(
            backend="inductor" if settings.compile else "no",
            mode="reduce-overhead" if settings.cuda_graphs else "default",
        ),
        log_with=list(settings.trackers) or None,
        project_dir=run_dir / "tensorboard",
        # A process without evaluation samples would miss the exchange of buffers before the first
        # forward pass, and wait for ever. No model here trains its buffers.
        kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False)],
    )


def precision(wanted: str) -> str:
    """A config's precision, or fp32 where a processor could only imitate it."""
    process = state()
    imitated = os.environ.get(EMULATE_BF16) == "1"
    if wanted != "bf16" or imitated or environment.has_bf16_units(process.device):
        return wanted
    if process.is_main_process:
        print(
            f"training.precision: {environment.device_name(process.device)} has no bf16 units; "
            f"this run is float32 ({EMULATE_BF16}=1 imitates bf16, more slowly)",
            file=sys.stderr,
        )
    return "fp32"


def leave() -> None:
    """Ends the group of processes once all are here: one whose peers are gone may abort at exit."""
    process = state()
    process.wait_for_everyone()
    process.destroy_process_group()
