"""Width exponents as exact fractions: the published tables, the stability constraints, a solver.

Everett et al., "Scaling Exponents Across Parameterizations and Optimizers" (2024), describe a
network of width n by three exponents per layer: the multiplier is n^-a, the standard deviation
of the initial weights n^-b and the learning rate n^-c. The layers are the embedding (their
l = 1), the hidden matrices (l = 2..L) and the readout (l = L+1). A residual r_l is the negative
exponent of the change of layer l's output, so "the change of z_l is n^-r_l", and all of the
theory is the requirement r_l >= 0.

Three places where the paper's text contradicts its own Table 1 are resolved here as follows.

* The gradient exponent of SGD is printed with a max. It is a negative exponent, so the larger
  of two gradients is the min.
* The term W_l times the change of z_{l-1} is printed once as 1/2 + r_{l-1} + omega_l. Alignment
  makes the change larger, hence the sign must be -omega_l (as in the appendix, B.12).
* c_{L+1} >= 0 for Adafactor stands inside the minimum that defines r_{L+1}. It is a separate
  constraint against growth over the steps (B.13), not a term of the change of the logits.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from fractions import Fraction
from typing import TypeVar

from param_groups.families import SHIFT
from param_groups.roles import PlanError, choose

LAYERS = ("embedding", "hidden", "readout")
OPTIMIZERS = ("sgd", "adam", "adafactor")

Number = Fraction | int | float | str
Exponents = dict[str, Fraction]
Named = TypeVar("Named", "Parameterization", "Alignment")

ZERO = Fraction(0)
HALF = Fraction(1, 2)


def fraction(text: Number) -> Fraction:
    """Parse "1/2", "0.5" or "1" exactly; a float counts as the decimal number it prints.

    Raises PlanError for anything that is no finite number.
    """
    try:
        return Fraction(str(text))
    except (ValueError, ZeroDivisionError):
        raise PlanError(f"{text!r} is not an exact number; write it like 1/2, 0.5 or 1") from None


@dataclass(frozen=True)
class Layer:
    """A layer's multiplier n^-a and initial standard deviation n^-b (Everett et al., B.1)."""

    a: Fraction
    b: Fraction

    def __init__(self, a: Number, b: Number) -> None:
        object.__setattr__(self, "a", fraction(a))
        object.__setattr__(self, "b", fraction(b))

    @property
    def scale(self) -> Fraction:
        """a + b: the negative exponent of multiplier times initial standard deviation."""
        return self.a + self.b


@dataclass(frozen=True)
class Parameterization:
    """The exponents a and b of the three kinds of layer."""

    embedding: Layer
    hidden: Layer
    readout: Layer

    def __getitem__(self, layer: str) -> Layer:
        layers = (self.embedding, self.hidden, self.readout)
        return layers[LAYERS.index(choose("layer", layer, LAYERS))]


@dataclass(frozen=True)
class Alignment:
    """How strongly each term of the change of a layer's output adds up over its n inputs.

    alpha belongs to (change of W) z, omega to W (change of z), u to (change of W)(change of z);
    1/2 is a sum of independent terms, 1 a sum of equal ones (Everett et al., Definition B.6).
    The readout takes the common values unless it is given its own. For alpha < 1/2 a hidden
    matrix may outgrow its initial scale, which the paper's gradients for SGD leave out. Raises
    PlanError for values outside [0, 1].
    """

    alpha: Fraction
    omega: Fraction
    u: Fraction
    omega_readout: Fraction
    alpha_readout: Fraction
    u_readout: Fraction

    def __init__(
        self,
        alpha: Number,
        omega: Number,
        u: Number,
        omega_readout: Number | None = None,
        alpha_readout: Number | None = None,
        u_readout: Number | None = None,
    ) -> None:
        pairs = (omega_readout, omega), (alpha_readout, alpha), (u_readout, u)
        readout = (common if own is None else own for own, common in pairs)
        for key, value in zip(fields(self), (alpha, omega, u, *readout), strict=True):
            name, exact = key.name, fraction(value)
            if not 0 <= exact <= 1:
                raise PlanError(f"alignment exponent {name} must lie in [0, 1], got {exact}")
            object.__setattr__(self, name, exact)

    def at(self, layer: str) -> tuple[Fraction, Fraction, Fraction]:
        """Return (alpha, omega, u) of the hidden layers or of the readout."""
        if layer == "readout":
            return self.alpha_readout, self.omega_readout, self.u_readout
        return self.alpha, self.omega, self.u


