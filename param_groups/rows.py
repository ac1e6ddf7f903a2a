"""The rows of a plan as data: what one tensor and one forward factor get, compared and printed."""

from __future__ import annotations

import fnmatch
import html
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from param_groups.quantities import CONSTANT, DECAY_MODES, KEPT, Asked, finite
from param_groups.roles import Layout, PlanError, Role, choose

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Row:
    """The numbers of one tensor, as `plan` gives them.

    Args:
        name: in the model; `tied_to` lists its other names.
        shape: the tensor's; `fan_in` and `fan_out` are inputs and outputs of one unit.
        role: what the tensor does, a name of `Role`.
        init_mean, init_std, init_distribution: of the initial values.
        multiplier: what the tensor's layer multiplies by.
        lr, eps: absolute, at the schedule's peak.
        weight_decay: AdamW's, decoupled: a step multiplies the tensor by 1 - lr * weight_decay.
        optimizer: the one whose rate it is.
        parts: of a tensor whose matrices Muon trains one by one, (outputs, rate over `lr`) of each.
        layout: how Muon reads the axes of such a tensor, and of a stack or a kernel; else "".
    """

    name: str
    shape: tuple[int, ...]
    role: str
    fan_in: int
    fan_out: int
    tied_to: tuple[str, ...]
    init_mean: float
    init_std: float
    init_distribution: str
    multiplier: float
    lr: float
    eps: float
    weight_decay: float
    optimizer: str
    parts: tuple[tuple[int, float], ...] = ()
    layout: str = ""

    @property
    def decay_per_step(self) -> float:
        """The fraction a step removes from the tensor at the peak of the schedule."""
        return self.lr * self.weight_decay


@dataclass(frozen=True)
class Factor:
    """A factor of the forward pass.

    Args:
        name: "attention_scale", "residual_multiplier" or "logit_multiplier".
        value: what is multiplied by.
        head_dim: an attention's head dimension.

    >>> print(Factor("attention_scale", 0.125, 64))
    attention_scale 0.125 (head dimension 64)
    """

    name: str
    value: float
    head_dim: int | None = None

    def __str__(self) -> str:
        return f"{self.name} {self.value:.6g}{self.of_heads}"

    @property
    def of_heads(self) -> str:
        """Its head dimension, in words."""
        return "" if self.head_dim is None else f" (head dimension {self.head_dim})"


@dataclass(frozen=True)
class Held:
    """A factor of the forward pass that a module of a library has, as `READERS` find them.

    `name` is the attribute ("" if there is none), `factor` what it is, `value` None if it cannot be
    read. `queries` are tensors whose initial values carry the factor in its place. `assumed` values
    are a convention and not a reading. `grows`: of an attention whose head dimension grows with the
    width, at a size that need not be this model's.
    """

    path: str
    kind: str
    name: str
    factor: str
    value: float | None
    head_dim: int | None = None
    hint: str = ""
    queries: tuple[str, ...] = ()
    assumed: bool = False
    grows: bool = False


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _number(value: object) -> bool:  # that torch takes, and float32 has
    return finite(value) and abs(value) < (2.0**128 if isinstance(value, float) else 2**53)


# What a field of a saved plan, row or factor holds, in words and as a test.
_FIELDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    **dict.fromkeys(
        ("name", "role", "optimizer", "init_distribution", "decay_mode"),
        ("a name", lambda value: isinstance(value, str) and value != ""),
    ),
    **dict.fromkeys(("fan_in", "fan_out"), ("a whole number", _whole)),
    "shape": ("whole numbers", lambda value: all(map(_whole, value))),
    "tied_to": ("names", lambda value: all(isinstance(name, str) for name in value)),
    **dict.fromkeys(("init_mean", "multiplier", "value"), ("a finite number", _number)),
    **dict.fromkeys(
        ("init_std", "lr", "eps", "weight_decay"),
        ("a finite number of at least 0", lambda value: _number(value) and value >= 0),
    ),
    "layout": ("a layout, or nothing", lambda value: value in ("", *Layout)),
    "parts": (
        "pairs of outputs and a factor",
        lambda value: all(
            len(pair) == 2 and _whole(pair[0]) and _number(pair[1]) and pair[1] >= 0
            for pair in value
        ),
    ),
    "head_dim": ("a whole number or null", lambda value: value is None or _whole(value)),
    "prescription": ("a mapping", lambda value: isinstance(value, dict)),
}


def listed(value: object) -> tuple[Any, ...]:
    """A list of a saved plan; ValueError for text and mappings, of which Python makes some, too."""
    if isinstance(value, (list, tuple)):
        return tuple(value)
    raise ValueError(f"{repr(value)[:80]} is no list")


