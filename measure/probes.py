"""Probes: what training does to every tensor and dense layer, measured on the uncompiled module.

    probes = Probes(model, plan, optimizer)
    ...                              # backward, reduction over processes, clipping
    probes.before_step()
    optimizer.step()
    probes.after_step()              # before zero_grad
    line = probes.read(lambda: model(*batch))

`line` holds only JSON types; a value that does not exist or is not finite is None:

    {"tensors": {name: {"parameter_rms", "gradient_rms", "update_rms", "below_10_eps"}},
     "layers":  {module: {"alignment", "input_rms", "output_rms"}}}

Every line has the same tensors and layers, those found at construction.

Cost of one probe. Memory: a copy of the trained parameters from before_step to after_step, when
the activations of the backward pass are gone, then one evaluation forward's activations. Time:
that forward and about a dozen passes over the parameters, 0.35 to 0.55 of a training step of
decoders on 1,024 to 8,192 tokens on two CPU cores (2026-11-21).
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from accelerate.utils import send_to_device
from torch import Tensor, nn

from measure.representations import evaluating, norm, pieces, rms
from param_groups import Plan, Role, Row
from param_groups.layers import Linear
from param_groups.roles import Layout
from training.errors import UserError
from training.log import Log, finite
from training.task import LiveRun


@dataclass(frozen=True)
class DenseLayer:
    """A matrix multiplication of the model: its first name, module and fan-in n."""

    name: str
    module: nn.Linear | nn.Conv2d
    fan_in: int


@dataclass
class _Use:
    """What a dense layer did in one pass: L2 norms and numbers of entries, the bias left out."""

    input_norm: float = 0.0
    output_norm: float = 0.0
    input_size: int = 0
    output_size: int = 0


class Probes:
    """RMS of parameters, gradients and updates, share below 10 eps, and log alignment ratios.

    Per tensor of the plan, at a step that turns theta into theta':

    - "parameter_rms": RMS(theta').
    - "gradient_rms": RMS of the gradient the optimiser is given; None where there is none.
    - "update_rms": RMS(theta' - theta), decay and rounding included; 0 for a frozen tensor.
    - "below_10_eps": share of entries with sqrt(v) / sqrt(1 - beta2^t) < 10 eps, v being Adam's
      second moment after the step and t its step count: where eps takes over 9% of the update
      or more. For adam and adam_param_scaling; None for a tensor that has not been updated, and
      where the optimiser has no eps or, as adafactor's, adds it to g^2.

    Per dense layer: the log alignment ratio (see `alignment`). Dense layers are the nn.Linear,
    param_groups.layers.Linear and non-overlapping nn.Conv2d (patch embeddings) whose `weight` is
    a row of the plan, a tied one included; lookup tables, scales and biases are not. A fused QKV
    projection is one layer.

    `model` is the unwrapped, uncompiled module of `plan`; `optimizer`, unwrapped too, has its
    groups. Sums are accumulated in float64. Nothing is communicated between processes. Sharded
    parameters (FSDP) are not supported.

    Raises PlanError when the plan is for another model (a wrapped or compiled one has other
    names), UserError when a matrix belongs to a module whose product cannot be observed, and when
    there is no dense layer.
    """

    def __init__(self, model: nn.Module, plan: Plan, optimizer: torch.optim.Optimizer) -> None:
        groups: list[dict[str, Any]] = plan.groups(model, check=False, several=True)
        trained = {name for group in groups for name in group["param_names"]}
        parameters = dict(model.named_parameters())
        self._model, self._optimizer = model, optimizer
        self._tensors = {row.name: parameters[row.name] for row in plan.rows}
        self._trained = {name: p for name, p in self._tensors.items() if name in trained}
        self.layers = dense_layers(model, plan)
        self._old: dict[str, Tensor] = {}
        self._lines: dict[str, dict[str, float | None]] = {}

    def before_step(self) -> None:
        """Keeps what the step replaces; gradients are reduced and clipped, parameters are old."""
        self._old = {name: p.detach().clone() for name, p in self._trained.items()}
        gradients = {name: p.grad for name, p in self._trained.items()}
        self._lines = {
            name: {"parameter_rms": None, "gradient_rms": _rms(gradients.get(name))}
            for name in self._tensors
        }

    @torch.no_grad()
    def after_step(self) -> None:
        """Measures the step just taken."""
        below = self._below_10_eps()
        for name, line in self._lines.items():
            now, old = self._tensors[name], self._old.pop(name, None)
            line["parameter_rms"] = _rms(now)
            line["update_rms"] = 0.0 if old is None else _rms(old.sub_(now))
            line["below_10_eps"] = below.get(id(now))

    def read(self, forward: Callable[[], object]) -> dict[str, Any]:
        """The line of the step just taken: {"tensors": ..., "layers": ...}; see `alignment`."""
        return {"tensors": self._lines, "layers": self.alignment(forward)}

    def alignment(self, forward: Callable[[], object]) -> dict[str, dict[str, float | None]]:
        """Per dense layer the log alignment ratio and its activations; possible before any step.

        A = log_n( RMS(z W) / (RMS(z) RMS(W)) ) with current weights and inputs (Everett et al.,
        Def. 3.1; their appendix's alpha, omega and u compare with initialisation instead). n is
        the layer's fan-in (of a convolution, channels times kernel), RMS is over all entries: of
        z over all tokens and samples of the pass. Independent random W and z give 1/2, equal
        alignment of every output with every input 1, products that cancel -infinity (None, as
        for fan-in 1). The bias is left out, and a multiplier m cancels: m z W over m W.

        "input_rms" is RMS(z), "output_rms" RMS(m z W) without bias. A layer used several times
        in the pass, under one or several names, is one entry under its first name; all of its
        uses count as one longer batch.

        `forward` runs the uncompiled model, in evaluation mode, without gradients and in the
        precision it chooses; modes, random states and hooks are as before afterwards, also when it
        fails. Raises UserError when a layer is not used.
        """
        uses = {layer.name: _Use() for layer in self.layers}
        with contextlib.ExitStack() as stack:
            stack.enter_context(evaluating(self._model))
            for layer in self.layers:
                hook = functools.partial(_record, uses[layer.name])
                handle = layer.module.register_forward_hook(hook, with_kwargs=True)
                stack.callback(handle.remove)
            forward()
        silent = [name for name, use in uses.items() if not use.input_size]
        if silent:
            raise UserError(
                f"dense layer {silent[0]!r} was not called in the probe's forward pass "
                f"({len(silent)} of {len(uses)} were not); it must run the uncompiled model, and "
                "no fused operation may take the layer's weight past the layer"
            )
        lines = {}
        for layer in self.layers:
            use = uses[layer.name]
            entering = finite(use.input_norm / math.sqrt(use.input_size))
            leaving = finite(use.output_norm / math.sqrt(use.output_size))
            factors = (_multiplier(layer.module), _rms(layer.module.weight), entering)
            lines[layer.name] = {
                "alignment": _log_ratio(leaving, factors, layer.fan_in),
                "input_rms": entering,
                "output_rms": leaving,
            }
        return lines

    def _below_10_eps(self) -> dict[int, float]:
        """Of tensors with Adam's second moment, by id, the share of entries below 10 eps."""
        shares = {}
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                state = self._optimizer.state.get(parameter, {})
                if "exp_avg_sq" in state:
                    correction = 1 - group["betas"][1] ** state["step"].double()
                    bound = 10 * group["eps"] * correction.sqrt()
                    # Not v < bound^2, which float32 cannot hold for the smallest eps; NaN is not.
                    below = [
                        torch.count_nonzero(block.sqrt() < bound)
                        for block in pieces(state["exp_avg_sq"])
                    ]
                    shares[id(parameter)] = torch.stack(below).sum().item() / parameter.numel()
        return shares


class ProbeRecorder:
    """Probes a run every `training.probe_every` steps, and at its first and last one; 0 for never.

    Every process probes, as all take part in the forward pass; the main one writes probes.jsonl.
    """

    def start(self, run: LiveRun) -> Sequence[Log]:
        """See `training.task.Recorder`; UserError for a sharded run and for what Probes refuses."""
        self.run, self.settings = run, run.task.config.training
        if not self.settings.probe_every:
            return ()
        if run.is_sharded:
            raise UserError(
                "training.probe_every is not supported with sharding, where no process holds a "
                "whole tensor: set it to 0, or launch without FSDP"
            )
        task = run.task
        # Rows without padding where there are any: statistics would count pads, too.
        data = task.observed_data if len(task.observed_data) else task.eval_data
        size = min(len(data), self.settings.probe_samples)
        samples = [data[index] for index in range(size)]
        self.batch = send_to_device(task.eval_batch(samples), run.device)
        self.forward = task.forward or task.measure or task.loss
        self.probes = Probes(task.model, task.plan, run.optimizer)
        self.log = Log(run.folder / "probes.jsonl")
        return (self.log,)

    @contextlib.contextmanager
    def around(self, step: int) -> Iterator[None]:
        """Probes the optimiser's step if it is time to."""
        every, steps = self.settings.probe_every, self.settings.steps
        if not every or not (step in (1, steps) or step % every == 0):
            yield
            return
        self.probes.before_step()
        yield
        self.probes.after_step()
        line = self.probes.read(lambda: self.forward(self.run.task.model, self.batch))
        if self.run.is_main:
            self.log.append({"step": step, **line})

    def after(self, step: int) -> None:
        """Nothing: the probe has been read with the gradients in place."""


def dense_layers(model: nn.Module, plan: Plan) -> list[DenseLayer]:
    """The dense layers of a plan's model, in the plan's order; each module once.

    Raises UserError when there is none, and when the matrix of a row is in no module whose
    product can be observed.
    """
    layers: dict[nn.Module, DenseLayer] = {}
    for row in plan.rows:
        found = _layers_of(model, row)
        if not found and Role(row.role).facts.layout is Layout.LINEAR:
            owner = type(model.get_submodule(row.name.rpartition(".")[0])).__name__
            raise UserError(
                f"{row.name!r} ({row.role}) is a matrix of {owner}, whose product the probes "
                "cannot see; they know nn.Linear, param_groups.layers.Linear and nn.Conv2d whose "
                "stride is its kernel, without padding; replace the module or turn probes off"
            )
        for layer in found:
            layers.setdefault(layer.module, layer)
    if not layers:
        raise UserError(
            f"none of the plan's {len(plan.rows)} tensors is the weight of a dense layer, so "
            "there is no alignment to probe; turn probes off"
        )
    return list(layers.values())


def _layers_of(model: nn.Module, row: Row) -> list[DenseLayer]:
    """The dense layers whose weight is this row, under any of its names."""
    layers = []
    for name in (row.name, *row.tied_to):
        path, _, leaf = name.rpartition(".")
        module: Any = model.get_submodule(path)
        if leaf == "weight" and _is_dense(module):
            layers.append(DenseLayer(path, module, math.prod(module.weight.shape[1:])))
    return layers


def _is_dense(module: Any) -> bool:
    """Whether calling the module is one matrix product that `_record` can measure."""
    # A subclass with a forward of its own may do more than multiply.
    if type(module).forward in (nn.Linear.forward, Linear.forward):
        return True
    return (
        type(module).forward is nn.Conv2d.forward
        and module.kernel_size == module.stride
        and module.padding in ("valid", (0, 0))
        and module.dilation == (1, 1)
        and module.groups == 1
    )


def _record(
    use: _Use, module: nn.Linear | nn.Conv2d, args: tuple, kwargs: dict, output: Tensor
) -> None:
    """A forward hook that adds the input and the product without the bias to `use`."""
    (entering,) = (*args, *kwargs.values())
    leaving, multiplier = output, 1.0
    if isinstance(module, nn.Conv2d):  # what is outside of whole patches is not in the product
        height, width = (
            n - n % step for n, step in zip(entering.shape[-2:], module.stride, strict=True)
        )
        entering = entering[..., :height, :width]
    if module.bias is not None:
        # Formed again: subtracting a large bias would leave its rounding errors.
        leaving, multiplier = _product(module, entering), _multiplier(module)
    use.input_norm = math.hypot(use.input_norm, norm(entering).item())
    use.output_norm = math.hypot(use.output_norm, norm(leaving).item() * multiplier)
    use.input_size += entering.numel()
    use.output_size += leaving.numel()


def _multiplier(module: nn.Module) -> float:
    """abs(m): 1 for torch's own layers."""
    return abs(getattr(module, "multiplier", 1.0))


def _product(module: nn.Linear | nn.Conv2d, entering: Tensor) -> Tensor:
    """W z: without bias and multiplier."""
    if isinstance(module, nn.Conv2d):
        return F.conv2d(entering, module.weight, stride=module.stride)
    return F.linear(entering, module.weight)


def _rms(tensor: Tensor | None) -> float | None:
    """The RMS of a tensor's entries; None where there is none or it is not finite."""
    return None if tensor is None else finite(rms(tensor))


def _log_ratio(product: float | None, factors: Sequence[float | None], n: int) -> float | None:
    """log_n of product / factors, from logarithms so that none of it overflows; None if undefined.

    A NaN, a zero and n = 1 leave it undefined.
    """
    logs = [math.log(value) for value in (product, *factors) if value]
    if n == 1 or len(logs) <= len(factors):
        return None
    return (logs[0] - sum(logs[1:])) / math.log(n)
