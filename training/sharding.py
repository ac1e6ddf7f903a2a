"""Training with parameters, gradients and optimiser state sharded over processes (FSDP2).

Every tensor is cut along its first axis into one part per process, and is whole only while its
unit (a block, or the rest of the model) computes. Torch calls such a tensor a DTensor; its name,
and so its row in the plan, stay what they were. `accelerate launch` asks for it with a config
file whose distributed_type is FSDP; everything else about the run is as with DDP.

The model is sharded here and not by accelerate, which would point the optimiser to new parameters
and keep the whole model in each process until then.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import MethodType
from typing import TYPE_CHECKING, TypeGuard

import torch
from accelerate.utils import convert_outputs_to_fp32
from torch import Tensor, distributed, nn
from torch.utils.checkpoint import checkpoint

from training import processes
from training.errors import UserError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

# torch's modules for sharding are imported where they are needed: that takes a second, for which
# a run that is not sharded need not wait.


@dataclass(frozen=True)
class Sharding:
    """How a model is sharded; see the files in scripts/accelerate."""

    reshard_after_forward: bool = True
    recompute: bool = True
    """Each block's forward pass twice; none of its activations are kept."""


def requested() -> Sharding | None:
    """What the launcher's config says about FSDP; None for a run that is not sharded.

    Raises UserError for what is not supported, and where the processes cannot be divided so.
    """
    env, world = os.environ, processes.state().num_processes
    if env.get("ACCELERATE_USE_FSDP", "false").lower() != "true":
        return None
    if world == 1:
        raise UserError("a single process has nothing to shard: launch several, or without FSDP")
    true, false, settings = ("true",), ("false",), {}
    for key, known in (
        ("fsdp_version", ("2",)),
        ("fsdp_offload_params", false),
        ("fsdp_activation_checkpointing_offload", false),
        ("fsdp_reshard_after_forward", true + false),
        ("fsdp_activation_checkpointing", false + true),
    ):
        settings[key] = env.get(key.upper(), known[0]).lower()
        if settings[key] not in known:
            raise UserError(
                f"the launch config's {key}: {settings[key]} is not supported; expected "
                f"{' or '.join(known)}, as in scripts/accelerate/one_node_8gpu_fsdp.yaml"
            )
    name = re.compile(r"PARALLELISM_CONFIG_\w+_SIZE")
    if any(name.fullmatch(key) and value not in ("", "1") for key, value in env.items()):
        raise UserError(
            "the launch config's parallelism_config is not supported: all processes share every "
            "tensor, as in scripts/accelerate/several_nodes_fsdp.yaml"
        )
    return Sharding(
        settings["fsdp_reshard_after_forward"] == "true",
        settings["fsdp_activation_checkpointing"] == "true",
    )


def building() -> AbstractContextManager[object]:
    """Where a model is built: on meta if it will be sharded, as it takes no memory before it is."""
    return contextlib.nullcontext() if requested() is None else torch.device("meta")


def place(model: nn.Module, device: torch.device, precision: str) -> bool:
    """Puts a model on the device to be trained in a precision, sharded if the launcher asks for it;
    whether it is."""
    sharding = requested()
    if sharding is not None:
        shard(model, device, sharding)
    autocast(model, device.type, precision, sharding is not None)
    allocate(model, device)
    return sharding is not None


def autocast(model: nn.Module, device: str, precision: str, sharded: bool) -> None:
    """Has a forward pass compute in bf16 or fp16 where torch.autocast does; outputs are float32.

    When sharded, autocast's cache is off: it would keep a whole low-precision copy of each weight.
    """
    if precision != "fp32":
        low = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
        context = torch.autocast(device, low, cache_enabled=not sharded)
        forward = convert_outputs_to_fp32(context(type(model).forward))
        model.forward = MethodType(forward, model)  # bound: a copy of the model runs its own


