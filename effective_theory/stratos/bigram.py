"""Stratos' linear bigram model: random networks of any width, forward and backward.

Stratos, "Scale-Invariant Parameterizations", (1): h_0 = x, h_{l+1} = d^(-a_l) W_l h_l for
l = 0..L+1, trained on one bigram (x, y) of a vocabulary of V words by cross-entropy; primes are
gradients of the loss. W_0 is d x V, W_{L+1} is V x d, the L hidden matrices are d x d, entries of
W_l are Gaussian with variance d^(-2 b_l). Of W_0 only the column of x is ever used, or has a
gradient (A.1 prints its variance as that of h'_l; it is that of h'_1), so W_0 is that column here.

Networks of width 4096 are cheap because only products of W_l with a few vectors are drawn, not
W_l itself (`GaussianMatrix`). This is exact in law and not an approximation, in training too: a
sign step adds a matrix of rank one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, Protocol, TypeVar

import numpy as np
import torch
from pydantic import Field, field_validator
from torch import Tensor

from param_groups.rules.exponents import Layer, Parameterization
from training.config import Count, PositiveFloat, PositiveInt, Section

WORD = 0  # the target y; words are exchangeable at initialization, so any would do
# A vector whose part outside of a span is smaller than this, relatively, counts as inside: it
# lies far above the rounding of the changes of activations that are asked for, and far below 1.
_SPANNED = 1e-9
_NUMBERS_AT_ONCE = 2**17  # entries of one vector over the networks of a batch: 1 MiB

Sizes = dict[str, Tensor]
Name = TypeVar("Name")  # of a size, and the step that it belongs to


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
    by more than 1 the softmax saturates and gradients vanish, faster than any power of d."""
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
        return sum((term.times(right) for term in self.terms), torch.zeros(()))

    def transposed_times(self, left: Tensor) -> Tensor:
        """The transposed sum times u."""
        return sum((term.transposed_times(left) for term in self.terms), torch.zeros(()))

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
    """Random networks of one width."""
    exponents = layers(parameterization, config.hidden_layers)
    dims = [1, *[width] * (config.hidden_layers + 1), config.vocabulary]
    weights = [
        Sum((GaussianMatrix(networks, rows, columns, raised(width, -layer.b), generator),))
        for layer, columns, rows in zip(exponents, dims, dims[1:], strict=False)
    ]
    return Model(tuple(weights), tuple(raised(width, -layer.a) for layer in exponents), normalized)


def raised(width: int, exponent: Fraction) -> float:
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
    config: BigramConfig, measure: Callable[[int, int, torch.Generator], dict[Name, Tensor]]
) -> dict[Name, np.ndarray]:
    """What `measure(width, networks, generator)` finds: name -> (widths, networks)."""
    means = []
    for width in config.widths:
        parts = [measure(width, *batch) for batch in batches(width, config)]
        means.append({name: torch.cat([part[name] for part in parts]) for name in parts[0]})
    return {name: torch.stack([sizes[name] for sizes in means]).numpy() for name in means[0]}


def sizes(result: Pass) -> Sizes:
    """Mean squares of every h_l, h'_l and W'_l by name, each (networks,)."""
    squares = {f"h_{l}": mean_square(h) for l, h in enumerate(result.h) if l > 0}
    squares |= {f"h'_{l}": mean_square(gradient) for l, gradient in result.h_gradient.items()}
    return squares | {
        f"W'_{l}": item.mean_square() for l, item in enumerate(result.weight_gradient)
    }
