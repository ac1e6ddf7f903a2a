"""Theory and networks compared: one row per quantity, block and width, with ratio and z-score.

Two numbers stand for a kernel. "diagonal" is the mean over its diagonal; its standard error comes
from the networks' own means. "rest" is the part of the off-diagonal entries along the predicted
ones, sum(predicted measured) / |predicted|, compared with |predicted|: a ratio of 1 where theory
holds, with the error of the networks' own sums. Every entry stands in the JSON results.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from effective_theory.dinan import kernels, measure, tangent
from effective_theory.dinan.config import Config
from effective_theory.dinan.inputs import inputs
from effective_theory.dinan.observation import Directions

# What the two numbers are called; a kernel of one entry has no rest.
DIAGONAL, REST = "diagonal", "rest"
# Relative tolerances at widths >= 512 and >= 300 networks, for mean diagonals: the corrections of
# attention are of order H/n, and those of its queries and keys the largest.
TOLERANCES = {"G": 0.01, "theta": 0.02}
QUERY_KEY_TOLERANCE = 0.05
TOLERANCE_WIDTH, TOLERANCE_NETWORKS = 512, 300
_FIXED = 1e-6  # relative error below which networks do not differ


@dataclass(frozen=True)
class Comparison:
    """One number, predicted and measured."""

    stem: str
    width: float
    """n; infinity for the extrapolation in 1/n."""
    heads: int
    networks: int
    quantity: str
    """G, F, theta (the tangent kernel) or gradient (its root mean square per tensor)."""
    block: str
    part: str
    """theta: "total" or a group of parameters; gradient: a tensor; otherwise empty."""
    entry: str
    predicted: float
    predicted_error: float
    """From the draws of the attention products; NaN where it is not known."""
    measured: float
    error: float

    @property
    def ratio(self) -> float:
        """measured / predicted; NaN for a prediction of 0."""
        return self.measured / self.predicted if self.predicted else math.nan

    @property
    def z(self) -> float:
        """(measured - predicted) / standard error, both errors in quadrature.

        NaN for numbers that are the same in all networks up to rounding and norm_eps, such as the
        diagonal of F: there only the ratio says something.
        """
        own = 0.0 if math.isnan(self.predicted_error) else self.predicted_error
        spread = math.hypot(self.error, own)
        fixed = spread <= _FIXED * abs(self.predicted)
        return math.nan if fixed else (self.measured - self.predicted) / spread

    @property
    def tolerance(self) -> float | None:
        """How far the ratio may be from 1 here; None where nothing is promised."""
        enough = self.width >= TOLERANCE_WIDTH and self.networks >= TOLERANCE_NETWORKS
        if self.entry != DIAGONAL or not enough or not math.isfinite(self.width):
            return None
        if self.quantity == "theta" and self.part in ("query", "key"):
            return QUERY_KEY_TOLERANCE
        return TOLERANCES.get(self.quantity)

    @property
    def met(self) -> bool | None:
        """Whether the ratio lies within the tolerance, and 0 is 0; None without a tolerance."""
        if self.tolerance is None:
            return None
        return abs(self.measured - self.predicted) <= self.tolerance * abs(self.predicted)

    def to_dict(self) -> dict[str, Any]:
        """Columns of the table; ratio, z and the verdict included."""
        return asdict(self) | {"ratio": self.ratio, "z": self.z, "met": self.met}


@dataclass(frozen=True)
class Result:
    """One config's theory, measurements and comparisons."""

    config: Config
    theory: kernels.Kernels
    tangent: tangent.Tangent
    measured: list[measure.Measured]
    limit: measure.Limit | None
    rows: list[Comparison]


def compare(
    config: Config, processes: int = 1, progress: Callable[[int, int], None] | None = None
) -> Result:
    """Predicts, measures and compares at every width, then at infinite width if there are two.

    With three widths or more the extrapolation is that of the three largest, linear in 1/n.
    """
    config.check_measurement()
    x = inputs(config)
    theory = kernels.forward(config, x)
    derived = tangent.tangent(config, x, theory)
    along = directions(theory, derived)
    measured = measure.measure_widths(config, processes, progress, along)
    rows: list[Comparison] = []
    for part in measured:
        width = {"width": part.width}
        own = config.model_copy(update={"model": config.model.model_copy(update=width)})
        scaled = kernels.at_width(config, theory, part.width)
        rows += _rows(own, scaled, tangent.at_width(config, derived, part.width), part, part.count)
    largest = sorted(measured, key=lambda part: part.width)[-3:]
    limit = measure.limit(largest, config.model.s) if len(largest) > 1 else None
    if limit is not None:
        rows += _rows(config, theory, derived, limit, sum(part.count for part in largest))
    return Result(config, theory, derived, measured, limit, rows)