def shard(model: nn.Module, device: torch.device, sharding: Sharding) -> None:
    """Cuts a model in place, on the device or on meta: each unit first, then what is left.

    Weights and gradients are exchanged in the weights' float32 whatever autocast computes in, so
    that a run in bfloat16 adds up its gradients in float32 and ends as it would unsharded. Never
    more than one unit of a model on the CPU is whole on the device.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    for name, parameter in model.named_parameters():
        if parameter.ndim == 0:
            raise UserError(
                f"{name!r} is a scalar, which cannot be sharded; give it shape (1,), or launch "
                "without FSDP"
            )
    found = list(dict.fromkeys(units(model)))  # blocks may be used again
    if sharding.recompute and not found:
        raise UserError(
            "fsdp_activation_checkpointing: the model has no ModuleList or Sequential of blocks to "
            "compute again; set it to false in the launch config"
        )
    mesh = init_device_mesh(device.type, (distributed.get_world_size(),))
    for unit in found:
        if sharding.recompute:
            unit.forward = functools.partial(checkpoint, unit.forward, use_reentrant=False)
        fully_shard(unit, mesh=mesh, reshard_after_forward=sharding.reshard_after_forward)
    fully_shard(model, mesh=mesh)


def units(model: nn.Module) -> Iterator[nn.Module]:
    """The outermost members of the model's ModuleLists and Sequentials that hold parameters."""
    listed = isinstance(model, (nn.ModuleList, nn.Sequential))
    for child in model.children():
        if not listed or isinstance(child, (nn.ModuleList, nn.Sequential, nn.ModuleDict)):
            yield from units(child)
        elif any(True for _ in child.parameters()):
            yield child


def allocate(model: nn.Module, device: torch.device) -> None:
    """Puts a model on the device; parameters on meta get memory there, and no values yet.

    Tied ones stay tied, and buffers keep their values. Raises ValueError for a buffer on meta: its
    values are lost, and no plan knows them.
    """
    values = {}
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            raise ValueError(f"buffer {name!r} is on the meta device and has no values")
        values[name] = buffer.clone()
    if any(parameter.is_meta for parameter in model.parameters()):
        places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                places.setdefault(parameter, []).append((module, name))
        model.to_empty(device=device)
        for (first, name), *others in places.values():  # torch gives each place one of its own
            for module, other in others:
                setattr(module, other, getattr(first, name))
        for name, buffer in model.named_buffers():
            buffer.copy_(values[name])
        return
    if not any(map(is_sharded, model.parameters())):  # else it is there
        model.to(device)


def reshard(model: nn.Module) -> None:
    """Cuts again what a forward pass without a backward pass has left whole."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether a process holds only a part of this tensor."""
    return hasattr(tensor, "device_mesh")


def local(tensor: Tensor) -> Tensor:
    """This process's part, a view that may have no rows; an unsharded tensor as it is."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def rows(tensor: Tensor) -> tuple[int, int | None]:
    """The first row that this process holds of a tensor, and how many; (0, None) for all."""
    if not is_sharded(tensor) or not tensor.placements[0].is_shard():
        return 0, None
    mesh = tensor.device_mesh
    share = -(-len(tensor) // mesh.size())  # as torch's `chunk` cuts
    first = min(share * mesh.get_local_rank(), len(tensor))
    return first, min(share, len(tensor) - first)


def share(tensor: Tensor) -> tuple[Tensor | None, int]:
    """(the rows that this process saves, or None; the first of them). Each row is saved once."""
    first, held = rows(tensor)
    saves = bool(held) if held is not None else processes.state().is_main_process
    return (local(tensor) if saves else None), first


def wrap(part: Tensor, like: DTensor, shape: Sequence[int], first_axis: bool) -> Tensor:
    """Joins the processes' local parts into one tensor of `shape`, sharded as `like`.

    Without `first_axis` the tensor lacks the axis that is cut, and every process has all of it.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard

    return DTensor.from_local(
        part,
        like.device_mesh,
        [Shard(0) if first_axis else Replicate()],
        run_check=False,
        shape=torch.Size(shape),
        stride=torch.empty(tuple(shape), device="meta").stride(),
    )


def total(values: Tensor, owner: Tensor) -> Tensor:
    """The sum over the processes that share `owner`, in place; as it is if nobody does."""
    if is_sharded(owner):
        distributed.all_reduce(values, group=owner.device_mesh.get_group())
    return values
