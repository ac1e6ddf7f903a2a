"""A run's state as named tensors and JSON types: model, optimiser and random generators."""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from training import sharding
from training.checkpoints.checkpoint import Checkpoint
from training.optim.adafactor import keeps_first_axis


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name; a tied tensor under its first name only."""
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            tensors[name] = tensor
    return tensors


@torch.no_grad()
def load_model(model: nn.Module, saved: Checkpoint) -> None:
    """Fills a model in place, or this process's parts of it."""
    for name, tensor in model_tensors(model).items():
        part = saved.read(f"model/{name}", *sharding.rows(tensor))
        sharding.local(tensor).copy_(part)


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimiser's state as "<tensor>/<key>"; groups come from the plan and are not state."""
    return {
        f"{name}/{key}": value
        for name, param in _named(optimizer).items()
        for key, value in optimizer.state.get(param, {}).items()
    }


def load_optimizer(optimizer: torch.optim.Optimizer, saved: Checkpoint) -> None:
    """Gives an optimiser its state back, on its parameters' devices; its groups stay as planned.

    The state of a sharded parameter is sharded alike.
    """
    params = _named(optimizer)
    order, indexed = list(params), dict[int, dict[str, Tensor]]()
    for path in saved.named("optimizer"):
        name, _, key = path.rpartition("/")
        param, shape = params[name], saved.shape(f"optimizer/{path}")
        if shape and sharding.is_sharded(param):
            first_axis = keeps_first_axis(key, param.shape)
            rows = sharding.rows(param) if first_axis else (0, None)
            part = saved.read(f"optimizer/{path}", *rows).to(param.device)
            value = sharding.wrap(part, param, shape, first_axis)
        else:
            value = saved.read(f"optimizer/{path}")
        indexed.setdefault(order.index(name), {})[key] = value
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
