"""One training step of a model that is never allocated: its parameters, FLOPs and memory per GPU.

The repository's own model, plan, sharding and optimiser run on torch's fake tensors, which have
shapes and no values, in a fake process group of the planned size. What is counted is an eager step
on a GPU; torch.compile keeps less. Not counted are the workspaces of kernels and the zeros that
linear_cross_entropy adds to the readout's weight. The fake tensors have the device type CPU, as
autograd would ask for a real GPU otherwise; functions that behave differently on a CPU are patched.
Gradients that are summed, as of tied weights, go into a third tensor where real ones may be added
in place.
"""

from __future__ import annotations

import contextlib
import gc
import math
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, distributed
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.weak import WeakIdKeyDictionary

from training import compiled, linear_cross_entropy, sharding
from training.experiment import Experiment
from training.optim import optimizers

_CPU = torch.device("cpu")
_BLOCK = 512  # bytes; torch's allocator of GPU memory rounds up to a multiple
_aten = torch.ops.aten


@dataclass(frozen=True)
class Simulated:
    """What one optimiser step takes."""

    parameters: int
    """Of the whole model; tied ones count once."""
    flops: float
    """Of all GPUs together, forward passes that are computed again included."""
    memory: int
    """Bytes on the first GPU, which has the largest part, at their peak."""


def simulate(experiment: Experiment, config: Any, shards: int = 1) -> Simulated:
    """A step of a run on one GPU, or sharded over several as scripts/accelerate does it.

    Raises RuntimeError inside a process group, UserError for an experiment without build_blank.
    """
    if distributed.is_initialized():
        raise RuntimeError("a simulated step makes a process group: there is one already")
    batch_size = config.training.batch_size
    share = math.ceil(batch_size / shards)
    rows = min(config.training.micro_batch_size or share, share)
    with contextlib.ExitStack() as stack:
        if shards > 1:
            distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=shards)
            stack.callback(distributed.destroy_process_group)
        model, loss, example = experiment.blank(config, rows)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        plan = experiment.build_plan(config, model)
        plan.apply_multipliers(model)
        if shards > 1:
            sharding.shard(model, _CPU, sharding.Sharding())
        stack.enter_context(_as_on_a_gpu())
        fake = FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=False)
        stack.enter_context(fake)  # nothing is computed, not even where there is no fake kernel
        memory = stack.enter_context(_Memory())
        sharding.allocate(model, _CPU)
        sharding.autocast(model, "cpu", config.training.precision, shards > 1)
        optimizer = optimizers.build(
            config.optimizer.name,
            plan.groups(model, several=config.optimizer.name == "muon"),
        )

        def step(micro_batches: int) -> None:
            for _ in range(micro_batches):
                batch = tree_map_only(Tensor, lambda t: torch.empty_like(t, device=_CPU), example)
                (loss(model, batch) / batch_size).backward()
            optimizer.step()
            optimizer.zero_grad()

        flops = FlopCounterMode(display=False, custom_mapping=_ATTENTION)
        with flops:
            step(1)  # which also makes the optimiser's state
        memory.most = 0  # not the first step's peak: the FLOP counter's hooks kept tensors alive
        step(min(2, math.ceil(share / rows)))  # the second adds to gradients, and so do later ones
    return Simulated(parameters, flops.get_total_flops() * batch_size / rows, memory.most)


class _Memory(TorchDispatchMode):
    """Bytes of all storages that are alive, and the most there have been."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._sizes: WeakIdKeyDictionary = WeakIdKeyDictionary()  # storage -> [bytes]

    def __enter__(self) -> _Memory:
        gc.freeze()  # what is there already is not looked through at every peak
        resize, own = torch.UntypedStorage.resize_, self

        def resized(storage: torch.UntypedStorage, size: int) -> None:
            resize(storage, size)  # which no operator shows: FSDP frees whole weights by it
            own._see(storage)

        self._resizing = mock.patch.object(torch.UntypedStorage, "resize_", resized)
        self._resizing.start()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._resizing.stop()
        gc.unfreeze()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its parts come by afterwards
        if func is _aten._local_scalar_dense.default:
            return 1  # fake tensors have no values, and memory does not depend on them
        if func is _aten._fused_sgd_.default:
            return None  # it has no fake kernel, and takes no memory
        result = func(*args, **(kwargs or {}))
        tree_map_only(Tensor, lambda tensor: self._see(tensor.untyped_storage()), result)
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        if storage not in self._sizes:
            self._sizes[storage] = [0]
            weakref.finalize(storage, self._change, self._sizes[storage], 0).atexit = False
        self._change(self._sizes[storage], -(-storage.nbytes() // _BLOCK) * _BLOCK)

    def _change(self, size: list[int], to: int) -> None:
        self.now += to - size[0]
        size[0] = to
        if self.now > self.most:  # perhaps only for cycles, which Python clears when it likes
            gc.collect()
            self.most = max(self.most, self.now)


@contextlib.contextmanager
def _as_on_a_gpu() -> Iterator[None]:
    """Has functions take the memory of a GPU, though their tensors say they are on a CPU."""
    attention = functional.scaled_dot_product_attention

    def dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        """On a CPU torch stores the dropout mask as floats, on a GPU as bytes."""
        return torch.native_dropout(x, p, training)[0] if p and training else x

    def attention_without_dropout(*args: Any, dropout_p: float = 0.0, **kwargs: Any) -> Tensor:
        """With dropout a CPU stores all attention weights; a GPU redraws the mask from a seed."""
        return attention(*args, **kwargs)

    patch = mock.patch.object
    kinds = {
        name: replace(kind, fused_on=("cpu",) if "cuda" in kind.fused_on else ())
        for name, kind in optimizers.OPTIMIZERS.items()
    }
    with (
        mock.patch.dict(optimizers.OPTIMIZERS, kinds),
        patch(optimizers, "TORCHS_KERNEL", ()),
        patch(compiled.Compiled, "__call__", lambda self, *args: None),  # in place: no memory
        patch(functional, "dropout", dropout),
        patch(functional, "scaled_dot_product_attention", attention_without_dropout),
        mock.patch.multiple(linear_cross_entropy, _CHUNK={}, _EAGER=()),
    ):
        yield


def _attention_forward(
    q: Any, k: Any, v: Any, dropout: float = 0.0, causal: bool = False, **_: Any
) -> int:
    """FLOPs of two products, of the half of all pairs that a causal mask leaves."""
    batch, heads, queries, width = q
    return 4 * batch * heads * queries * k[2] * width // (2 if causal else 1)


def _attention_backward(
    grad: Any, q: Any, k: Any, v: Any, out: Any, logs: Any, *rest: Any, **more: Any
) -> int:
    """Twice the forward pass's; what a kernel computes again is not counted."""
    return 2 * _attention_forward(q, k, v, *rest, **more)


_ATTENTION = {  # torch's counter does not know the kernels of a CPU
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention_forward,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}