def check_saved(record: Any, of: str = "", **known: Iterable[str]) -> None:
    """PlanError for a field of a saved plan, row or factor that holds no such value, and for one
    that is none of those `known`; `of` is whose field it is, in words."""
    for one in fields(record):
        value = getattr(record, one.name)
        words, holds = _FIELDS.get(one.name, ("", lambda _: True))
        if not holds(value):
            shown = repr(value)[:80]
            raise PlanError(f"not a saved plan: {of}{one.name} is {shown}, expected {words}")
        if one.name in known:
            try:
                choose(one.name, value, known[one.name])
            except PlanError as error:
                raise PlanError(f"not a saved plan: {of}{error}") from None


# Functions from a model, and the paths of its modules that make queries, to the factors that its
# modules hold. param_groups.stock adds its own when the package is imported; add yours for a
# library that it does not know.
READERS: list[Callable[[nn.Module, Set[str]], Iterable[Held]]] = []


def named_by(
    rows: Sequence[Row], keep: Iterable[str], argument: str = "keep", roles: Set[str] = frozenset()
) -> set[str]:
    """The tensors that a pattern of `keep`, or of another `argument`, names; a word that is one of
    `roles` names all tensors of that role, if any.

    Raises PlanError for a pattern that names no tensor.
    """
    try:
        patterns = [keep] if isinstance(keep, str) else [*keep]
    except TypeError:
        patterns = [keep]  # type: ignore[list-item]  # which is no text either
    if not all(isinstance(pattern, str) for pattern in patterns):
        raise PlanError(f"{argument} is a list of patterns such as 'backbone.*', got {keep!r}")
    kept: set[str] = set()
    for pattern in patterns:
        named = {
            row.name
            for row in rows
            if (pattern in roles and row.role == pattern)
            or any(fnmatch.fnmatchcase(name, pattern) for name in (row.name, *row.tied_to))
        }
        if not named and pattern not in roles:
            also = ", and is no role such as 'norm_scale'" if roles else ""
            raise PlanError(f"{argument}={pattern!r} names no tensor of the plan{also}")
        kept |= named
    return kept


def spared(rows: list[Row], no_decay: Iterable[str], asked: Asked) -> tuple[Row, ...]:
    """The rows without decay where `no_decay` says so; refuses a decay of a whole tensor a step."""
    without = named_by(rows, no_decay, "no_decay", roles={*map(str, Role)})
    rows = [replace(row, weight_decay=0.0) if row.name in without else row for row in rows]
    for row in rows:
        if not math.isfinite(row.lr):
            raise PlanError(f"{row.name!r} gets the rate {row.lr:g}; lower lr")
        if not math.isfinite(row.eps):
            raise PlanError(f"{row.name!r} gets the epsilon {row.eps:g}; lower eps")
        if row.decay_per_step >= 1:
            raise PlanError(
                f"weight_decay {asked.weight_decay:g} removes {row.decay_per_step:.3g} times "
                f"{row.name!r} in a step, which must be below 1: with decay_mode "
                f"{asked.decay_mode!r} that fraction is {DECAY_MODES[asked.decay_mode]}"
            )
    return tuple(rows)


def table(rows: Sequence[Row]) -> str:
    """Rows for people: those that differ only in their block number are one line."""
    header = ("tensor", "role", "shape", "fan_in", "init", "multiplier", "lr", "eps", "decay/step")
    lines = Counter(map(_cells, rows))
    return align([header, *((_counted(name, n), *rest) for (name, *rest), n in lines.items())])


def _cells(row: Row) -> tuple[str, ...]:
    init = f"{row.init_distribution} {row.init_std:.4g}"
    if row.init_distribution == CONSTANT:
        init = f"constant {row.init_mean:.4g}"
    if row.init_distribution == KEPT:
        init = "kept as built"
    tied = f" (= {', '.join(row.tied_to)})" if row.tied_to else ""
    muon = " by Muon" if row.optimizer == "muon" else ""
    rates = Counter((size, f"{row.lr * factor:.4g}") for size, factor in row.parts)
    if rates:
        each = (f"{count} x {rate} ({size} outputs)" for (size, rate), count in rates.items())
        muon = f" by Muon: {', '.join(each)}"
    return (
        re.sub(r"\.\d+\.", ".*.", row.name) + tied,
        row.role,
        "x".join(map(str, row.shape)),
        str(row.fan_in),
        init,
        f"{row.multiplier:.4g}",
        f"{row.lr:.4g}{muon}",
        f"{row.eps:.3g}",
        f"{row.decay_per_step:.3g}",
    )


def _counted(name: str, count: int) -> str:
    return name if count == 1 else f"{name} ({count} tensors)"


def align(lines: Sequence[tuple[str, ...]]) -> str:
    """Rows of cells as text in columns."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def unwrapped(text: str) -> str:
    """A table for a notebook, whose lines scroll and do not wrap."""
    return f'<pre style="white-space: pre; overflow-x: auto">{html.escape(text)}</pre>'