# The settings of Everett et al., section 3.2; u equals alpha in both (the caption of their
# Table 1 leaves u out of the first).
FULL_ALIGNMENT = Alignment(alpha=1, omega=HALF, u=1)
NO_ALIGNMENT = Alignment(alpha=HALF, omega=HALF, u=HALF)
# Yang & Hu (2021) and Yang & Littwin (2023) as a special case (B.16). Their constraints leave u
# open, because alpha = 1 is already the largest value it could take.
TENSOR_PROGRAMS = Alignment(alpha=1, omega=HALF, u=1, omega_readout=1)

ALIGNMENTS = {"full": FULL_ALIGNMENT, "none": NO_ALIGNMENT}

# Everett et al., Table 1, columns "Initialization Variance" (n^-2b) and "Parameter Multiplier"
# (n^-a).
PARAMETERIZATION_TABLE: dict[str, Parameterization] = {
    "standard": Parameterization(Layer(0, 0), Layer(0, HALF), Layer(0, HALF)),
    "ntk": Parameterization(Layer(0, 0), Layer(HALF, 0), Layer(HALF, 0)),
    "mup": Parameterization(Layer(-HALF, HALF), Layer(0, HALF), Layer(HALF, HALF)),
    "mean_field": Parameterization(Layer(0, 0), Layer(HALF, 0), Layer(1, 0)),
}


def _named(value: str | Named, kind: type[Named], table: Mapping[str, Named]) -> Named:
    """Look a name up in a table; pass a value of its kind through."""
    if isinstance(value, kind):
        return value
    return table[choose(kind.__name__.lower(), value, table)]


def _rates(c: Mapping[str, Number]) -> Exponents:
    """Make the learning-rate exponents exact and check that each layer has one."""
    for layer in c:
        choose("layer", layer, LAYERS)
    missing = [layer for layer in LAYERS if layer not in c]
    if missing:
        raise PlanError(f"no learning-rate exponent c for {', '.join(missing)}")
    return {layer: fraction(c[layer]) for layer in LAYERS}


def _check_depth(hidden_layers: int) -> None:
    """Raise unless there is at least one hidden matrix."""
    if not isinstance(hidden_layers, int) or hidden_layers < 1:
        raise PlanError(f"hidden_layers must be a whole number >= 1, got {hidden_layers!r}")


def _init_violations(parameterization: Parameterization) -> list[str]:
    """Describe the violated constraints on the first forward pass."""
    embedding, hidden, readout = (parameterization[layer].scale for layer in LAYERS)
    needs = (
        (embedding == 0, f"embedding needs a + b = 0, has {embedding}"),
        (hidden == HALF, f"hidden needs a + b = 1/2, has {hidden}"),
        (readout >= HALF, f"readout needs a + b >= 1/2, has {readout}"),
    )
    return [text for holds, text in needs if not holds]


def is_stable_at_init(parameterization: str | Parameterization) -> bool:
    """Whether activations start at constant scale and logits at most there (Everett et al., B.6).

    Raises PlanError for an unknown name.
    """
    table = _named(parameterization, Parameterization, PARAMETERIZATION_TABLE)
    return not _init_violations(table)


def gradient_exponents(parameterization: str | Parameterization) -> Exponents:
    """Return each layer's gradient at initialization as a power of n, -g_l.

    g is a at the readout and a_l + a_{L+1} + b_{L+1} below it (Everett et al., B.7 and Table 1,
    column "Gradient"). Raises PlanError for an unknown name.
    """
    table = _named(parameterization, Parameterization, PARAMETERIZATION_TABLE)
    below = {layer: -(table[layer].a + table.readout.scale) for layer in ("embedding", "hidden")}
    return {**below, "readout": -table.readout.a}


def _offset(parameterization: Parameterization, optimizer: str, layer: str) -> Fraction:
    """Return d - c, where one update times the multiplier, n^-a (change of W), is n^-d.

    This is the update's exponent in Everett et al., B.9 and B.12, for a readout that has not
    outgrown its initial scale. In terms of d the three optimizers obey the same constraints.
    """
    exponents = parameterization[layer]
    if optimizer == "adam":
        return exponents.a
    if optimizer == "adafactor":
        return exponents.scale
    return exponents.a - gradient_exponents(parameterization)[layer]


