"""The processes of one run: how many there are, and what only one of them may do."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list

from training.errors import UserError

# accelerate joins the processes of a CPU-only launch only when told that there is no GPU.
ON_CPU = not torch.cuda.is_available()


# The others wait while the main process writes a checkpoint or tokenises a corpus.
TIMEOUT = timedelta(hours=6)


def state() -> PartialState:
    """accelerate's view of the processes; UserError when it does not see those torchrun started."""
    process = PartialState(cpu=ON_CPU, timeout=TIMEOUT)
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if launched != process.num_processes:
        raise UserError(
            f"{launched} processes were launched, but accelerate sees {process.num_processes}; "
            "each would train a separate run. Launch with torchrun or accelerate launch"
        )
    return process


def on_main(function: Callable[[], Any]) -> Any:
    """The function's value in every process; only the main one calls it.

    If it raises a UserError there, the other processes end silently.
    """
    process = state()
    answer: tuple[Any, UserError | None] = (None, None)
    if process.is_main_process:
        try:
            answer = (function(), None)
        except UserError as error:
            answer = (None, error)
    value, error = broadcast_object_list([answer])[0]
    if error is not None:
        if process.is_main_process:
            raise error
        raise SystemExit(2)
    return value


def leave() -> None:
    """Ends the group of processes once all are here: one whose peers are gone may abort at exit."""
    process = state()
    process.wait_for_everyone()
    process.destroy_process_group()
