"""A run's state as named tensors and JSON types: model, optimiser and random generators."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from param_groups.tensors import put
from training import sharding
from training.adafactor import keeps_first_axis
from training.errors import Damaged


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name; a tied tensor under its first name only."""
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            tensors[name] = tensor
    return tensors


def check_model(model: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Raises Damaged unless names and shapes are the model's."""
    own = model_tensors(model)
    odd = sorted(own.keys() ^ saved.keys())
    if odd:
        raise Damaged(f"model/{odd[0]}: only in one of checkpoint and model")
    for name, tensor in own.items():
        found = saved[name]
        if (tensor.shape, tensor.dtype) != (found.shape, found.dtype):
            shape = tuple(found.shape)
            raise Damaged(f"model/{name}: shape {shape} of {found.dtype} in the checkpoint")


@torch.no_grad()
def load_model(model: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Fills a model in place with tensors that `check_model` has passed."""
    for name, tensor in model_tensors(model).items():
        put(tensor, saved[name])


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimiser's state as "<tensor>/<key>"; groups come from the plan and are not state."""
    return {
        f"{name}/{key}": value
        for name, param in _named(optimizer).items()
        for key, value in optimizer.state.get(param, {}).items()
    }


def check_optimizer(optimizer: torch.optim.Optimizer, saved: Mapping[str, Tensor]) -> None:
    """Raises Damaged for state of a tensor that this optimiser has not, or of another shape.

    State is a number, or has the tensor's shape, or lacks one of its axes (Adafactor).
    """
    params = _named(optimizer)
    for path, value in saved.items():
        name = path.rpartition("/")[0]
        if name not in params:
            raise Damaged(f"optimizer/{path}: not of a tensor of this optimiser")
        shape = params[name].shape
        partial = [shape[:axis] + shape[axis + 1 :] for axis in range(len(shape))]
        if value.shape not in ((), shape, *partial):
            raise Damaged(f"optimizer/{path}: shape {tuple(value.shape)} in the checkpoint")


def optimizer_places(
    optimizer: torch.optim.Optimizer, saved: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Tensors of the kinds of `saved` without values, sharded as their parameters; not numbers."""
    params, places = _named(optimizer), {}
    for path, value in saved.items():
        name, _, key = path.rpartition("/")
        if value.ndim == 0:
            places[path] = torch.empty((), dtype=value.dtype)
        else:
            first = keeps_first_axis(key, params[name].shape)
            places[path] = sharding.empty(params[name], value.shape, value.dtype, first)
    return places


def load_optimizer(optimizer: torch.optim.Optimizer, saved: Mapping[str, Tensor]) -> None:
    """Gives an optimiser its state back, on its parameters' devices; its groups stay as planned.

    The state of a sharded parameter is sharded alike.
    """
    order = list(_named(optimizer))
    indexed: dict[int, dict[str, Tensor]] = {}
    for path, tensor in saved.items():
        name, _, key = path.rpartition("/")
        # Copies: the tensors read from a file are views of it, and the file will be removed.
        own = tensor if sharding.is_sharded(tensor) else tensor.clone()
        indexed.setdefault(order.index(name), {})[key] = own
    # torch's own loading knows which state lives where (a step count on the CPU, say).
    optimizer.load_state_dict({**optimizer.state_dict(), "state": indexed})


def _named(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimiser's parameters by name, in the order torch numbers them."""
    return {
        name: param
        for group in optimizer.param_groups
        for name, param in zip(group["param_names"], group["params"], strict=True)
    }


def random_state(device: torch.device) -> dict[str, Any]:
    """The states of Python's, NumPy's and torch's generators in this process, as JSON types."""
    version, numbers, gauss = random.getstate()
    numpy_state = np.random.get_state(legacy=False)
    numpy_state["state"]["key"] = numpy_state["state"]["key"].tolist()
    state = {
        "python": [version, list(numbers), gauss],
        "numpy": numpy_state,
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device).numpy().tobytes().hex()
    return state


def check_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Raises what its parts' libraries do unless `set_random_state` can set it."""
    ours = random_state(device)
    try:
        set_random_state(state, device)
    finally:
        set_random_state(ours, device)


def set_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Sets what `random_state` returned; a generator that is not in it keeps its state."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    np.random.set_state(state["numpy"])
    torch.set_rng_state(_bytes(state["torch"]))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(_bytes(state["cuda"]), device)


def _bytes(text: str) -> Tensor:
    return torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8)
