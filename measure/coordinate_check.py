"""The coordinate check: do activations and updates scale with size as the prescription says?

    python -m measure.coordinate_check nanolm_c4 nanolm_c4/configs/laptop.yaml [key=value ...]
    python -m measure.coordinate_check vit_cifar5m vit_cifar5m/configs/laptop.yaml \
        --scan model.head_dim --widths 8 16 32 64
    python -m measure.coordinate_check examples/coordinate_check_mlp.py

trains a few steps at several widths and seeds, without warm-up, and fits the power of the width in

* init: the RMS of every module's output at initialisation, on the batch of the first step;
* change: the RMS of what each step adds up to, output after t steps minus output at first. The
  logits have a second row, their change along the gradient of the loss: a softmax over V tokens
  pushes about one logit of V in a common direction, so the RMS over all of them shows the growth
  of that one only at widths far beyond V;
* update: the RMS of every tensor's change.

Beside each slope stands the one that the plan's prescription aims at, and the one that theory
predicts for the first steps, where they differ. Everett et al. (2024) assume that the readout's
initial weights and the change of its input are unaligned (omega = 1/2), and "no alignment" that
updates and activations are, too (alpha = 1/2). In the first steps of training both exponents are
measured to be 1. Hence the logits of standard and NTK grow as width^(1/2) at their full-alignment
rates: an exception that this check expects, and names.

Verdicts: `ok`: within the tolerance of the aim. `expected exception`: off the aim, towards the
prediction and not past it. `grows`, `shrinks`: off by more. `unclear`: the standard errors are too
large to say. `not finite`: NaN or infinite. `-`: nothing is known to compare with. Exponents of the
theory differ by halves, so the default tolerance is 1/4: a slope is judged by the nearest half.

The theory is about widths far above everything else, and changes of first order. So for an
experiment the check sets some keys that do not depend on width (CHECK_SETTINGS: one sample per
step, embeddings of scale 1, no weight decay, mixing or dropout, and an eighth of the learning rate)
unless they are given on the command line; `--as-configured` leaves them all alone.

`--scan KEY` goes through the values of another key than the width: model.heads and model.head_dim,
whose width is in proportion, or model.layers, where the prescription has a rule for the depth
(Bordelon et al., 2024). The powers then are of that size. Models of different depths are compared
by the RMS over all their blocks, which stands under names like blocks.*.mlp.up.

Your own model: a file with `def task(width: int, seed: int) -> Check`, see `Check`.

Exit code: 0, 1 if a verdict is bad (grows, shrinks, unclear, not finite), 2 for a mistake in the
command, the config or the file.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import io
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accelerate.utils import send_to_device
from torch import nn

from measure.fits import power_law
from param_groups import Bordelon, Dinan, Everett, Plan, Prescription, Role, Row, exponents
from param_groups.exponents import Alignment, Layer, Parameterization
from param_groups.plan import align
from param_groups.prescriptions import LAYER_TYPE, OPTIMIZER_FAMILY
from training import environment, optimizers, runs
from training.config import Section, leaves, parse_overrides, read_yaml, set_keys, validate
from training.errors import UserError, one_line_errors
from training.experiment import load_experiment
from training.files import write_json, write_text
from training.task import Task, build_optimizer, first_batches, initialise

WIDTHS, STEPS, SEEDS, TOLERANCE = (64, 128, 256, 512), 4, 3, 0.25
OK, EXCEPTION, GROWS, SHRINKS = "ok", "expected exception", "grows", "shrinks"
UNCLEAR, NOT_FINITE, UNKNOWN = "unclear", "not finite", "-"
SEVERITY = (NOT_FINITE, GROWS, SHRINKS, UNCLEAR, EXCEPTION, OK, UNKNOWN)
BAD = SEVERITY[:4]
ALONG = " along the loss gradient"

# Keys an experiment is checked with, where its config has them. None changes an exponent; all
# bring the widths of a laptop into the range where the exponents show. Thousands of tokens, as
# many as widths, hide how updates align with activations; an embedding of 0.01, Everett et al.'s
# constant, moves by its own size in a step and covers the changes of all other layers; so does
# any other rate that is large enough for the norms to saturate. Residual branches larger than the
# stream hide at few blocks what happens at many, and an output that is divided by a small gamma0
# starts as large as the loss can feel. Weight decay moves a tensor by a share of itself,
# whatever its rate. One sample cannot be mixed with another; dropout is noise.
CHECK_SETTINGS: dict[str, Any] = {
    "training.batch_size": 1,
    "prescription.embedding_std": 1.0,
    "prescription.beta0": 1.0,
    "prescription.gamma0": 1.0,
    "optimizer.weight_decay": 0.0,
    "data.augmentation.mixup": 0.0,
    "data.augmentation.cutmix": 0.0,
    "model.dropout": 0.0,
    "model.attention_dropout": 0.0,
}
LR_FACTOR = 1 / 8


# ------------------------------------------------------------------------------------------------
# What is measured


@dataclass
class Check:
    """A model at one width, ready to train; what `task(width, seed)` of your own file returns.

    `model` is unwrapped and uncompiled, `plan` its plan, which the check initialises it with.
    `loss(model, batch)` is the mean loss of a batch. Step t trains on batches[t], again from the
    first when they run out, and all outputs are compared on batches[0]. `optimizer` holds the
    model's tensors; by default it is the prescription's, over the plan's groups. `clip_norm` is
    the largest gradient norm, none by default. `after_init(model)` may change what the plan drew.
    """

    model: nn.Module
    plan: Plan
    batches: Sequence[Any]
    loss: Callable[[nn.Module, Any], torch.Tensor]
    optimizer: torch.optim.Optimizer | None = None
    clip_norm: float | None = None
    after_init: Callable[[nn.Module], None] | None = None


Build = Callable[[int, int], Check]  # (width, seed) -> Check


@dataclass(frozen=True)
class Point:
    """One measured RMS; `name` is a module's, or a tensor's if `quantity` is "update"."""

    quantity: str
    name: str
    part: str
    step: int
    width: int
    seed: int
    rms: float


@dataclass
class Measurement:
    """All points of a check, and the plan at every width."""

    points: list[Point] = field(default_factory=list)
    plans: dict[int, Plan] = field(default_factory=dict)
    silent: tuple[str, ...] = ()


def measure(
    build: Build,
    widths: Sequence[int] = WIDTHS,
    *,
    steps: int = STEPS,
    seeds: Sequence[int] = tuple(range(SEEDS)),
    device: torch.device | str = "cpu",
    progress: Callable[[str], None] | None = None,
) -> Measurement:
    """Trains every width and seed; UserError for too few widths and for what cannot be compared.

    `build` returns the Check of a (width, seed). Modules are measured by forward hooks, without
    dropout: those that own a planned tensor, and the blocks of a ModuleList or Sequential.
    `silent` lists those whose forward was never called. `progress` is told each run that is done.

    `widths` may be of any size that `build` understands. If it is the depth of a prescription that
    has one, and nothing else, points are of all blocks together.
    """
    _check_numbers(widths, steps, seeds)
    result = Measurement()
    modules: dict[int, set[str]] = {}
    for width in sorted(widths):
        for seed in seeds:
            check = _checked(build(width, seed))
            result.plans[width] = check.plan
            with torch.random.fork_rng():  # dropout, too, is a function of the seed
                torch.manual_seed(seed)
                points, silent = _measure_one(check, width, seed, steps, torch.device(device))
            result.silent = silent
            result.points += points
            modules[width] = {point.name for point in points if point.quantity == "init"}
            if progress is not None:
                progress(f"width {width} seed {seed}")
    if scanned(result.plans) == "depth":
        result.points = _over_blocks(result.points)
        modules = {depth: set(map(pooled, names)) for depth, names in modules.items()}
    _refuse_unlike(modules, result.plans)
    return result


def scanned(plans: Mapping[int, Plan]) -> str:
    """The size in which the plans differ: depth or head_dim where it is that alone, else width."""
    rules = [plan.prescription for plan in plans.values()]
    sizes = [key for key in ("head_dim", "heads", "depth") if len({r.get(key) for r in rules}) > 1]
    return sizes[0] if sizes in (["depth"], ["head_dim"]) else "width"


def _over_blocks(points: Sequence[Point]) -> list[Point]:
    """The RMS over all blocks of what each of them has, so that depths can be compared."""
    groups: dict[Point, list[float]] = {}
    for point in points:
        group = replace(point, name=pooled(point.name), rms=0.0)
        groups.setdefault(group, []).append(point.rms)
    return [
        replace(group, rms=math.sqrt(sum(rms * rms for rms in values) / len(values)))
        for group, values in groups.items()
    ]


def _check_numbers(widths: Sequence[int], steps: int, seeds: Sequence[int]) -> None:
    """Refuses what no slope can be fitted to."""
    if len(set(widths)) < 3 or len(set(widths)) < len(widths) or min(widths) < 1:
        raise UserError(
            f"widths {' '.join(map(str, widths))}: expected at least 3 different positive ones, "
            "for example 64 128 256 512"
        )
    if steps < 1 or len(seeds) < 1:
        raise UserError(f"{steps} steps, {len(seeds)} seeds: expected at least 1 of each")


def _checked(check: object) -> Check:
    """The check, if it is one and has something to train on."""
    if not isinstance(check, Check):
        raise UserError(
            f"task(width, seed) returned {type(check).__name__}; expected a "
            "measure.coordinate_check.Check"
        )
    if not len(check.batches):
        raise UserError("the check has no batches; give Check(batches=[...]) at least one")
    return check


def _refuse_unlike(modules: Mapping[int, set[str]], plans: Mapping[int, Plan]) -> None:
    """Refuses widths that do not differ, or differ in more than their width."""
    first, *rest = sorted(modules)
    for width in rest:
        if odd := sorted(modules[first] ^ modules[width]):
            raise UserError(
                f"module {odd[0]!r} is in the model of width {first} or {width} only; widths can "
                "be compared only between models that are otherwise the same"
            )
        if [row.shape for row in plans[first].rows] == [row.shape for row in plans[width].rows]:
            raise UserError(
                f"widths {first} and {width} gave models of the same shapes; the width that is "
                "asked for must be the model's"
            )


def _measure_one(
    check: Check, width: int, seed: int, steps: int, device: torch.device
) -> tuple[list[Point], tuple[str, ...]]:
    """The points of one width and seed, and the modules that were never called."""
    model = check.model.to(device)
    check.plan.initialise(model, seed)
    if check.after_init is not None:
        check.after_init(model)
    optimizer = check.optimizer or _optimizer(check)
    batches = [send_to_device(batch, device) for batch in check.batches]
    parts = watched(model, check.plan)
    first, gradient = _first_outputs(check, parts, batches[0])
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    points = [
        Point("init", name, parts[name], 0, width, seed, _rms(output))
        for name, output in first.items()
    ]
    for step in range(1, steps + 1):
        _train_step(check, optimizer, batches[(step - 1) % len(batches)])
        now = _outputs(check, first, batches[0])
        changes = {name: now[name] - first[name] for name in first}
        points += [
            Point("change", name, parts[name], step, width, seed, _rms(change))
            for name, change in changes.items()
        ]
        points += [
            Point("change", name + ALONG, "logits", step, width, seed, _rms_along(changes[name], g))
            for name, g in gradient.items()
        ]
        points += [
            Point("update", name, "tensor", step, width, seed, _rms(p.detach() - start[name]))
            for name, p in model.named_parameters()
        ]
    return points, tuple(name for name in parts if name not in first)


def _optimizer(check: Check) -> torch.optim.Optimizer:
    """The update rule of the plan's prescription, Adam where it names none."""
    name = str(check.plan.prescription.get("optimizer", "adam"))
    return optimizers.build(name, check.plan.groups(check.model))


