"""What autograd keeps for a backward pass."""

from contextlib import contextmanager

import torch


@contextmanager
def saved_tensors(model):
    """The storages that a forward pass of the block keeps, by address, parameters excluded."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage  # held, so that its address is not given out again
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield kept