def _update_exponents(
    parameterization: Parameterization, optimizer: str, c: Exponents
) -> Exponents:
    """Return d of every layer, where one update times the multiplier is n^-d."""
    d = {layer: c[layer] + _offset(parameterization, optimizer, layer) for layer in LAYERS}
    if optimizer == "sgd":
        # A readout whose update is larger than its initial value passes larger gradients down:
        # a + b becomes min(a + b, 2a + c). The paper prints max, but these are negative
        # exponents, so the larger gradient is the min.
        growth = max(ZERO, parameterization.readout.scale - d["readout"])
        d["embedding"] -= growth
        d["hidden"] -= growth
    return d


def _next_residual(
    d: Fraction, before: Fraction, scale: Fraction, aligned: tuple[Fraction, Fraction, Fraction]
) -> Fraction:
    """Return r_l from r_{l-1}: the largest of the three terms of the change of z_l."""
    alpha, omega, u = aligned
    return min(d - alpha, d + before - u, scale + before - omega)


def _activation_residuals(
    parameterization: Parameterization, alignment: Alignment, d: Exponents, hidden_layers: int
) -> list[Fraction]:
    """Return r_1..r_L for given update exponents of the embedding and the hidden layers."""
    chain = [d["embedding"]]
    for _ in range(hidden_layers):
        scale = parameterization.hidden.scale
        chain.append(_next_residual(d["hidden"], chain[-1], scale, alignment.at("hidden")))
    return chain


def residuals(
    parameterization: str | Parameterization,
    optimizer: str,
    alignment: str | Alignment,
    c: Mapping[str, Number],
    *,
    hidden_layers: int = 1,
) -> tuple[Fraction, ...]:
    """Return r_1..r_{L+1}: embedding, each hidden layer, readout (Everett et al., section 3.2).

    A negative value means that the layer's change grows with width. The constraint c >= 0 of
    Adafactor is no residual and is left to `is_stable`. Raises PlanError for
    unknown names, layers without c, and fewer than one hidden layer.
    """
    table = _named(parameterization, Parameterization, PARAMETERIZATION_TABLE)
    aligned = _named(alignment, Alignment, ALIGNMENTS)
    choose("optimizer", optimizer, OPTIMIZERS)
    _check_depth(hidden_layers)
    d = _update_exponents(table, optimizer, _rates(c))
    chain = _activation_residuals(table, aligned, d, hidden_layers)
    scale = table.readout.scale
    logits = _next_residual(d["readout"], chain[-1], scale, aligned.at("readout"))
    return (*chain, logits)


def is_stable(
    parameterization: str | Parameterization,
    optimizer: str,
    alignment: str | Alignment,
    c: Mapping[str, Number],
    *,
    hidden_layers: int = 1,
) -> bool:
    """Whether activations stay at constant scale and logits at most there, at every step.

    Everett et al., Definition B.2 and Table 2, including stability at initialization and, for
    Adafactor, c >= 0: a parameter-scaled update larger than the parameter would multiply it by
    n^-c in each step (B.13). The paper asks this of the readout alone, which suffices for
    alpha >= 1/2; below that a hidden layer needs it too. Raises as `residuals` does.
    """
    chain = residuals(parameterization, optimizer, alignment, c, hidden_layers=hidden_layers)
    bounded = optimizer != "adafactor" or min(_rates(c).values()) >= 0
    return is_stable_at_init(parameterization) and min(chain) >= 0 and bounded


@dataclass(frozen=True)
class Solution:
    """The largest stable learning rates of one case and what they do.

    `c` holds the negative exponents per layer, `residuals` r_1..r_{L+1}.
    """

    c: Exponents
    residuals: tuple[Fraction, ...]
    stable: bool

    @property
    def nontrivial(self) -> bool:
        """Whether training moves the logits by at least a constant: r_{L+1} <= 0.

        Everett et al., Definition B.3. For stable rates this is the equality in one of the logit
        constraints of Table 2. The paper says that its maximal rates always reach r_{L+1} = 0
        (B.17); by its own definition muP and mean-field with SGD or Adafactor and no alignment do
        not: there r_{L+1} = 1/2, because other constraints limit the readout's rate first.
        """
        return self.residuals[-1] <= 0

    @property
    def feature_learning(self) -> bool:
        """Whether the last activations change by a constant: r_L = 0 (Everett et al., 3.2)."""
        return self.residuals[-2] == 0

    @property
    def lr(self) -> Exponents:
        """The learning rates as powers of n, -c."""
        return {layer: -value for layer, value in self.c.items()}

    def to_dict(self) -> dict[str, object]:
        """Return the solution for JSON, fractions as strings such as "-1/2"."""
        embedding, *hidden, readout = map(str, self.residuals)
        return {
            "lr": {layer: str(value) for layer, value in self.lr.items()},
            "residual": {"embedding": embedding, "hidden": hidden, "readout": readout},
            "stable": self.stable,
            "nontrivial": self.nontrivial,
            "feature_learning": self.feature_learning,
        }