def _train_step(check: Check, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    check.model.train()
    optimizer.zero_grad()
    check.loss(check.model, batch).backward()
    if check.clip_norm is not None:
        nn.utils.clip_grad_norm_(check.model.parameters(), check.clip_norm)
    optimizer.step()
    optimizer.zero_grad()


def watched(model: nn.Module, plan: Plan) -> dict[str, str]:
    """Module name -> part ("embedding", "hidden", "logits") of all that is measured.

    A word embedding that is also the readout counts as logits under its second name.
    """
    parts: dict[str, str] = {}
    for row in plan.rows:
        for name in (row.name, *row.tied_to):
            module = name.rpartition(".")[0]
            if module:  # not the whole model, whose output is the loss or the logits again
                parts[module] = _strongest(parts.get(module), _part(row, name))
    for name, module in model.named_modules():
        parent = model.get_submodule(name.rpartition(".")[0])
        block = isinstance(parent, (nn.ModuleList, nn.Sequential)) and module is not model
        if block and name not in parts:
            if any(True for _ in module.parameters()):
                parts[name] = "hidden"
    order = [name for name, _ in model.named_modules() if name in parts]
    return {name: parts[name] for name in order}


def _part(row: Row, name: str) -> str:
    """What a module's output is, judged by one of its tensors."""
    role = Role(row.role)
    if role is Role.READOUT or (role is Role.TOKEN_EMBEDDING and name != row.name):
        return "logits"
    tables = (Role.TOKEN_EMBEDDING, Role.POSITION_EMBEDDING, Role.PATCH_EMBEDDING)
    return "embedding" if role in tables else "hidden"


def _strongest(one: str | None, other: str) -> str:
    """The part of a layer with several tensors: a bias says less than its matrix."""
    return one if one in ("logits", "embedding") else other


@contextmanager
def _recording(
    model: nn.Module, names: Sequence[str], keep: Callable[[torch.Tensor], torch.Tensor]
) -> Iterator[dict[str, list[torch.Tensor]]]:
    """Collects the outputs of the named modules while it is open, one entry per call."""
    outputs: dict[str, list[torch.Tensor]] = {}

    def hook(name: str) -> Callable[..., None]:
        def record(module: nn.Module, args: Any, output: Any) -> None:
            tensor = _first_tensor(output)
            if tensor is not None:
                outputs.setdefault(name, []).append(keep(tensor))

        return record

    handles = [model.get_submodule(name).register_forward_hook(hook(name)) for name in names]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


def _first_tensor(output: Any) -> torch.Tensor | None:
    """The first tensor of real numbers in a module's output, which may be nested."""
    if isinstance(output, torch.Tensor):
        return output if output.is_floating_point() else None
    values = output.values() if isinstance(output, Mapping) else output
    if not isinstance(output, (Mapping, list, tuple)):
        return None
    return next((t for t in map(_first_tensor, values) if t is not None), None)


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """All calls of a module as rows of one float32 matrix, features last."""
    return torch.cat([t.detach().float().reshape(-1, t.shape[-1]) for t in tensors])


def _first_outputs(
    check: Check, parts: Mapping[str, str], batch: Any
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Outputs at initialisation, and the loss gradient at the logits, by module name."""
    logits = [name for name, part in parts.items() if part == "logits"]
    check.model.eval()  # no dropout: outputs are compared between steps
    with (
        _recording(check.model, list(parts), lambda t: t.detach().clone()) as outputs,
        _recording(check.model, logits, _keep_gradient) as live,
    ):
        check.loss(check.model, batch).backward()
    if not outputs:
        raise UserError("no planned module was called; does loss(model, batch) call the model?")
    for name in logits:
        if name not in outputs and len(logits) == 1:
            raise UserError(
                f"module {name!r} was never called, so the logits cannot be measured; give a "
                "loss(model, batch) that calls it, not one that fuses readout and cross-entropy"
            )
    gradient = {
        name: _joined([tensor.grad for tensor in tensors])
        for name, tensors in live.items()
        if all(tensor.grad is not None for tensor in tensors)
    }
    check.model.zero_grad()
    first = {name: _joined(outputs[name]) for name in parts if name in outputs}
    return first, gradient


def _keep_gradient(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.requires_grad:
        tensor.retain_grad()
    return tensor


@torch.no_grad()
def _outputs(
    check: Check, first: Mapping[str, torch.Tensor], batch: Any
) -> dict[str, torch.Tensor]:
    """The outputs now, which must be those of the same calls as at first."""
    check.model.eval()
    with _recording(check.model, list(first), lambda t: t.clone()) as outputs:
        check.loss(check.model, batch)
    now = {name: _joined(tensors) for name, tensors in outputs.items()}
    for name, before in first.items():
        if name not in now or now[name].shape != before.shape:
            raise UserError(
                f"module {name!r} was called otherwise than at first on the same batch; the check "
                "needs a forward pass that does not depend on the step"
            )
    return now


def _rms(x: torch.Tensor) -> float:
    return x.float().square().mean().sqrt().item()


def _rms_along(change: torch.Tensor, gradient: torch.Tensor) -> float:
    """RMS over positions of the change's component along the gradient; those without are left out.

    Both (positions, V).
    """
    norm = gradient.norm(dim=-1)
    along = (change * gradient).sum(-1)[norm > 0] / norm[norm > 0]
    return along.square().mean().sqrt().item()


# ------------------------------------------------------------------------------------------------
# What is expected

# The first steps: updates align with activations (alpha = 1), hidden weights do not align with
# the change of their input (omega = 1/2), the readout does (omega = 0.96 to 1.00 at the first step,
# see effective_theory). u = 0 leaves out the product of two changes, which is of second order.
FIRST_STEPS = Alignment(alpha=1, omega=Fraction(1, 2), u=0, omega_readout=1)


@dataclass(frozen=True)
class Theory:
    """The exponents of a prescription; `alignment` is what its rates assume, None for one rate.

    `query_key` is what the updates of queries and keys have beyond those of other matrices;
    `query_key_first` is added in the first steps.
    """

    parameterization: Parameterization
    optimizer: str
    c: Mapping[str, Fraction]
    alignment: Alignment | None
    query_key: Fraction = Fraction(0)
    query_key_first: Fraction = Fraction(0)

    def change(self, part: str, alignment: Alignment) -> Fraction:
        """The power of the width in the change of a part's output."""
        case = (self.parameterization, self.optimizer, alignment, self.c)
        residuals = dict(zip(("embedding", "hidden", "logits"), exponents.residuals(*case)))
        return -residuals[part]

    def init(self, part: str) -> Fraction:
        """The power of the width in a part's output at initialisation."""
        if part == "embedding":
            return -self.parameterization.embedding.scale
        layer = self.parameterization["readout" if part == "logits" else "hidden"]
        return Fraction(1, 2) - layer.scale

    def update(self, layer: str) -> Fraction:
        """The power of the width in multiplier times first update, -d (Everett et al., B.9)."""
        exponent, c = self.parameterization[layer], self.c[layer]
        if self.optimizer == "adam":
            return -c - exponent.a
        if self.optimizer == "adafactor":
            return -c - exponent.scale
        return exponents.gradient_exponents(self.parameterization)[layer] - c - exponent.a


@dataclass(frozen=True)
class DepthTheory(Theory):
    """Powers of the depth in Bordelon et al.'s rule: scales are constant, and so are changes.

    Weights of a block move by L^(alpha_depth - 1), (12) and (17), and what they alone do to
    queries and keys is as small, (15); the residual stream moves by order 1 in any case.
    """

    alpha_depth: Fraction = Fraction(1)

    def change(self, part: str, alignment: Alignment) -> Fraction:
        """Constant for every part: that is what the rule is for."""
        return Fraction(0)

    def init(self, part: str) -> Fraction:
        """Constant, logits included."""
        return Fraction(0)

    def update(self, layer: str) -> Fraction:
        """The power of the depth in multiplier times update."""
        return self.alpha_depth - 1 if layer == "hidden" else Fraction(0)


def prescription_of(plan: Plan) -> Prescription | None:
    """The prescription a plan was made by; None if it is not one of the papers'."""
    known = {"everett": Everett, "dinan": Dinan, "bordelon": Bordelon}
    fields = dict(plan.prescription)
    kind = known.get(str(fields.pop("name", "")))
    if kind is Bordelon:
        fields.pop("width")
    if isinstance(fields.get("alignment"), Mapping):
        fields["alignment"] = Alignment(**fields["alignment"])
    return kind(**fields) if kind else None


def theory_of(prescription: Prescription | None, size: str = "width") -> Theory | None:
    """The exponents of a prescription in its width; None where they are unknown.

    Bordelon et al.'s rule also has those of the head dimension and the depth, as `scanned` names
    them. Unknown are those of foreign prescriptions, and of Dinan et al.'s BART, whose hidden
    matrices start at one scale for all widths.
    """
    if isinstance(prescription, Everett):
        return _everett(prescription)
    if isinstance(prescription, Bordelon):
        return _bordelon(prescription, size)
    if isinstance(prescription, Dinan) and prescription.init == "vit":
        return _dinan(prescription)
    return None


def _everett(prescription: Everett) -> Theory:
    table = exponents.PARAMETERIZATION_TABLE[prescription.parameterization]
    alignment = prescription.alignment
    if isinstance(alignment, str):
        named = {"full": exponents.FULL_ALIGNMENT, "none": exponents.NO_ALIGNMENT}
        alignment = named.get(alignment)
    c = {layer: -prescription.lr_exponent(layer) for layer in exponents.LAYERS}
    return Theory(table, OPTIMIZER_FAMILY[prescription.optimizer], c, alignment)


def _dinan(prescription: Dinan) -> Theory:
    """s of footnote 8: Everett's solver for a readout of std n^(-(1+s)/2) and omega = 1 there."""
    s = prescription.exponent_s
    half = Fraction(1, 2)
    readout = Layer(0, half + exponents.fraction(s or 0) / 2)
    table = Parameterization(Layer(0, 0), Layer(0, half), readout)
    if s is None:
        one_rate = dict.fromkeys(exponents.LAYERS, Fraction(0))
        return Theory(table, prescription.optimizer, one_rate, None)
    alignment = exponents.TENSOR_PROGRAMS
    c = exponents.solve(table, prescription.optimizer, alignment).c
    return Theory(table, prescription.optimizer, c, alignment)


def _bordelon(prescription: Bordelon, size: str) -> Theory:
    """Width n = N H: the class of mean field, with muP's embedding under Adam.

    With the head dimension N, queries and keys move by N^(alpha_attention - 1), (15), and under
    SGD at first by N^(-1/2) of that, for the values that attention mixes do not align with the
    gradient yet (Fig. 13).
    """
    half = Fraction(1, 2)
    if prescription.optimizer == "sgd":
        table = Parameterization(Layer(0, 0), Layer(half, 0), Layer(1, 0))
        c, family = Fraction(-1), "sgd"
    else:
        table = Parameterization(Layer(-half, half), Layer(half, 0), Layer(half, half))
        c, family = half, "adam"
    rates = dict.fromkeys(exponents.LAYERS, c)
    theory = (table, family, rates, exponents.TENSOR_PROGRAMS)
    if size == "depth":
        alpha = exponents.fraction(prescription.alpha_depth)
        return DepthTheory(*theory, alpha_depth=alpha)
    if size == "head_dim":
        first = -half if family == "sgd" else Fraction(0)
        return Theory(*theory, exponents.fraction(prescription.alpha_attention) - 1, first)
    return Theory(*theory)


def expectation(
    theory: Theory | None, quantity: str, part: str
) -> tuple[Fraction | None, Fraction | None]:
    """(aim, prediction) of a module's slope; None where nothing is known.

    The aim is what the prescription promises under its own assumptions: constant scale where it
    has none. The prediction is what theory says of the first steps. Without a theory hidden
    activations and their changes, and the change of the logits, are expected to be constant.
    """
    if theory is None:
        unknown = quantity == "init" and part == "logits"
        return (None, None) if unknown else (Fraction(0), Fraction(0))
    if quantity == "init":
        aim = theory.init(part) if part == "logits" else Fraction(0)
        return aim, theory.init(part)
    aim = Fraction(0) if theory.alignment is None else theory.change(part, theory.alignment)
    return aim, theory.change(part, FIRST_STEPS)


# ------------------------------------------------------------------------------------------------
# Slopes and verdicts


@dataclass(frozen=True)
class Slope:
    """The power of the width in one quantity, with its standard error and verdict.

    `aim` and `predicted` are those of `expectation`; `note` says why a verdict is not plain.
    """

    quantity: str
    name: str
    part: str
    step: int
    slope: float | None
    error: float | None
    aim: float | None
    predicted: float | None
    verdict: str
    note: str = ""


def fit(measurement: Measurement, tolerance: float = TOLERANCE) -> list[Slope]:
    """One slope per quantity, name and step, in the order they were measured."""
    groups: dict[tuple[str, str, str, int], list[Point]] = {}
    for point in measurement.points:
        key = (point.quantity, point.name, point.part, point.step)
        groups.setdefault(key, []).append(point)
    plan = measurement.plans[min(measurement.plans)]
    theory = theory_of(prescription_of(plan), scanned(measurement.plans))
    return [
        _judged(key, points, _expected(key, measurement, theory), theory, tolerance)
        for key, points in groups.items()
    ]


def _expected(
    key: tuple[str, str, str, int], measurement: Measurement, theory: Theory | None
) -> tuple[float | None, float | None]:
    """(aim, prediction) of a module or tensor."""
    quantity, name, part, _ = key
    if quantity != "update":
        return expectation(theory, quantity, part)
    aim = _expected_update(name, measurement.plans, theory)
    later = theory is not None and aim is not None and _is_query_or_key(name, measurement.plans)
    return aim, aim + float(theory.query_key_first) if later else aim


def _is_query_or_key(name: str, plans: Mapping[int, Plan]) -> bool:
    return _row(plans[min(plans)], name).role in (Role.QUERY, Role.KEY)


def _row(plan: Plan, name: str) -> Row:
    """A tensor's row; all blocks have the numbers of the first."""
    return plan[name.replace(".*.", ".0.")]


def _expected_update(
    name: str, plans: Mapping[int, Plan], theory: Theory | None
) -> float | None:
    """The power of the width in a tensor's update: the theory's, or that of the planned rate."""
    row = _row(plans[min(plans)], name)
    # Exponents are of inputs and hidden layers; a bias of the output is neither.
    if theory is None or row.role == Role.READOUT_BIAS:
        family = OPTIMIZER_FAMILY.get(str(plans[min(plans)].prescription.get("optimizer", "adam")))
        rates = [_row(plans[width], name).lr for width in plans]
        return power_law(list(plans), rates).exponent if family == "adam" and min(rates) else None
    starts_at_zero = row.init_std == 0 and row.init_mean == 0
    layer = LAYER_TYPE[Role.QUERY if row.role == Role.QKV else Role(row.role)]
    if theory.optimizer == "adafactor" and starts_at_zero:  # scaled by the floor, not by itself
        return float(-theory.c[layer])
    # n^-d is multiplier times update; a plan that has absorbed the multiplier updates by n^-d.
    multiplier = power_law(list(plans), [_row(plans[width], name).multiplier for width in plans])
    own = theory.query_key if _is_query_or_key(name, plans) else 0
    return float(theory.update(layer) + own) - multiplier.exponent


def slope_of(points: Sequence[Point]) -> tuple[float, float]:
    """(slope, standard error) of log RMS against log width.

    The slope is that of the mean logarithm over seeds. The error is the larger of two: that of all
    points, which holds the spread of the seeds, and that of the means, which holds the curvature
    that seeds share.
    """
    widths = [point.width for point in points]
    law = power_law(widths, [point.rms for point in points])
    different = sorted(set(widths))
    logs = [[math.log(p.rms) for p in points if p.width == width] for width in different]
    means = power_law(different, [math.exp(sum(seeds) / len(seeds)) for seeds in logs])
    return law.exponent, max(law.error, means.error)


def _judged(
    key: tuple[str, str, str, int],
    points: Sequence[Point],
    expected: tuple[float | Fraction | None, float | Fraction | None],
    theory: Theory | None,
    tolerance: float,
) -> Slope:
    aim, predicted = (None if value is None else float(value) for value in expected)
    values = [point.rms for point in points]
    if not all(map(math.isfinite, values)):
        return Slope(*key, None, None, aim, predicted, NOT_FINITE)
    if min(values) == 0:
        return Slope(*key, None, None, aim, predicted, UNKNOWN, "zero")
    slope, error = slope_of(points)
    one_sided = key[2] == "logits" and key[0] == "change" and ALONG not in key[1]
    exception = theory is not None and theory.alignment is not None and key[0] != "init"
    word = verdict(slope, error, aim, predicted if exception else aim, tolerance, one_sided)
    return Slope(*key, slope, error, aim, predicted, word, _note(word, key[2], theory))


def verdict(
    slope: float,
    error: float,
    aim: float | None,
    predicted: float | None,
    tolerance: float = TOLERANCE,
    one_sided: bool = False,
) -> str:
    """The word for a slope; one-sided slopes are only too large, or not judged."""
    if aim is None or predicted is None:
        return UNKNOWN
    low, high = min(aim, predicted) - tolerance, max(aim, predicted) + tolerance
    if slope - 2 * error > high:
        return GROWS
    if one_sided and slope < aim - tolerance:
        return UNKNOWN
    if slope + 2 * error < low:
        return SHRINKS
    if not low <= slope <= high or 2 * error > tolerance:
        return UNCLEAR
    return OK if abs(slope - aim) <= tolerance else EXCEPTION


def _note(word: str, part: str, theory: Theory | None) -> str:
    """Why an exception is one."""
    if word != EXCEPTION or theory is None or theory.alignment is None:
        return ""
    if part == "tensor":
        return (
            "in the first steps of SGD the values that attention mixes do not align with the "
            "gradient yet, so queries and keys move less by a factor N^(-1/2) (Bordelon et al., "
            "Fig. 13)"
        )
    if theory.alignment.alpha < 1:
        return (
            "the rates assume that updates and activations are unaligned (alpha 1/2, Everett et "
            "al.'s no alignment); in the first steps they are aligned (1), so changes grow"
        )
    return (
        "Everett et al. assume that the readout's weights do not align with the change of their "
        "input (omega 1/2); in the first steps they do (1), so logits grow as width^(1/2)"
    )


# ------------------------------------------------------------------------------------------------
# Table and files


def pooled(name: str) -> str:
    """A name without its block numbers: blocks.0.mlp.up -> blocks.*.mlp.up."""
    return re.sub(r"(?<=\.)\d+(?=\.|$|\s)", "*", name)


def worst(words: Sequence[str]) -> str:
    """The most severe of several verdicts."""
    return min(words, key=SEVERITY.index)


def table(slopes: Sequence[Slope]) -> str:
    """Modules, then tensors: slopes at the first and the last step beside the expected ones.

    Repeated blocks are one line, with the slope that is farthest from its aim; the verdict is the
    worst over blocks and all steps.
    """
    last = max(slope.step for slope in slopes)
    modules = [("module", "init", "aim", "change, step 1", f"step {last}", "aim", "predicted",
                "verdict")]
    tensors = [("tensor", "update, step 1", f"step {last}", "expected", "verdict")]
    for name, group in _pools(slopes, ("init", "change")).items():
        start, one, end = (_farthest(group, *at) for at in (("init", 0), ("change", 1),
                                                            ("change", last)))
        modules.append((name, _cell(start), _number(start and start.aim), _cell(one), _cell(end),
                        _number(one and one.aim), _number(one and one.predicted), _words(group)))
    for name, group in _pools(slopes, ("update",)).items():
        one, end = _farthest(group, "update", 1), _farthest(group, "update", last)
        tensors.append((name, _cell(one), _cell(end), _number(one and one.aim), _words(group)))
    notes = dict.fromkeys(slope.note for slope in slopes if slope.verdict == EXCEPTION)
    text = [align(modules), align(tensors), *(f"{EXCEPTION}: {note}" for note in notes)]
    return "\n\n".join(text)


def _pools(slopes: Sequence[Slope], quantities: Sequence[str]) -> dict[str, list[Slope]]:
    groups: dict[str, list[Slope]] = {}
    for slope in slopes:
        if slope.quantity in quantities:
            groups.setdefault(pooled(slope.name), []).append(slope)
    return groups


def _farthest(group: Sequence[Slope], quantity: str, step: int) -> Slope | None:
    """Of the blocks of one line, the slope to show."""
    there = [slope for slope in group if (slope.quantity, slope.step) == (quantity, step)]
    return max(there, key=lambda s: abs((s.slope or 0) - (s.aim or 0)), default=None)


def _words(group: Sequence[Slope]) -> str:
    return worst([slope.verdict for slope in group])


def _cell(slope: Slope | None) -> str:
    if slope is None or slope.slope is None:
        return (slope and (slope.note or slope.verdict)) or ""
    return f"{round(slope.slope, 2) + 0.0:+.2f} ± {slope.error:.2f}"


def _number(value: float | None) -> str:
    if value is None:
        return UNKNOWN
    return f"{value:+.2g}" if abs(value) > 1e-6 else "0"


def summary(slopes: Sequence[Slope]) -> str:
    """The outcome in one line."""
    groups = {**_pools(slopes, ("init", "change")), **_pools(slopes, ("update",))}
    words = [_words(group) for group in groups.values()]
    counts = ", ".join(f"{words.count(word)} {word}" for word in SEVERITY if word in words)
    return f"{'FAILED' if failed(slopes) else 'passed'}: {counts}"


def failed(slopes: Sequence[Slope]) -> bool:
    """Whether any verdict is bad."""
    return any(slope.verdict in BAD for slope in slopes)


def write(
    folder: Path, measurement: Measurement, slopes: Sequence[Slope], settings: Mapping[str, Any]
) -> None:
    """coordinate_check.csv: every point; coordinate_check.json: slopes, verdicts and settings."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(Point.__dataclass_fields__), lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(point) for point in measurement.points)
    write_text(folder / "coordinate_check.csv", text.getvalue())
    content = {
        **settings,
        "passed": not failed(slopes),
        "not_called": list(measurement.silent),
        "prescription": measurement.plans[min(measurement.plans)].prescription,
        "slopes": [asdict(slope) for slope in slopes],
    }
    write_json(folder / "coordinate_check.json", content)


# ------------------------------------------------------------------------------------------------
# Command


@dataclass(frozen=True)
class Target:
    """What a command names: how to build it, where its results go, what was set for the check."""

    build: Build
    folder: Path
    settings: Mapping[str, Any]


def experiment_target(
    experiment: str,
    path: Path,
    overrides: Sequence[str],
    *,
    width_key: str,
    steps: int,
    widths: Sequence[int],
    as_configured: bool = False,
) -> Target:
    """An experiment's config at any width; every width is validated before the first is built."""
    found = load_experiment(experiment)
    data, given = read_yaml(path), parse_overrides(overrides)
    chosen = {} if as_configured else _check_settings(found.config, data, given)
    where = f"{path} with {' '.join(overrides)}" if overrides else str(path)
    if width_key == "model.width":
        _refuse_width_by_heads(set_keys(data, given).get("model"), where)

    def config(width: int, seed: int) -> Section:
        values = {**chosen, **given, width_key: width, "seed": seed}
        return validate(found.config, set_keys(data, values), where)

    def build(width: int, seed: int) -> Check:
        return _from_task(found.build_task(config(width, seed)), steps)

    configs = [config(width, 0) for width in widths]
    folder = runs.RESULTS / experiment / "coordinate_check" / runs.run_id(configs[0], path.stem)
    return Target(build, folder, {"set_for_the_check": chosen, "overrides": given})


def _refuse_width_by_heads(model: object, where: str) -> None:
    """UserError for a model that is given by its heads and has no width to go through."""
    if not isinstance(model, Mapping) or model.get("width") is not None:
        return
    if model.get("heads") is not None:
        raise UserError(
            f"{where}: gives model.heads and no model.width to scan; scan the heads, to which the "
            "width is in proportion: --scan model.heads --widths 4 8 16 32"
        )


def _check_settings(
    kind: type[Section], data: Mapping[str, Any], given: Mapping[str, Any]
) -> dict[str, Any]:
    """CHECK_SETTINGS where the experiment has the key and the command line has not."""
    keys = {key for key, _ in leaves(kind)} - given.keys()
    chosen = {key: value for key, value in CHECK_SETTINGS.items() if key in keys}
    lr = (data.get("optimizer") or {}).get("lr")
    if "optimizer.lr" in keys and isinstance(lr, (int, float)):
        chosen["optimizer.lr"] = lr * LR_FACTOR
    for name in ("beta0", "gamma0"):  # not numbers of every rule: only in place of one
        if (data.get("prescription") or {}).get(name) is None:
            chosen.pop(f"prescription.{name}", None)
    rule = "prescription.parameterization"
    named = given.get(rule) or (data.get("prescription") or {}).get("parameterization")
    if named == "bordelon":  # has its own scale of embeddings
        chosen.pop("prescription.embedding_std", None)
    return chosen


def _from_task(task: Task, steps: int) -> Check:
    """The first steps of a run, at constant rates."""
    config = task.config
    batches = list(first_batches(task, steps))
    initialise(task)
    return Check(
        model=task.model,
        plan=task.plan,
        batches=batches,
        loss=_loss_through_logits(task, batches[0]),
        optimizer=build_optimizer(task),
        clip_norm=config.optimizer.clip_norm,
        after_init=task.after_init,
    )


def _loss_through_logits(
    task: Task, batch: Any
) -> Callable[[nn.Module, Any], torch.Tensor]:
    """The task's mean loss, computed so that the readout is called.

    A model may fuse readout and cross-entropy when it is given targets. Then the loss is taken of
    the logits that it returns without, which must be the same number.
    """

    def mean(model: nn.Module, batch: Any) -> torch.Tensor:
        return task.loss(model, batch) / task.count(batch)

    def unfused(model: nn.Module, batch: Any) -> torch.Tensor:
        inputs, targets = batch
        return F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())

    readouts = [name for name, part in watched(task.model, task.plan).items() if part == "logits"]
    with torch.no_grad(), _recording(task.model, readouts, lambda t: t) as outputs:
        value = mean(task.model, batch)
    if outputs or not readouts or not isinstance(batch, (tuple, list)) or len(batch) != 2:
        return mean
    with torch.no_grad():
        other = unfused(task.model, batch)
    if not torch.isclose(value, other, rtol=1e-4):
        raise UserError(
            f"{readouts[0]!r} is not called for the loss ({value:.6g}), and the cross-entropy of "
            f"model(inputs) is another number ({other:.6g}); the logits cannot be measured"
        )
    return unfused


def file_target(path: Path, overrides: Sequence[str] = ()) -> Target:
    """A user's own file with task(width, seed)."""
    if overrides:
        raise UserError(f"{path}: key=value goes with an experiment's config, got {overrides[0]!r}")
    if not path.is_file():
        raise UserError(f"{path}: cannot read the file; give a Python file with task(width, seed)")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    task = getattr(module, "task", None)
    if not callable(task):
        raise UserError(
            f"{path}: no function task(width, seed) in it; add one that returns a "
            "measure.coordinate_check.Check (examples/coordinate_check_mlp.py is one)"
        )
    return Target(task, runs.RESULTS / "own" / "coordinate_check" / path.stem, {})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m measure.coordinate_check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("target", help="experiment folder, or a Python file with task(width, seed)")
    add("rest", nargs="*", metavar="config.yaml [key=value ...]", help="config of the experiment")
    add("--widths", type=int, nargs="+", default=WIDTHS, help="at least 3 (default 64 128 256 512)")
    add("--scan", "--width-key", dest="width_key", metavar="KEY", default="model.width",
        help="config key of the size that --widths are of (default model.width)")
    add("--steps", type=int, default=STEPS, help=f"optimiser steps (default {STEPS})")
    add("--seeds", type=int, default=SEEDS, help=f"seeds per width (default {SEEDS})")
    add("--tolerance", type=float, default=TOLERANCE, help=f"of a slope (default {TOLERANCE})")
    add("--as-configured", action="store_true", help="set no key but width and seed")
    add("--out", type=Path, help="folder of the results (default results/.../coordinate_check/...)")
    return parser


def _target(args: argparse.Namespace) -> Target:
    _check_numbers(args.widths, args.steps, range(args.seeds))
    if not 0 < args.tolerance < math.inf:
        raise UserError(f"--tolerance {args.tolerance}: expected a positive number")
    if args.target.endswith(".py"):
        return file_target(Path(args.target), args.rest)
    if not args.rest:
        raise UserError(f"{args.target}: give the experiment's config, for example "
                        f"{args.target}/configs/laptop.yaml")
    return experiment_target(
        args.target,
        Path(args.rest[0]),
        args.rest[1:],
        width_key=args.width_key,
        steps=args.steps,
        widths=args.widths,
        as_configured=args.as_configured,
    )


def _run(args: argparse.Namespace) -> list[Slope]:
    target = _target(args)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    measurement = measure(
        target.build,
        args.widths,
        steps=args.steps,
        seeds=range(args.seeds),
        device=device,
        progress=lambda line: print(line, file=sys.stderr),
    )
    slopes = fit(measurement, args.tolerance)
    settings = {
        "target": [args.target, *args.rest],
        "scan": args.width_key,
        "widths": sorted(args.widths),
        "seeds": args.seeds,
        "steps": args.steps,
        "tolerance": args.tolerance,
        **target.settings,
        "environment": environment.describe(device),
    }
    folder = args.out or target.folder
    write(folder, measurement, slopes, settings)
    for key, value in target.settings.get("set_for_the_check", {}).items():
        print(f"set for the check: {key}={value}")
    print("\n" + table(slopes) + "\n")
    if measurement.silent:
        print(f"never called, not measured: {', '.join(measurement.silent)}")
    print(summary(slopes))
    _draw(folder)
    return slopes


def _draw(folder: Path) -> None:
    """The figure, drawn from the files just written."""
    from plots import coordinate_check as figure

    paths = figure.draw(*figure.read(folder), folder)
    print("files: " + ", ".join(map(str, (folder / "coordinate_check.csv", *paths))))


def main(argv: Sequence[str] | None = None) -> None:
    """The command; see the module for its exit codes."""
    args = _parser().parse_intermixed_args(argv)
    with one_line_errors(OSError):
        slopes = _run(args)
    if failed(slopes):
        raise SystemExit(1)


if __name__ == "__main__":
    # The module under its own name: Check must be one class for this command and a user's file.
    from measure.coordinate_check import main as run

    run()
