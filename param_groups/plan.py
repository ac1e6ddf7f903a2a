"""The plan: one row of numbers per tensor of a model, computed once, before training.

    plan = param_groups.plan(model, rules, prescription, lr=0.01)
    plan.initialise(model, seed=0)
    optimizer = torch.optim.AdamW(plan.groups(model))

Rows are keyed by tensor name and nothing is stored on tensors. Printing, saving and comparing all
work on the rows, so what was trained can be read back from what was saved.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import NoneType
from typing import TYPE_CHECKING, Any

from param_groups.contract import (
    CONSTANT,
    NORMAL,
    UNIFORM,
    Numbers,
    Prescription,
    check_flag,
    check_sizes,
    finite,
    python_number,
    summary,
)
from param_groups.roles import Assignment, Fans, PlanError, Role, Rule, choose
from param_groups.rows import (
    READERS,
    Factor,
    Row,
    check_saved,
    factor_differences,
    named_by,
    row_differences,
    table,
)

if TYPE_CHECKING:  # torch is imported with the first plan, so that the exact tables answer at once
    from torch import nn

    from param_groups.tensors.muon import MuonAdamW

# The three meanings of a weight decay, as the fraction of a tensor that one step removes at the
# peak of the schedule, which all three follow; global is Dinan, Yaida & Zhang (1.94).
DECAY_MODES = {
    "independent": "weight_decay itself",
    "global": "weight_decay times the global lr",
    "per_group": "weight_decay times the tensor's own rate, as in torch's AdamW; with "
    "absorb_multipliers the rate before they were absorbed",
}


@dataclass(frozen=True)
class Plan:
    """A prescription applied to one model: its rows and their origin. `plan` makes it.

    Args:
        rows: the numbers of every tensor, in the model's order; `numbers[name]` is one of them.
        prescription: the rule's fields, as it describes itself.
        lr, eps, weight_decay, decay_mode: the global values, as given to `plan`.
        forward: the factors that the prescription gives the forward pass.

    >>> from torch import nn
    >>> from param_groups import Everett
    >>> model = nn.Sequential(nn.Linear(4, 2, bias=False))
    >>> numbers = plan(model, [Rule("0.weight", "readout")], Everett("standard", 4, 2), lr=0.5)
    >>> [(row.name, row.role, row.lr) for row in numbers.rows]
    [('0.weight', 'readout', 0.25)]
    """

    rows: tuple[Row, ...]
    prescription: dict[str, object]
    lr: float
    eps: float
    weight_decay: float
    decay_mode: str
    forward: tuple[Factor, ...] = ()

    def __getitem__(self, name: str) -> Row:
        """The row of a tensor, by any of its names; KeyError if there is none."""
        for row in self.rows:
            if name == row.name or name in row.tied_to:
                return row
        raise KeyError(name)

    def initialise(self, model: nn.Module, seed: int, *, keep: Iterable[str] = ()) -> None:
        """Draws the tensors, sets the multipliers of their layers and the forward factors.

        Tensors that do not require gradients keep their values, as do those that a pattern of
        `keep` names ("backbone.*"); their layers' multipliers are set all the same. The others'
        values depend on (seed, name) alone, drawn in float32 on the CPU: the same on every device,
        in every precision, sharded or not, and untouched by tensors added elsewhere. Twice is the
        same as once. An error leaves the model as it was.
        """
        from param_groups.tensors import values

        parameters = self._parameters(model)
        kept = named_by(self.rows, keep)
        frozen = {name for name, p in parameters.items() if not p.requires_grad} - kept
        drawn = [row for row in self.rows if row.name not in kept | frozen]
        for row in drawn:
            if parameters[row.name].is_meta:
                raise PlanError(
                    f"{row.name!r} is on the meta device and has no values to initialise"
                )
        values.layer_multipliers(model, self.rows)  # refuses before anything is drawn
        for row in drawn:
            values.fill(model, row, seed)
        self.apply_multipliers(model)
        values.note_given(model, self.rows, drawn, kept=bool(keep), frozen=frozen)

    def apply_multipliers(self, model: nn.Module) -> None:
        """Sets multipliers and forward factors of a model that keeps its weights; draws nothing.

        For a checkpoint, which holds tensors and no multipliers, and for pretrained weights of a
        model with the same multipliers: a stock model has none, as a plan with
        absorb_multipliers=True. The rates are those of a model that starts from the prescription's
        initial values. They carry over between checkpoints that were trained at several widths
        under one prescription; for any other take one rate for all tensors (Everett's "standard"
        with alignment="global", Dinan's "standard"). Raises PlanError when a layer that applies no
        multiplier would need one, or when the tensors of one layer disagree.
        """
        from param_groups.tensors import forward, values

        self._parameters(model)
        for layer, multiplier in values.layer_multipliers(model, self.rows).items():
            layer.multiplier = multiplier
        for module, name, value in forward.factor_places(model, self.forward):
            setattr(module, name, value)
        values.note_given(model, self.rows)

    def groups(
        self, model: nn.Module, *, check: bool = True, several: bool = False
    ) -> list[dict[str, object]]:
        """Torch parameter groups with real `lr`, `eps`, `weight_decay`; equal numbers share one.

        Each group also carries `initial_lr` (the schedule's reference), `name`, `param_names` and
        `optimizer`. Tensors that do not require gradients are left out. Raises PlanError for Muon's
        plan, whose groups are for two optimisers, unless `several` says that yours tells them apart
        (`optimizers`); and unless `check` is false, for a model that this plan has neither
        initialised nor given its multipliers, and for a tensor that was frozen when it was
        initialised and no longer is. Not for torch.optim.Adafactor, which takes a pair as epsilon.
        """
        from param_groups.tensors import values

        parameters = self._parameters(model)
        kinds = sorted({row.optimizer for row in self.rows})
        if len(kinds) > 1 and not several:
            raise PlanError(
                f"the plan's rates are for {' and '.join(kinds)}, and one optimiser would take "
                "them all: use plan.optimizers(model)"
            )
        if check:
            values.check_given(model, self.rows, self.forward)
        trained = [row for row in self.rows if parameters[row.name].requires_grad]
        groups: dict[tuple[float, float, float, str], list[Row]] = {}
        for row in trained:
            key = (row.lr, row.eps, row.weight_decay, row.optimizer)
            groups.setdefault(key, []).append(row)
        return [
            {
                "name": "+".join(dict.fromkeys(row.role for row in rows)),
                "params": [parameters[row.name] for row in rows],
                "param_names": [row.name for row in rows],
                "lr": lr,
                "initial_lr": lr,
                "eps": eps,
                "weight_decay": weight_decay,
                "optimizer": optimizer,
            }
            for (lr, eps, weight_decay, optimizer), rows in groups.items()
        ]

    def optimizers(
        self,
        model: nn.Module,
        *,
        betas: tuple[float, float] = (0.9, 0.95),
        momentum: float = 0.95,
        check: bool = True,
    ) -> MuonAdamW:
        """Muon for the plan's hidden matrices and AdamW for the rest, as one torch optimiser.

        Args:
            model: the model that the plan has initialised, or given its multipliers.
            betas: AdamW's.
            momentum: Muon's, with Nesterov's step.
            check: as in `groups`.

        Returns:
            An optimiser over `groups`: one list of groups for one scheduler and one checkpoint.

        Raises:
            PlanError: as `groups`, and for a plan of another optimiser than Muon and Adam.

        Source: Jordan et al. 2024, Muon.
        """
        from param_groups.tensors.muon import MuonAdamW

        if others := sorted({row.optimizer for row in self.rows} - {"muon", "adam"}):
            raise PlanError(f"the plan is for {others[0]}; plan.optimizers has Muon and AdamW")
        groups = self.groups(model, check=check, several=True)
        return MuonAdamW(groups, betas=betas, momentum=momentum)

    def to_dict(self) -> dict[str, object]:
        """The plan as JSON types."""
        return {**asdict(self), "rows": [asdict(row) for row in self.rows]}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Plan:
        """The inverse of `to_dict`; PlanError when a field is missing, unknown or no such value,
        and when a tensor has two rows."""
        try:
            rows = tuple(
                Row(**{**row, **{key: tuple(row[key]) for key in ("shape", "tied_to")}})
                for row in data["rows"]
            )
            factors = tuple(Factor(**factor) for factor in data["forward"])
            found = cls(**{**data, "rows": rows, "forward": factors})
            check_saved(found, decay_mode=DECAY_MODES)
            for part in (*rows, *factors):
                check_saved(part, role=[*Role], init_distribution=(NORMAL, UNIFORM, CONSTANT))
        except (AttributeError, KeyError, TypeError) as error:
            raise PlanError(f"not a saved plan: {error}") from None
        if not rows:
            raise PlanError("not a saved plan: it has no rows")
        count = Counter(name for row in rows for name in (row.name, *row.tied_to))
        if twice := [name for name, number in count.items() if number > 1]:
            raise PlanError(f"not a saved plan: {twice[0]!r} has two rows")
        return found

    def differences(self, other: Plan) -> list[str]:
        """What another plan has changed, one line each ("name: lr 0.1 -> 0.2"); empty if equal.

        Only rows and forward factors are compared: plans with the same numbers are equal, whichever
        rule made them.
        """
        mine, theirs = ({row.name: row for row in plan.rows} for plan in (self, other))
        lines = [f"{name}: only in the first plan" for name in mine if name not in theirs]
        lines += [f"{name}: only in the second plan" for name in theirs if name not in mine]
        for name in mine.keys() & theirs.keys():
            lines += row_differences(mine[name], theirs[name])
        return sorted([*lines, *factor_differences(self.forward, other.forward)])

    def table(self) -> str:
        """The plan for people: rows that differ only in their block number are one line."""
        decays = sorted({row.decay_per_step for row in self.rows if row.decay_per_step})
        shares = [f"{100 * share:.4g} %" for share in dict.fromkeys((*decays[:1], *decays[-1:]))]
        decay = f"{' to '.join(shares)} per step ({self.decay_mode})" if shares else "none"
        title = f"lr {self.lr:g}, eps {self.eps:g}, decay {decay}; {summary(self.prescription)}"
        if self.forward:
            title += "\nforward pass: " + ", ".join(map(str, self.forward))
        return title + "\n" + table(self.rows)

    def _parameters(self, model: nn.Module) -> dict[str, nn.Parameter]:
        parameters = dict(model.named_parameters())
        if set(parameters) != {row.name for row in self.rows}:
            odd = sorted(set(parameters) ^ {row.name for row in self.rows})
            raise PlanError(
                f"the plan is for another model: {odd[0]!r} is only in one of the two; "
                "use the unwrapped, uncompiled model the plan was made from"
            )
        for row in self.rows:
            if tuple(parameters[row.name].shape) != row.shape:
                raise PlanError(
                    f"the plan is for another model: {row.name!r} has shape "
                    f"{tuple(parameters[row.name].shape)}, but the plan is for {row.shape}"
                )
        return parameters


def plan(
    model: nn.Module,
    rules: Sequence[Rule],
    prescription: Prescription,
    *,
    lr: float,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    decay_mode: str | None = None,
    absorb_multipliers: bool = False,
    applied: Mapping[str, float] | None = None,
    head_dim: int | None = None,
    base: nn.Module | Fans | None = None,
    no_decay: Iterable[str] = (),
) -> Plan:
    """The plan of a model; the model is only read.

    Factors of the forward pass are the model's to apply. They must be the prescription's:

    * modules that derive from `layers.Scaled` are given them;
    * what library modules hold is read (`scaling`, `embed_scale`, `residual_multiplier`) and
      compared, an attention's as the power of its head dimension;
    * `applied` says which values you have set where nothing can be read.

    Args:
        model: unwrapped and uncompiled, on any device or "meta".
        rules: which role each tensor has; together they name every tensor.
        prescription: the papers', or a class of your own that derives from `Prescription`.
        lr, eps: the global values that the prescription's factors multiply.
        weight_decay: see `decay_mode`.
        decay_mode: what a decay means, a name of DECAY_MODES; has to be given with one.
        absorb_multipliers: move forward multipliers into initial values, rate and epsilon. That
            trains the same, and any module can follow; every tensor decays as with its multiplier.
            Only clipping by the gradient's norm sees a difference, since the norm changes.
        applied: {"attention_scale": 1 / 16}, forward factors that the model's own code applies.
        head_dim: of attentions that do not say theirs.
        base: the same model at its base size, or its `fans_of`, for models of several widths
            (stages, encoder and decoder, few heads for keys): each tensor's fans over those of the
            base decide, not the prescription's width. The prescription's base width is a constant
            that sets multipliers and initial values, and absorbed rates. Keep the base model's.
        no_decay: roles ("norm_scale") or patterns of names ("*.bias") without decay.

    Returns:
        A row of numbers per tensor, in the model's order.

    Raises:
        PlanError: a model, rule, width or number that cannot be given a learning rate; a forward
            factor that the model does not apply, or applies though the plan has none.

    >>> from torch import nn
    >>> from param_groups import Everett
    >>> model = nn.Sequential(nn.Linear(512, 10, bias=False))
    >>> rules = [Rule("0.weight", "readout")]
    >>> mup = Everett("mup", 512, 128)
    >>> numbers = plan(model, rules, mup, lr=0.5, absorb_multipliers=True)
    >>> round(numbers["0.weight"].lr, 5)  # 0.5 (512 / 128)^(-1/2), times the multiplier 512^(-1/2)
    0.01105
    """
    from param_groups.tensors.checks import prepared
    from param_groups.tensors.forward import settle_factors

    lr, eps, weight_decay, decay_mode = _global_numbers(lr, eps, weight_decay, decay_mode)
    rule: Any = getattr(prescription, "rule", prescription)  # a recipe's
    still = getattr(rule, "alignment", "") == "global" or getattr(rule, "rate_exponent", 1) == 0
    width = getattr(rule, "decay_exponent", 0.0) and not still
    idle = (None, 0.5 if getattr(rule, "optimizer", "") == "sgd" else 1.0)  # no power in the rate
    depth = getattr(rule, "decay_depth", False) and rule.alpha_depth not in idle
    if weight_decay and decay_mode == "per_group" and (width or depth):
        field, size = ("decay_exponent", "width") if width else ("decay_depth", "depth")
        why = f"has the rate's power of the {size} already; use 'independent' or 'global'"
        raise PlanError(f"{field}: decay_mode 'per_group' {why}")
    if not isinstance(applied, (Mapping, NoneType)):
        raise PlanError(f"applied is a dict of forward factors, got {applied!r}")
    if head_dim is not None:
        check_sizes("plan", head_dim=head_dim)
    applied = applied or {}
    check_flag("absorb_multipliers", absorb_multipliers)
    placed = prepared(model, rules, prescription, base)
    factors = [factor for reader in READERS for factor in reader(model)]  # what modules hold
    attention_of = {query: factor for factor in factors for query in factor.queries}
    if "attention_scale" in applied:  # then none lacks it
        attention_of = {}
    rows = []
    for assignment, local in placed:  # `local`: the prescription at the tensor's size
        numbers = local(assignment.role, *assignment.fans)
        scale = assignment.scale
        if assignment.role is Role.QUERY and assignment.name in attention_of:
            # Initial queries carry the factor that their attention lacks.
            scale *= prescription.attention_scale(attention_of[assignment.name].head_dim or 1)
        numbers = numbers.starting_at(scale)
        wd = weight_decay * numbers.decay
        if absorb_multipliers:
            absorbed = numbers.absorbed(numbers.optimizer or prescription.optimizer)
            if decay_mode == "per_group":  # the rate before absorption decides
                wd *= numbers.lr / absorbed.lr
            numbers = absorbed
        kind = numbers.optimizer or prescription.optimizer
        rows.append(_row(assignment, numbers, kind, lr, eps, wd, decay_mode))
    rows = _spared(rows, no_decay, weight_decay, decay_mode)
    roles = {row.role for row in rows}
    forward = settle_factors(model, roles, prescription, applied, head_dim, factors)
    origin = prescription.describe()
    return Plan(tuple(rows), origin, lr, eps, weight_decay, decay_mode, forward)


def _global_numbers(
    lr: float, eps: float, weight_decay: float, decay_mode: str | None
) -> tuple[float, float, float, str]:
    """The global numbers as Python's own; refuses what is none, and a decay without its mode, as
    its two readings differ by the rate."""
    for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
        if not (finite(value) and value >= 0):
            raise PlanError(f"{name} must be finite and not negative, got {value!r}")
    if decay_mode is None and weight_decay:
        raise PlanError(
            f"weight_decay {weight_decay:g} needs a decay_mode: 'independent' removes "
            f"{100 * weight_decay:.4g} % of every tensor per step, 'per_group', torch's meaning, "
            f"{100 * weight_decay * lr:.4g} % at this rate; 'global' is that of Dinan et al. (1.94)"
        )
    mode = choose("decay mode", decay_mode or "independent", DECAY_MODES)
    return python_number(lr), python_number(eps), python_number(weight_decay), mode


def _spared(
    rows: list[Row], no_decay: Iterable[str], weight_decay: float, decay_mode: str
) -> list[Row]:
    """The rows without decay where `no_decay` says so; refuses a decay of a whole tensor a step."""
    spared = named_by(rows, no_decay, "no_decay", roles={*map(str, Role)})
    rows = [replace(row, weight_decay=0.0) if row.name in spared else row for row in rows]
    for row in rows:
        if not math.isfinite(row.lr):
            raise PlanError(f"{row.name!r} gets the rate {row.lr:g}; lower lr")
        if row.decay_per_step >= 1:
            raise PlanError(
                f"weight_decay {weight_decay:g} removes {row.decay_per_step:.3g} times "
                f"{row.name!r} in a step, which must be below 1: with decay_mode {decay_mode!r} "
                f"that fraction is {DECAY_MODES[decay_mode]}"
            )
    return rows


def _row(
    assignment: Assignment,
    numbers: Numbers,
    optimizer: str,
    lr: float,
    eps: float,
    wd: float,
    decay_mode: str,
) -> Row:
    fan_in, fan_out = assignment.fans
    if optimizer == "muon" and (assignment.tied_to or assignment.parameter.ndim != 2):
        why = f"tied to {assignment.tied_to[0]}" if assignment.tied_to else "no matrix"
        raise PlanError(
            f"{assignment.name!r} ({assignment.role}) is {why}, and Muon's rate is that of a "
            "matrix with one place in the model: train this model with Everett's rules for Adam"
        )
    own_lr = lr * numbers.lr
    return Row(
        name=assignment.name,
        shape=tuple(assignment.parameter.shape),
        role=str(assignment.role),
        fan_in=fan_in,
        fan_out=fan_out,
        tied_to=assignment.tied_to,
        init_mean=numbers.init_mean,
        init_std=numbers.init_std,
        init_distribution=numbers.init_distribution,
        multiplier=numbers.multiplier,
        lr=own_lr,
        eps=eps * numbers.eps,
        weight_decay=_torch_decay(wd, lr, own_lr, decay_mode),
        optimizer=optimizer,
    )


def _torch_decay(wd: float, lr: float, own_lr: float, decay_mode: str) -> float:
    """The group's weight_decay whose product with its own rate is the decay the mode asks for."""
    if wd == 0 or decay_mode == "per_group":
        return wd
    if own_lr == 0:
        raise PlanError(f"{decay_mode} weight decay needs a learning rate above 0")
    return wd / own_lr if decay_mode == "independent" else wd * (lr / own_lr)


def dumps(value: Plan) -> str:
    """A plan as JSON text."""
    return json.dumps(value.to_dict(), indent=1)