def _required_residuals(
    parameterization: Parameterization, alignment: Alignment, hidden_layers: int
) -> list[Fraction]:
    """Return the least r_1..r_L from which no later W (change of z) term can grow with width."""
    required = [max(ZERO, alignment.omega_readout - parameterization.readout.scale)]
    for _ in range(hidden_layers):
        required.append(max(ZERO, required[-1] + alignment.omega - HALF))
    return required[::-1]


def _least_hidden_update(
    required: list[Fraction], alignment: Alignment, optimizer: str
) -> Fraction:
    """Return the least d, shared by all hidden layers, that gives each its required residual.

    A residual also depends on d through the layers below: r_l is at most k d - alpha - (k - 1) u,
    a change over k layers up to l, and l (d - u) + r_0; each bounds d by itself. A change that is
    passed on by a W (change of z) term adds no bound: the residual required of the layer below
    implies it.
    """
    alpha, _, u = alignment.at("hidden")
    # Adafactor's c >= 0; it binds only for alpha < 1/2 (see `is_stable`).
    bounds = [HALF] if optimizer == "adafactor" else []
    for layer, least in enumerate(required[1:], start=1):
        bounds += [(least + alpha + (k - 1) * u) / k for k in range(1, layer + 1)]
        bounds.append((least - required[0]) / layer + u)
    return max(bounds)


def _least_readout_update(
    parameterization: Parameterization, optimizer: str, alignment: Alignment, before: Fraction
) -> Fraction:
    """Return the least d of the readout, given r_L of the layer below it."""
    alpha, _, u = alignment.at("readout")
    least = max(alpha, u - before)
    if optimizer == "adam":
        return least
    # The readout's update must not exceed its initial scale, n^-(a+b). For Adafactor this is the
    # constraint c >= 0; for SGD, c >= b - a, it keeps the gradients of the other layers, whose
    # rates are already maximal, from growing.
    return max(least, parameterization.readout.scale)


def solve(
    parameterization: str | Parameterization,
    optimizer: str,
    alignment: str | Alignment,
    *,
    hidden_layers: int = 1,
) -> Solution:
    """Return the maximal stable learning rates for any a, b and alignment (Everett et al., B.17).

    Maximal means: the embedding's c is the smallest that any stable choice of all three allows,
    then the hidden layers' shared c is the smallest given that, then the readout's given both.
    Consequently no single c can be lowered. The order matters in two cases. With SGD, a readout
    whose update exceeds its initial scale enlarges all other gradients; giving way to the other
    layers (c >= b - a at the readout) is what Table 1 does in its columns without alignment.
    With u > alpha, slower embeddings would permit faster hidden layers.

    Raises PlanError for unknown names, and for a parameterization that is not stable at
    initialization, naming each violated constraint. All others have a solution.
    """
    table = _named(parameterization, Parameterization, PARAMETERIZATION_TABLE)
    aligned = _named(alignment, Alignment, ALIGNMENTS)
    choose("optimizer", optimizer, OPTIMIZERS)
    _check_depth(hidden_layers)
    if violations := _init_violations(table):
        raise PlanError("not stable at initialization: " + "; ".join(violations))
    required = _required_residuals(table, aligned, hidden_layers)
    d = {"embedding": required[0], "hidden": _least_hidden_update(required, aligned, optimizer)}
    before = _activation_residuals(table, aligned, d, hidden_layers)[-1]
    d["readout"] = _least_readout_update(table, optimizer, aligned, before)
    c = {layer: d[layer] - _offset(table, optimizer, layer) for layer in LAYERS}
    case = (table, optimizer, aligned, c)
    chain = residuals(*case, hidden_layers=hidden_layers)
    return Solution(c, chain, is_stable(*case, hidden_layers=hidden_layers))


def shift(layer: Layer, c: Number, theta: Number, optimizer: str) -> tuple[Layer, Fraction]:
    """Move n^-theta from the initial weights to the multiplier without changing training.

    a += theta and b -= theta keep the forward pass; c -= 2 theta (SGD), theta (Adam) or 0
    (Adafactor) keeps the updates, at epsilon = 0 (Everett et al., B.2). Raises PlanError for
    an unknown optimizer.
    """
    factor = SHIFT[choose("optimizer", optimizer, OPTIMIZERS)]
    by = fraction(theta)
    return Layer(layer.a + by, layer.b - by), fraction(c) - factor * by
