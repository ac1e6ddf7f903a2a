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
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, SupportsIndex

from param_groups.families import AVERAGES
from param_groups.prescription import Momenta, Prescription, Tensor, checked, numbers_of, summary
from param_groups.quantities import (
    DECAY_MODES,
    DISTRIBUTIONS,
    KEPT,
    Asked,
    check_averages,
    check_flag,
)
from param_groups.roles import Fans, PlanError, Role, Rule, check_model
from param_groups.rows import Factor, Row, check_saved, listed, named_by, spared, table, unwrapped

if TYPE_CHECKING:  # torch is imported with the first plan, so that the exact tables answer at once
    from torch import nn

    from param_groups.optim import MuonAdamW


# What the tensors of a torch group have in common.
_SHARED = ("lr", "eps", "weight_decay", "optimizer", "parts", "layout")


@dataclass(frozen=True, repr=False)
class Plan:
    """A prescription applied to one model: its rows and their origin. `plan` makes it.

    Args:
        rows: the numbers of every tensor, in the model's order; `numbers[name]` is one of them.
        prescription: the rule's fields, as it describes itself.
        lr, eps, weight_decay, decay_mode: the global values, as given to `plan`.
        forward: the factors that the prescription gives the forward pass.
        betas, momentum: of its optimisers, where the prescription sets them.

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
    betas: tuple[float, float] | None = None
    momentum: float | None = None

    def __post_init__(self) -> None:
        check_averages("plan", self.betas, self.momentum)
        if isinstance(self.betas, list):  # as JSON has it
            object.__setattr__(self, "betas", tuple(self.betas))

    def __repr__(self) -> str:
        return self.table()

    def _repr_html_(self) -> str:
        return unwrapped(self.table())

    def __getitem__(self, name: str) -> Row:
        """The row of a tensor, by any of its names; KeyError if there is none."""
        for row in self.rows:
            if name == row.name or name in row.tied_to:
                return row
        raise KeyError(name)

    def initialise(
        self, model: nn.Module, seed: int, *, keep: Iterable[str] = (), overwrite: bool = False
    ) -> None:
        """Draws the tensors, sets the multipliers of their layers and the forward factors.

        Tensors that do not require gradients keep their values, as do those that a pattern of
        `keep` names ("backbone.*"); their layers' multipliers are set all the same. The others'
        values depend on (seed, name) alone, drawn in float32 on the CPU: the same on every device,
        in every precision, sharded or not, and untouched by tensors added elsewhere. Twice is the
        same as once. An error leaves the model as it was.

        Raises PlanError where values are those of a checkpoint or of training, as far as a model
        shows it, unless `overwrite` says that they may go: `apply_multipliers` keeps them.
        """
        from param_groups.model import values

        parameters = self._parameters(model)
        kept = named_by(self.rows, keep)
        kept |= {row.name for row in self.rows if row.init_distribution == KEPT}
        frozen = {name for name, p in parameters.items() if not p.requires_grad} - kept
        drawn = [row for row in self.rows if row.name not in kept | frozen]
        check_flag("overwrite", overwrite)
        if isinstance(seed, bool) or not isinstance(seed, SupportsIndex):  # as numpy's are
            raise PlanError(f"seed is an integer, got {seed!r}")
        if not overwrite:
            values.check_fresh(model, drawn, whole=not (kept or frozen))
        for row in drawn:
            values.check_drawable(row, parameters[row.name], overwrite)
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
        from param_groups.model import forward, values

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
        `optimizer`; `betas` or `momentum` where the prescription sets them; `parts` and `layout`
        where Muon trains matrices of a tensor one by one. Tensors that do not require gradients are
        left out. Raises PlanError for Muon's plan, whose groups are for two optimisers, unless
        `several` says that yours tells them apart (`optimizers`); and unless `check` is false, for
        a model that this plan has neither initialised nor given its multipliers, and for a tensor
        that was frozen when it was initialised and no longer is. Not for torch.optim.Adafactor,
        which takes a pair as epsilon.
        """
        from param_groups.model import values

        parameters = self._parameters(model)
        kinds = sorted({row.optimizer for row in self.rows})
        if len(kinds) > 1 and not several:
            raise PlanError(
                f"the plan's rates are for {' and '.join(kinds)}, and one optimiser would take "
                "them all: use plan.optimizers(model)"
            )
        if check:
            values.check_given(model, self.rows, self.forward)
        groups: dict[tuple[Any, ...], list[Row]] = {}
        for row in self.rows:
            if parameters[row.name].requires_grad:
                groups.setdefault(tuple(vars(row)[key] for key in _SHARED), []).append(row)
        return [
            {
                "name": "+".join(dict.fromkeys(row.role for row in rows)),
                "params": [parameters[row.name] for row in rows],
                "param_names": [row.name for row in rows],
                "initial_lr": rows[0].lr,
                **{key: n for key, n in zip(_SHARED, numbers, strict=True) if n not in ((), "")},
                **{
                    key: average
                    for key, average in self._set.items()
                    if key in AVERAGES.get(rows[0].optimizer, ())
                },
            }
            for numbers, rows in groups.items()
        ]

    def optimizers(
        self,
        model: nn.Module,
        *,
        betas: tuple[float, float] | None = None,
        momentum: float | None = None,
        check: bool = True,
    ) -> MuonAdamW:
        """Muon for the plan's hidden matrices and AdamW for the rest, as one torch optimiser.

        Args:
            model: the model that the plan has initialised, or given its multipliers.
            betas: AdamW's, by default the plan's, or (0.9, 0.95).
            momentum: Muon's, with Nesterov's step; by default the plan's, or 0.95.
            check: as in `groups`.

        Returns:
            An optimiser over `groups`: one list of groups for one scheduler and one checkpoint.

        Raises:
            PlanError: as `groups`, for a plan of another optimiser than Muon and Adam, and for
                betas or a momentum beside the plan's.

        Source: Jordan et al. 2024, Muon.
        """
        from param_groups.optim import MuonAdamW

        if others := sorted({row.optimizer for row in self.rows} - {"muon", "adam"}):
            raise PlanError(f"the plan is for {others[0]}; plan.optimizers has Muon and AdamW")
        asked = {"betas": betas, "momentum": momentum}
        for key, value in self._set.items():
            if asked[key] not in (None, value):
                raise PlanError(f"{key}={asked[key]} beside the plan's {value}; leave one out")
        groups = self.groups(model, check=check, several=True)
        return MuonAdamW(
            groups, betas=betas or (0.9, 0.95), momentum=0.95 if momentum is None else momentum
        )

    @property
    def _set(self) -> dict[str, object]:
        """Betas and momentum, where the prescription sets them."""
        both = {"betas": self.betas, "momentum": self.momentum}
        return {key: value for key, value in both.items() if value is not None}

    def exported(self) -> list[dict[str, Any]]:
        """Names and numbers for a trainer that builds torch's AdamW and Muon itself, a group each.

        Keys are "names", "optimizer" ("adam" or "muon"), "lr", "weight_decay" and, for AdamW,
        "eps". torch.optim.Muon, and torchtitan's DistMuon like it, multiply a rate by
        sqrt(max(1, rows / columns)) and decay by the rate before: here the rate is over that factor
        and the decay times it, so that steps and decays are the plan's. Frozen tensors are among
        the names.

        Raises PlanError for tensors that a Muon of theirs would orthogonalise as one matrix, or
        refuse: several matrices, stacks, kernels; and for a plan of another optimiser.
        """
        groups: dict[tuple[Any, ...], dict[str, Any]] = {}
        for row in self.rows:
            if row.optimizer not in ("adam", "muon"):
                raise PlanError(f"{row.name!r} is for {row.optimizer}; exported has Muon and AdamW")
            numbers = {"lr": row.lr, "weight_decay": row.weight_decay}
            if row.optimizer == "adam":
                numbers["eps"] = row.eps
            elif row.layout:
                raise PlanError(
                    f"{row.name!r} {row.shape} holds several matrices or a kernel, which another "
                    "Muon than plan.optimizers(model) takes as one or not at all: train with that, "
                    "or with separate matrices"
                )
            else:
                factor = math.sqrt(max(1.0, row.shape[0] / row.shape[1]))
                numbers = {"lr": row.lr / factor, "weight_decay": row.weight_decay * factor}
            key = (row.optimizer, *numbers.values())
            group = groups.setdefault(key, {"names": [], "optimizer": row.optimizer, **numbers})
            group["names"].append(row.name)
        return [*groups.values()]

    def to_dict(self) -> dict[str, object]:
        """The plan as JSON types; betas and momentum where they are set."""
        fields = {key: value for key, value in asdict(self).items() if key not in Momenta._fields}
        return {**fields, **self._set, "rows": [asdict(row) for row in self.rows]}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Plan:
        """The inverse of `to_dict`; PlanError when a field is missing, unknown or no such value,
        and when a tensor has two rows."""
        try:
            rows = tuple(
                Row(
                    **{
                        **row,
                        **{key: listed(row[key]) for key in ("shape", "tied_to")},
                        "parts": tuple(map(listed, listed(row.get("parts", ())))),
                    }
                )
                for row in listed(data["rows"])
            )
            factors = tuple(Factor(**factor) for factor in listed(data["forward"]))
            found = cls(**{**data, "rows": rows, "forward": factors})
            check_saved(found, decay_mode=DECAY_MODES)
            words = {"role": [*Role], "init_distribution": DISTRIBUTIONS, "optimizer": AVERAGES}
            for row in rows:
                check_saved(row, f"{row.name}: ", **words)
            for factor in factors:
                check_saved(factor, f"{factor.name}: ")
        except PlanError:
            raise
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise PlanError(f"not a saved plan: {error}") from None
        if not rows:
            raise PlanError("not a saved plan: it has no rows")
        count = Counter(name for row in rows for name in (row.name, *row.tied_to))
        if twice := [name for name, number in count.items() if number > 1]:
            raise PlanError(f"not a saved plan: {twice[0]!r} has two rows")
        return found

    def differences(self, other: Plan) -> list[str]:
        """What another plan has changed, one line each ("name: lr 0.1 -> 0.2"); empty if equal.

        Rows, forward factors, betas and momentum are compared: plans with the same numbers are
        equal, whichever rule made them.
        """
        mine, theirs = ({row.name for row in plan.rows} for plan in (self, other))
        lines = [f"{name}: only in the first plan" for name in mine - theirs]
        lines += [f"{name}: only in the second plan" for name in theirs - mine]
        here, there = (plan._numbers(mine & theirs) for plan in (self, other))
        for what in here.keys() | there.keys():
            if here.get(what) != there.get(what):
                lines.append(f"{what} {here.get(what)} -> {there.get(what)}")
        return sorted(lines)

    def _numbers(self, names: Set[str]) -> dict[str, object]:
        """By what they are: those of the tensors of these names, forward factors, averages."""
        rows = [(row.name, vars(row)) for row in self.rows if row.name in names]
        return {
            **{f"{name}: {key}": value for name, of in rows for key, value in of.items()},
            **{f"forward pass: {f.name}{f.of_heads}": f.value for f in self.forward},
            **{f"{key}:": value for key, value in self._set.items()},
        }

    def table(self) -> str:
        """The plan for people: rows that differ only in their block number are one line."""
        decays = sorted({row.decay_per_step for row in self.rows if row.decay_per_step})
        shares = [f"{100 * share:.4g} %" for share in dict.fromkeys((*decays[:1], *decays[-1:]))]
        decay = f"{' to '.join(shares)} per step ({self.decay_mode})" if shares else "none"
        title = f"lr {self.lr:g}, eps {self.eps:g}, decay {decay}; {summary(self.prescription)}"
        kinds = dict.fromkeys(row.optimizer for row in self.rows)
        averages = [
            f"{key} {', '.join(f'{one:.6g}' for one in value)} of {kind}"
            for key, value in (("betas", self.betas or ()), ("momentum", (self.momentum,)))
            for kind in kinds
            if key in self._set and key in AVERAGES.get(kind, ())
        ]
        title += "\n" + "; ".join(averages) if averages else ""
        if self.forward:
            title += "\nforward pass: " + ", ".join(map(str, self.forward))
        if self.head_dim_is_missing():
            title += (
                "\nattention: the head dimension is not known, and qk_exponent=-0.5 is muP's only "
                "where it is the same at all widths: plan with head_dim="
            )
        return title + "\n" + table(self.rows)

    def head_dim_is_missing(self) -> bool:
        """Whether rates assume one head dimension at all widths (muP with the library's attention),
        and neither the model nor `head_dim` says it."""
        rule: Any = self.prescription
        while isinstance(rule.get("rule"), Mapping):  # of one around it
            rule = rule["rule"]
        attends = {Role.QUERY, Role.QKV} & {row.role for row in self.rows}
        known = any(factor.head_dim for factor in self.forward)
        grows = rule.get("parameterization", "standard") in ("mup", "mean_field")
        return bool(attends) and grows and rule.get("qk_exponent") == -0.5 and not known

    def _parameters(self, model: nn.Module) -> dict[str, nn.Parameter]:
        from torch.nn import Parameter

        check_model(model)
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
            if not isinstance(parameters[row.name], Parameter):
                raise PlanError(f"{row.name!r} is no nn.Parameter any more; assign one")
        return parameters


