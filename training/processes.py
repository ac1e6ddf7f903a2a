"""The processes of one run: how many there are, and what only one of them may do."""

from __future__ import annotations

import os
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list

from training.errors import UserError

# accelerate joins the processes of a CPU-only launch only when told that there is no GPU.
ON_CPU = not torch.cuda.is_available()


def state() -> PartialState:
    """accelerate's view of the processes; UserError when it does not see those torchrun started."""
    process = PartialState(cpu=ON_CPU)
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if launched != process.num_processes:
        raise UserError(
            f"{launched} processes were launched, but accelerate sees {process.num_processes}; "
            "each would train a run of its own. Launch with torchrun or accelerate launch"
        )
    return process


def from_main(value: Any) -> Any:
    """The main process's value, in every process."""
    return broadcast_object_list([value])[0]