def directions(theory: kernels.Kernels, derived: tangent.Tangent) -> Directions:
    """Unit matrices along the predicted off-diagonal entries, by kernel; none where they are 0."""
    tensors = {
        (quantity, block, part): kernel
        for quantity, block, part, kernel, _ in _predictions(theory, derived)
    }
    rests = {key: kernel - kernel.diagonal().diag() for key, kernel in tensors.items()}
    return {
        tuple(name for name in key if name): rest / rest.norm()
        for key, rest in rests.items()
        if rest.norm() > 0
    }


def _predictions(
    theory: kernels.Kernels, derived: tangent.Tangent
) -> Iterator[tuple[str, str, str, Tensor, Tensor | None]]:
    """Quantity, block, part, kernel and its error, block by block."""
    for block in theory.blocks:
        yield "G", block, "", theory.G[block], theory.G_se[block]
        if block in theory.F:
            yield "F", block, "", theory.F[block], None
        yield "theta", block, "total", derived.theta[block], derived.theta_se[block]
        for group, kernel in derived.groups(block).items():
            yield "theta", block, group, kernel, None


def _rows(
    config: Config,
    theory: kernels.Kernels,
    derived: tangent.Tangent,
    sampled: measure.Measured | measure.Limit,
    networks: int,
) -> Iterator[Comparison]:
    """Theory and networks at one width, or at infinite width: two rows per kernel, one per
    gradient; none for what has no limit at infinite width."""
    mean, se = sampled.mean, sampled.se
    width = sampled.width if isinstance(sampled, measure.Measured) else math.inf

    def row(quantity: str, block: str, part: str, entry: str, *numbers: Any) -> Comparison:
        where = (config.model.stem, width, config.model.heads, networks)
        return Comparison(*where, quantity, block, part, entry, *map(float, numbers))

    for quantity, block, part, kernel, error in _predictions(theory, derived):
        key, name = (quantity, block, part) if part else (quantity, block), (quantity, block, part)
        unknown = torch.full_like(kernel, math.nan) if error is None else error
        if key in mean.diagonals:
            predicted = kernel.diagonal().mean(), unknown.diagonal().max()
            yield row(*name, DIAGONAL, *predicted, mean.diagonals[key], se.diagonals[key])
        if key in mean.diagonals and key in mean.rests:
            apart = ~torch.eye(len(kernel), dtype=torch.bool)
            predicted = kernel[apart].norm(), unknown[apart].norm()
            yield row(*name, REST, *predicted, mean.rests[key], se.rests[key])
    if mean.magnitudes:  # which go as powers of the width
        for tensor, size in tangent.magnitudes(config, derived).items():
            measured = mean.magnitudes[tensor], se.magnitudes[tensor]
            yield row("gradient", "head", tensor, DIAGONAL, size, math.nan, *measured)


def as_json(result: Result) -> dict[str, Any]:
    """Every entry: {"rows", "theory", "measured": {width: {"networks", "mean", "error"}}, "limit"}.

    Kernels are nested lists, (P, P) over (sample, token), samples first, by quantity, block and,
    for theta and groups, tensor or group. The theory is that of model.width, which matters at s > 0
    only: there the head's G goes as n^-s and Theta before the head as n^s.
    """

    def lists(value: Any) -> Any:
        if isinstance(value, dict):
            named = {k if isinstance(k, str) else "/".join(k): v for k, v in value.items()}
            return {key: lists(item) for key, item in named.items()}
        return value.tolist()

    def both(kernels: measure.Measured | measure.Limit) -> dict[str, Any]:
        return {"mean": lists(vars(kernels.mean)), "error": lists(vars(kernels.se))}

    theory = {
        "width": torch.tensor(result.config.model.width),
        "G": result.theory.G,
        "F": result.theory.F,
        "theta": {
            block: {**parts, "total": result.tangent.theta[block]}
            for block, parts in result.tangent.parts.items()
        },
    }
    return {
        "rows": [row.to_dict() for row in result.rows],
        "theory": lists(theory),
        "measured": {str(p.width): {"networks": p.count, **both(p)} for p in result.measured},
        "limit": None if result.limit is None else both(result.limit),
    }


def table(rows: Sequence[Comparison]) -> str:
    """What a reader looks at: diagonals of G and of the head's tangent kernel, by width."""
    lines = [
        f"{'stem':<9}{'n':>6}{'networks':>9}  {'quantity':<26}{'predicted':>11}{'measured':>11}"
        f"{'error':>10}{'ratio':>8}{'z':>7}  tolerance"
    ]
    for row in rows:
        head = row.quantity == "theta" and row.block == "head"
        if row.entry != DIAGONAL or not (row.quantity == "G" or head):
            continue
        name = f"G {row.block}" if row.quantity == "G" else f"Theta {row.part}"
        met = "" if row.met is None else f"{row.tolerance:.0%} {'met' if row.met else 'MISSED'}"
        line = (
            f"{row.stem:<9}{f'{row.width:g}':>6}{row.networks:>9}  {name:<26}{row.predicted:>11.5f}"
            f"{row.measured:>11.5f}{row.error:>10.5f}{row.ratio:>8.4f}{row.z:>7.1f}  {met}"
        )
        lines.append(line.rstrip())
    return "\n".join(lines)