def plan(
    model: nn.Module,
    rules: Sequence[Rule],
    prescription: Prescription,
    *,
    lr: float,
    eps: float | None = None,
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
        lr, eps: the global values that the prescription's factors multiply; eps is by default 1e-8,
            and 1e-30 for Adafactor, which adds it to g^2.
        weight_decay: see `decay_mode`.
        decay_mode: what a decay means, a name of DECAY_MODES; has to be given with one.
        absorb_multipliers: move forward multipliers into initial values, rate and epsilon. The
            model trains the same, decay included, without a change of its code. Clipping by the
            gradient's norm is the exception: the norm is another one.
        applied: {"attention_scale": 1 / 16}, forward factors that the model's own code applies.
        head_dim: of attentions that do not say theirs.
        base: the same model at its base size, or its `fans_of`, for models of several widths
            (stages, encoder and decoder, few heads for keys): each tensor's fans over those of the
            base decide, not the prescription's width. The prescription's own base width stays the
            base model's: multipliers, initial values and absorbed rates depend on it.
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
    from param_groups.model.forward import forward_pass
    from param_groups.model.read import read
    from param_groups.model.values import note_versions

    optimizer = checked(prescription).optimizer
    asked = Asked.of(lr, eps, weight_decay, decay_mode, absorb_multipliers, optimizer)
    tensors = read(model, rules, prescription, base)
    forward = forward_pass(model, tensors, prescription, applied, head_dim)
    rows = [_row(tensor, prescription, forward.starts, asked) for tensor in tensors]
    note_versions(model)
    origin = prescription.describe()
    kept = spared(rows, no_decay, asked)
    return Plan(kept, origin, *asked.globals, forward.factors, *prescription.momenta)


def _row(
    tensor: Tensor, prescription: Prescription, starts: Mapping[str, float], asked: Asked
) -> Row:
    """One tensor's numbers times the global ones; with multipliers absorbed, if that is asked."""
    numbers = numbers_of(prescription, tensor, asked)
    numbers = numbers.starting_at(tensor.scale * starts.get(tensor.name, 1.0))
    if tensor.keep:
        numbers = replace(numbers, init_mean=0.0, init_std=0.0, init_distribution=KEPT)
    optimizer = numbers.optimizer or prescription.optimizer
    final = numbers.absorbed(optimizer) if asked.absorb else numbers
    flat = len(tensor.shape) == 2
    own, before = asked.lr * final.lr, numbers.lr / final.lr if final.lr else 1.0
    return Row(
        name=tensor.name,
        shape=tensor.shape,
        role=str(tensor.role),
        fan_in=tensor.fan_in,
        fan_out=tensor.fan_out,
        tied_to=tensor.tied_to,
        init_mean=final.init_mean,
        init_std=final.init_std,
        init_distribution=final.init_distribution,
        multiplier=final.multiplier,
        lr=own,
        eps=asked.eps * final.eps,
        weight_decay=asked.torch_decay(final.decay, own, before),
        optimizer=optimizer,
        parts=final.parts,
        layout=str(tensor.layout) if final.parts or (optimizer == "muon" and not flat) else "",
    )


def dumps(value: Plan) -> str:
    """A plan as JSON text."""
    return json.dumps(value.to_dict(), indent=1)
