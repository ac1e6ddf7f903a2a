"""Stratos' linear bigram model: Table 2, the variances at initialization, as fitted exponents.

Stratos, "Scale-Invariant Parameterizations", (1): h_0 = x, h_{l+1} = d^(-a_l) W_l h_l for
l = 0..L+1, trained on one bigram (x, y) of a vocabulary of V words by cross-entropy; primes are
gradients of the loss. W_0 is d x V, W_{L+1} is V x d, the L hidden matrices are d x d, entries of
W_l are Gaussian with variance d^(-2 b_l). Of W_0 only the column of x is ever used, or has a
gradient (A.1 prints its variance as that of h'_l; it is that of h'_1), so W_0 is that column here.

Networks of width 4096 are cheap because only products of W_l with a few vectors are drawn, not
W_l itself (`GaussianMatrix`). This is exact in law and not an approximation, in training too: a
sign step adds a matrix of rank one.

Where the paper is read otherwise than it is printed:

* (5) has a wrong sign: Var(W'_l) goes as d^(L - [1 <= l <= L] - 2(...)), see `variance_exponents`.
* Table 2's h'_{L+2} is the variance about the mean 1/V - y; W'_{L+1} takes its second moment.
* With sigma_{L+1}^2 = 1 (rows 5 and 6) logits grow as sqrt(d) and the softmax saturates. Until its
  largest entry is alone, the variance of h'_{L+2} still rises, to (1 - 1/V)/V, and with it all
  gradients: a slope over finite widths that vanishes slowly, not an exponent.
* Lemma D.1's variance of activation gradients is exact only for d to infinity: h'_{l+1} depends on
  W_l through the softmax, which changes the variance by a factor 1 + O(1/d) (tested).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Annotated, Literal, Protocol

import numpy as np
import torch
from pydantic import Field, field_validator, model_validator
from torch import Tensor

from measure.fits import power_law
from param_groups.exponents import HALF, ZERO, Layer, Parameterization
from training.config import Count, PositiveFloat, PositiveInt, Section
from training.errors import UserError

WORD = 0  # the target y; words are exchangeable at initialization, so any would do
# A vector whose part outside of a span is smaller than this, relatively, counts as inside: it
# lies far above the rounding of the changes of activations that are asked for, and far below 1.
_SPANNED = 1e-9
_ROUNDING = 1e-12  # standard errors below it are those of sizes that all networks share
TOLERANCE = 0.07
JUDGED_SEEDS, JUDGED_WIDTH = 300, 512
_NUMBERS_AT_ONCE = 2**17  # entries of one vector over the networks of a batch: 1 MiB
_MEMORY = 4 * 2**30  # bytes that a config may ask for

Sizes = dict[str, Tensor]
Claim = Literal["prediction", "bound", "hypothetical"]


class BigramConfig(Section):
    """Random networks whose sizes are fitted as powers of the width d."""

    vocabulary: Annotated[int, Field(ge=2)] = 16
    """Words V. Exponents are those of d far above V: a sign step moves one logit of V by
    sqrt(d/V) of their RMS. Very few words make logits noisy: a network has only V."""
    hidden_layers: PositiveInt = 2
    """Hidden matrices L; two show every column of the tables."""
    widths: tuple[PositiveInt, ...] = (64, 128, 256, 512, 1024, 2048, 4096)
    """Widths d of the fits, at least two."""
    seeds: Annotated[int, Field(ge=2)] = 300
    """Networks per width; at least two, for errors."""
    steps: PositiveInt = 4
    """Steps of sign descent T."""
    learning_rate: PositiveFloat = 0.1
    """C of eta_l = C d^(-c_l), (11), where logits stay put (muP, mean-field, SP+readout and
    SP+emb/readout): large enough that four steps change activations by a sizeable part."""
    small_learning_rate: PositiveFloat = 0.002
    """C where a step moves logits by about C (L + 1) sqrt(d) (SP and NTK). Once they have moved
    by more than 1 the softmax saturates and gradients vanish, which is no power of d."""
    seed: Count = 0
    """Seed of the weights; every row of every table sees the same ones."""

    @field_validator("widths")
    @classmethod
    def _at_least_two(cls, widths: tuple[int, ...]) -> tuple[int, ...]:
        if len(set(widths)) < 2 or len(set(widths)) != len(widths):
            raise ValueError(
                f"widths {list(widths)}: expected at least two different widths, each once; "
                "an exponent is the slope of a line"
            )
        return tuple(sorted(widths))

    @model_validator(mode="after")
    def _fits_into_memory(self) -> BigramConfig:
        if self.memory > _MEMORY:
            fields = type(self).model_fields
            asked = {key: getattr(self, key) for key in fields if key in _OF_MEMORY}
            usual = {key: fields[key].default for key in asked}
            key = max(asked, key=lambda name: np.max(asked[name]) / np.max(usual[name]))
            value = list(asked[key]) if key == "widths" else asked[key]
            raise ValueError(
                f"{key} {value}: it would take {self.memory / 2**30:,.0f} GiB of memory, expected "
                f"at most {_MEMORY / 2**30:.0f}; lower {key}"
            )
        return self

    @property
    def memory(self) -> int:
        """Bytes of the vectors of a batch of networks in training, and of the sizes of all."""
        longest = max(*self.widths, self.vocabulary)
        passes, matrices = self.steps + 1, self.hidden_layers + 2
        # A pass asks a matrix for two products, and keeps vector and answer of each.
        vectors = 4 * passes * matrices * max(longest, _NUMBERS_AT_ONCE)
        sizes = 7 * passes * matrices * self.seeds * len(self.widths)
        return 8 * (vectors + sizes)


_OF_MEMORY = ("vocabulary", "hidden_layers", "widths", "seeds", "steps")


class Matrix(Protocol):
    """Matrices, one per network, known by their products with vectors, one per network."""

    def times(self, right: Tensor) -> Tensor:
        """W v: (networks, columns) -> (networks, rows)."""

    def transposed_times(self, left: Tensor) -> Tensor:
        """W^T u: (networks, rows) -> (networks, columns)."""


class GaussianMatrix:
    """Matrices of independent N(0, std^2) entries that are drawn as far as they are asked for.

    Given its products W Q and W^T P with orthonormal vectors, a Gaussian matrix is what these
    determine plus an independent copy projected off P and Q; so the product with a vector
    orthogonal to Q is P (W^T P)^T v plus fresh Gaussian noise off P. Answers are therefore exact
    in law, for vectors that depend on earlier answers too, and consistent with each other.
    """

    def __init__(
        self, networks: int, rows: int, columns: int, std: float, generator: torch.Generator
    ) -> None:
        self._right = _Span.empty(networks, columns, rows)
        self._left = _Span.empty(networks, rows, columns)
        self._std, self._generator = std, generator

    def times(self, right: Tensor) -> Tensor:
        """W v, (networks, rows)."""
        return self._ask(self._right, self._left, right)

    def transposed_times(self, left: Tensor) -> Tensor:
        """W^T u, (networks, columns)."""
        return self._ask(self._left, self._right, left)

    def _ask(self, own: _Span, other: _Span, vector: Tensor) -> Tensor:
        inside, direction, outside = own.split(vector)
        answer = _combine(own.answers, inside)
        if not outside.any():
            return answer
        shape = (len(vector), own.answers.shape[2])
        noise = torch.randn(shape, generator=self._generator, dtype=torch.float64) * self._std
        known = _coefficients(other.answers, direction)
        new = noise + _combine(other.basis, known - _coefficients(other.basis, noise))
        own.add(direction, torch.where(outside > 0, new, 0.0))
        return answer + outside * own.answers[:, -1]


@dataclass
class _Span:
    """Orthonormal vectors (networks, k, n) and the matrix's products with them."""

    basis: Tensor
    answers: Tensor

    @classmethod
    def empty(cls, networks: int, size: int, answer: int) -> _Span:
        zeros = torch.zeros(networks, 0, size + answer, dtype=torch.float64)
        return cls(zeros[:, :, :size], zeros[:, :, size:])

    def split(self, vector: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(coefficients, direction of the part outside, its length: 0 where there is none)."""
        inside = _coefficients(self.basis, vector)
        rest = vector - _combine(self.basis, inside)
        # Once more, or rounding leaves some of a nearly spanned vector inside.
        again = _coefficients(self.basis, rest)
        rest = rest - _combine(self.basis, again)
        length = rest.norm(dim=1, keepdim=True)
        length = torch.where(length > _SPANNED * vector.norm(dim=1, keepdim=True), length, 0.0)
        return inside + again, torch.where(length > 0, rest / length, 0.0), length

    def add(self, direction: Tensor, answer: Tensor) -> None:
        self.basis = torch.cat([self.basis, direction[:, None]], dim=1)
        self.answers = torch.cat([self.answers, answer[:, None]], dim=1)


def _coefficients(vectors: Tensor, vector: Tensor) -> Tensor:
    """Inner products: (networks, k, n), (networks, n) -> (networks, k)."""
    return torch.bmm(vectors, vector[:, :, None])[:, :, 0]


def _combine(vectors: Tensor, coefficients: Tensor) -> Tensor:
    """Linear combination: (networks, k, n), (networks, k) -> (networks, n)."""
    return torch.bmm(coefficients[:, None], vectors)[:, 0]


@dataclass(frozen=True)
class RankOne:
    """left right^T, one per network: a gradient of one bigram, or a sign step."""

    left: Tensor
    right: Tensor

    def times(self, right: Tensor) -> Tensor:
        """(left right^T) v."""
        return self.left * (self.right * right).sum(1, keepdim=True)

    def transposed_times(self, left: Tensor) -> Tensor:
        """(left right^T)^T u."""
        return self.right * (self.left * left).sum(1, keepdim=True)

    def mean_square(self) -> Tensor:
        """Mean over the entries, (networks,); the matrix itself is never formed."""
        return mean_square(self.left) * mean_square(self.right)


@dataclass(frozen=True)
class Sum:
    """A sum of matrices: the initial weights and the updates since."""

    terms: tuple[Matrix, ...]

    def times(self, right: Tensor) -> Tensor:
        """The sum times v."""
        return sum(term.times(right) for term in self.terms)

    def transposed_times(self, left: Tensor) -> Tensor:
        """The transposed sum times u."""
        return sum(term.transposed_times(left) for term in self.terms)

    def plus(self, term: Matrix) -> Sum:
        """The sum with one more term."""
        return Sum((*self.terms, term))


@dataclass(frozen=True)
class Model:
    """Networks of one width: (1), with h_l = RMSNorm(...) for l = 1..L+1 if `rms_norm` (A.1.3).

    `weights` are W_0..W_{L+1}, W_0 being d x 1, and `multipliers` their d^(-a_l).
    """

    weights: tuple[Sum, ...]
    multipliers: tuple[float, ...]
    rms_norm: bool = False


@dataclass(frozen=True)
class Pass:
    """A forward and a backward pass: `h`, h_0..h_{L+2}; `h_gradient`, h'_1..h'_{L+2} by l;
    `weight_gradient`, W'_0..W'_{L+1}. Vectors are (networks, size)."""

    h: tuple[Tensor, ...]
    h_gradient: Mapping[int, Tensor]
    weight_gradient: tuple[RankOne, ...]


def propagate(model: Model, networks: int) -> Pass:
    """One forward and one backward pass of the cross-entropy of (x, y), by hand: (1), (25)."""
    h, rms = _forward(model, networks)
    gradient = {len(model.weights): cross_entropy_gradient(h[-1])}
    weight_gradient = []
    for l in range(len(model.weights) - 1, -1, -1):
        before = gradient[l + 1]  # of h_{l+1}; the next two lines make it that of W_l h_l
        if l + 1 in rms:
            before = rms_norm_gradient(before, h[l + 1], rms[l + 1])
        before = model.multipliers[l] * before
        weight_gradient.append(RankOne(before, h[l]))
        if l > 0:
            gradient[l] = model.weights[l].transposed_times(before)
    return Pass(tuple(h), gradient, tuple(reversed(weight_gradient)))


def _forward(model: Model, networks: int) -> tuple[list[Tensor], dict[int, Tensor]]:
    """(h_0..h_{L+2}, the RMS that h_l was divided by)."""
    h, rms = [torch.ones(networks, 1, dtype=torch.float64)], {}
    for l, (weight, multiplier) in enumerate(zip(model.weights, model.multipliers, strict=True)):
        after = multiplier * weight.times(h[-1])
        if model.rms_norm and l + 1 < len(model.weights):
            after, rms[l + 1] = rms_norm(after)
        h.append(after)
    return h, rms


def rms_norm(u: Tensor) -> tuple[Tensor, Tensor]:
    """(u / RMS(u), RMS(u)) over the last dimension."""
    rms = u.square().mean(-1, keepdim=True).sqrt()
    return u / rms, rms


def rms_norm_gradient(gradient: Tensor, output: Tensor, rms: Tensor) -> Tensor:
    """The gradient of the input, from that of the output: its part perpendicular to the input,
    over the RMS (Lemma D.2)."""
    return (gradient - output * (output * gradient).mean(-1, keepdim=True)) / rms


def cross_entropy_gradient(logits: Tensor) -> Tensor:
    """softmax(h_{L+2}) - y. At y it is minus the sum of the others, as 1 - p rounds to 0 where
    the softmax is saturated."""
    gradient = logits.softmax(-1)
    gradient[:, WORD] = 0.0
    gradient[:, WORD] = -gradient.sum(-1)
    return gradient


def mean_square(vectors: Tensor) -> Tensor:
    """(networks, n) -> (networks,)."""
    return vectors.square().mean(1)


def kind(l: int, hidden_layers: int) -> str:
    """The kind of W_l: embedding for l = 0, readout for l = L + 1, else hidden."""
    return "embedding" if l == 0 else "readout" if l == hidden_layers + 1 else "hidden"


def layers(parameterization: Parameterization, hidden_layers: int) -> list[Layer]:
    """The exponents (a_l, b_l) of W_0..W_{L+1}."""
    return [parameterization[kind(l, hidden_layers)] for l in range(hidden_layers + 2)]


def sample(
    parameterization: Parameterization,
    width: int,
    networks: int,
    config: BigramConfig,
    generator: torch.Generator,
    *,
    normalized: bool = False,
) -> Model:
    """Random networks of one width. UserError for a width that is no positive number."""
    if width < 1:
        raise UserError(f"width {width}: expected a positive number; give the width d")
    exponents = layers(parameterization, config.hidden_layers)
    dims = [1, *[width] * (config.hidden_layers + 1), config.vocabulary]
    weights = [
        Sum((GaussianMatrix(networks, rows, columns, power(width, -layer.b), generator),))
        for layer, columns, rows in zip(exponents, dims, dims[1:], strict=False)
    ]
    return Model(tuple(weights), tuple(power(width, -layer.a) for layer in exponents), normalized)


def power(width: int, exponent: Fraction) -> float:
    """width^exponent."""
    return float(width) ** float(exponent)


def batches(width: int, config: BigramConfig) -> Iterator[tuple[int, torch.Generator]]:
    """(networks, generator) of batches small enough for memory; a function of width and seed."""
    digest = hashlib.blake2b(f"bigram/{config.seed}/{width}".encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
    size = max(1, _NUMBERS_AT_ONCE // max(width, config.vocabulary))
    for start in range(0, config.seeds, size):
        yield min(size, config.seeds - start), generator


def over_widths(
    config: BigramConfig, measure: Callable[[int, int, torch.Generator], Sizes]
) -> dict[str, np.ndarray]:
    """What `measure(width, networks, generator)` finds: name -> (widths, networks)."""
    found = []
    for width in config.widths:
        parts = [measure(width, *batch) for batch in batches(width, config)]
        found.append({name: torch.cat([part[name] for part in parts]) for name in parts[0]})
    return {name: torch.stack([sizes[name] for sizes in found]).numpy() for name in found[0]}


def sizes(result: Pass) -> Sizes:
    """Mean squares of every h_l, h'_l and W'_l by name, each (networks,)."""
    found = {f"h_{l}": mean_square(h) for l, h in enumerate(result.h) if l > 0}
    found |= {f"h'_{l}": mean_square(gradient) for l, gradient in result.h_gradient.items()}
    return found | {f"W'_{l}": item.mean_square() for l, item in enumerate(result.weight_gradient)}


@dataclass(frozen=True)
class Row:
    """A fitted exponent of d beside the predicted one.

    `step` is 0 at initialization, else the step of training whose gradients or changes these are.
    `error` is the standard error of `measured`: the larger of what the scatter of the widths about
    the line and of the `seeds` networks within each width imply. `local` is the slope between the
    two largest widths, with its own error from the networks; far from `measured` it says that the
    asymptote is not reached. `values` are the fitted sizes, by width. `moved` is how far training
    had moved h_{L+1} when this step began: the RMS of its change since initialization over that
    of h_{L+1}, at the largest width.
    """

    table: str
    row: str
    column: str
    step: int
    kind: Claim
    predicted: Fraction
    measured: float
    error: float
    local: float
    local_error: float
    moved: float
    widths: tuple[int, ...]
    values: tuple[float, ...]
    seeds: int
    note: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the exponent is as predicted, within TOLERANCE.

        A bound is met below it, too. None, not judged: hypothetical predictions, and exponents of
        fewer than 300 networks per width or of widths below 512 alone.
        """
        few = self.seeds < JUDGED_SEEDS or max(self.widths) < JUDGED_WIDTH
        if few or self.kind == "hypothetical":
            return None
        above = self.measured - float(self.predicted)
        return (above if self.kind == "bound" else abs(above)) <= TOLERANCE

    @property
    def z(self) -> float | None:
        """(measured - predicted) / error; None where not judged or where networks do not differ.

        Corrections at finite width, 1/d or V/d, show here long before they matter to `met`.
        """
        if self.met is None or self.error < _ROUNDING:
            return None
        return (self.measured - float(self.predicted)) / self.error

    def to_dict(self) -> dict[str, object]:
        """Plain JSON: the prediction as a string like "-1/2"; z and the verdict included."""
        lists = {"widths": list(self.widths), "values": list(self.values)}
        verdict = {"z": self.z, "met": self.met}
        return {**asdict(self), **lists, "predicted": str(self.predicted), **verdict}


@dataclass(frozen=True)
class Place:
    """Where a fitted exponent stands, and what is predicted there.

    `kind` says what the prediction is: one that these networks follow, an upper bound, or
    hypothetical: it rests on an assumption that they violate.
    """

    table: str
    row: str
    column: str
    predicted: Fraction
    step: int = 0
    kind: Claim = "prediction"
    moved: float = 0.0
    note: str = ""


def fit(
    place: Place, squares: np.ndarray, widths: Sequence[int], root: bool = False
) -> Row:
    """The exponent of the mean over networks of `squares`, (widths, networks), or of its root.

    UserError where a size is zero or not finite.
    """
    means = squares.mean(1)
    if not (np.isfinite(means) & (means > 0)).all():
        raise UserError(
            f"{place.table}, {place.row}, {place.column}: a size is zero or not finite, so it has "
            "no exponent; lower learning_rate (small_learning_rate for SP and NTK), steps or the "
            "largest width"
        )
    half = 0.5 if root else 1.0
    noise = half * squares.std(1, ddof=1) / math.sqrt(squares.shape[1]) / means / math.log(2)
    x, values = np.log2(np.asarray(widths, float)), means**half
    line = power_law(widths, values)
    centred = x - x.mean()
    spread = math.sqrt(float(centred**2 @ noise**2)) / float(centred @ centred)
    last = x[-1] - x[-2]
    return Row(
        **asdict(place),
        measured=line.exponent,
        error=float(np.fmax(line.error, spread)),
        local=float(np.log2(values[-1] / values[-2]) / last),
        local_error=float(np.hypot(*noise[-2:]) / last),
        widths=tuple(widths),
        values=tuple(map(float, values)),
        seeds=squares.shape[1],
    )


def variance_exponents(
    parameterization: Parameterization, hidden_layers: int
) -> dict[str, Fraction]:
    """Exponents of the elementwise variances at initialization without RMSNorm, Lemma D.5.

    (3), (4) and (5), the last with L - [1 <= l <= L] where the paper prints a plus. h'_{L+2} is
    left out: its second moment is constant for stable logits, its variance is not in (3)-(5).
    """
    scale = [layer.scale for layer in layers(parameterization, hidden_layers)]
    b = [layer.b for layer in layers(parameterization, hidden_layers)]
    last = hidden_layers + 1
    found = {f"h_{l + 1}": l - 2 * sum(scale[: l + 1], ZERO) for l in range(last + 1)}
    for l in range(last, 0, -1):
        found[f"h'_{l}"] = last - l - 2 * sum(scale[l:], ZERO)
    for l in range(last, -1, -1):
        inner = 1 if 1 <= l <= hidden_layers else 0
        found[f"W'_{l}"] = hidden_layers - inner - 2 * (sum(scale, ZERO) - b[l])
    return found


# Stratos, Table 2, as powers of d. Columns: RMSNorm, sigma_0^2, sigma_{L+1}^2, then the variances
# of h_1..h_{L+1}, h_{L+2}, h'_{L+2}, h'_{L+1}..h'_1, W'_{L+1}, W'_L..W'_1 and W'_0.
TABLE_2 = """
no    0 -1    0  0   0 -1   0 -1 -1
yes   0 -1    0  0   0 -1   0 -1 -1
no   -1 -1   -1 -1  -1 -1  -1 -2 -1
yes  -1 -1    0  0   0 -1   0 -1  0
no    0  0    0  1   0  0   0  0  0
yes   0  0    0  1   0  0   0  0  0
"""
TABLE_2_ROWS = {
    str(number): line.split() for number, line in enumerate(TABLE_2.strip().splitlines(), 1)
}


def columns(cells: Iterable[Fraction], hidden_layers: int, second: str) -> dict[str, Fraction]:
    """Give each layer its cell of a printed row; `second` names the second column, of h_{L+2}."""
    last = hidden_layers + 1
    h, logits, error, gradients, readout, hidden, embedding = cells
    found = {f"h_{l}": h for l in range(1, last + 1)}
    found |= {second: logits, f"h'_{last + 1}": error}
    found |= {f"h'_{l}": gradients for l in range(last, 0, -1)}
    found |= {f"W'_{last}": readout}
    return found | {f"W'_{l}": hidden for l in range(hidden_layers, 0, -1)} | {"W'_0": embedding}


def chosen(names: Iterable[str] | None, known: Iterable[str], table: str) -> list[str]:
    """The rows asked for, all without `names`; UserError for one that a table does not have."""
    known = list(known)
    for name in names or ():
        if name not in known:
            raise UserError(f"{table}: no row {name!r}; it has {', '.join(known)}")
    return known if names is None else list(names)


def table_2(config: BigramConfig, rows: Iterable[str] | None = None) -> list[Row]:
    """Elementwise variances at initialization, Table 2: its rows are "1" to "6".

    UserError for an unknown row.
    """
    found = []
    for name in chosen(rows, TABLE_2_ROWS, "Table 2"):
        norm, first, last, *cells = TABLE_2_ROWS[name]
        squares = over_widths(config, _initial_sizes(norm == "yes", first, last, config))
        logits = f"h_{config.hidden_layers + 2}"
        predictions = columns(map(Fraction, cells), config.hidden_layers, logits)
        for column, predicted in predictions.items():
            note = _saturation(last, column)
            place = Place("Table 2", name, column, predicted, note=note)
            found.append(fit(place, squares[column], config.widths))
    return found


def _initial_sizes(
    normalized: bool, first: str, last: str, config: BigramConfig
) -> Callable[[int, int, torch.Generator], Sizes]:
    """A measurement for `over_widths`: sigma_0^2 = d^first, sigma_{L+1}^2 = d^last."""
    b = (-Fraction(first) / 2, HALF, -Fraction(last) / 2)
    parameterization = Parameterization(*(Layer(0, value) for value in b))
    error = f"h'_{config.hidden_layers + 2}"
    mean = 1 / config.vocabulary  # of the softmax: h'_{L+2} has mean 1/V - y

    def measure(width: int, networks: int, generator: torch.Generator) -> Sizes:
        model = sample(
            parameterization, width, networks, config, generator, normalized=normalized
        )
        result = propagate(model, networks)
        return {**sizes(result), error: mean_square(result.h[-1].softmax(1) - mean)}

    return measure


def _saturation(last: str, column: str) -> str:
    """A note on the gradients of rows 5 and 6; "" elsewhere."""
    if last == "0" and "'" in column:
        return "the softmax saturates, so the asymptote is reached slowly; see the local slope"
    return ""
