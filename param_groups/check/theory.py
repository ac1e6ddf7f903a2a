"""What a check expects of a plan's numbers (`judging` compares), and of what it measures.

Expectations come from papers or from the demand for stability, never from the plan under check. A
plan says which rule it follows; the exponents of that rule stand in `papers`. For every other
rule, and for one global rate, stability sets the standard (`_demand`): what a step changes neither
grows nor vanishes with the size.

Two exponents are expected of a measured change. The *aim* is what the rule promises under its own
assumptions. The *prediction* is what theory says of the first steps. Where they differ the paper
assumes less alignment than there is at first (`exception`).
"""

import functools
import itertools
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction

from param_groups.check.measuring import embeds, pooled, scanned
from param_groups.check.papers import ONE, Promise, over_depth, promised
from param_groups.families import OPTIMIZER_FAMILY, SHIFT, epsilon_power
from param_groups.plan import Plan
from param_groups.roles import IN, Layout, Role
from param_groups.rows import Row
from param_groups.rules.exponents import HALF, LAYERS, ZERO, Alignment

# The first steps: updates align with activations (alpha = 1), hidden weights do not align with
# the change of their input (omega = 1/2), the readout does (omega = 0.96 to 1.00 at the first step,
# see effective_theory). u = 0 leaves out the product of two changes, which is of second order.
FIRST_STEPS = Alignment(alpha=1, omega=HALF, u=0, omega_readout=1)
OK, EXCEPTION, GROWS, VANISHES = "ok", "expected exception", "grows", "vanishes"
DIFFERS = "differs"  # numbers of several sizes that are not one power of the size
WITHOUT_EPS = ("sgd", "adam_atan2", "muon")


def family_of(plan: Plan) -> str | None:
    """The optimiser's family; Adam's where a prescription names none, and beside Muon."""
    family = OPTIMIZER_FAMILY.get(str(plan.prescription.get("optimizer", "adam")))
    return "adam" if family == "spectral" else family


def expected_of(plans: Mapping[int, Plan]) -> Promise | None:
    """What a check of these plans expects: the exponents of the rule's paper, or else stability's;
    None for an optimiser of no known family."""
    plan, size = plans[min(plans)], scanned(plans)
    family = family_of(plan)
    if family is None:
        return None
    return promised(plan.prescription, size, family) or _demand(plans, size, family)


def _demand(plans: Mapping[int, Plan], size: str, family: str) -> Promise | None:
    """The exponents with which no change grows or vanishes in the first steps, for any rule.

    d of Everett et al., B.9 (multiplier times update goes as size^(-d)) is 0 for embeddings and 1
    for what sums over the width; in a branch of a model of many blocks it is 1 - residual. SGD and
    parameter scaling turn d into a rate by the gradient's or the tensor's initial size, which are
    the readout's, the residual multiplier's and the attention scale's: these are the plan's, where
    they are stable. None for depths between which the residual multiplier follows no power.
    """
    numbers = PlanExponents(plans)
    if size == "depth":
        residual = numbers.factor("residual_multiplier")
        if residual is None:
            return None
        stable = over_depth(max(HALF, -residual), family)
        return replace(stable, source="stability", alignment=None, published=False)
    starts = [p.start for n in numbers.names if (p := numbers.powers(n)).kind == "readout"]
    readout = max([HALF, *(start for start in starts if start is not None)]) if starts else ONE
    if None in starts:  # what starts at zero has the size of its first update
        readout = ONE
    start = {"embedding": ZERO, "hidden": HALF, "readout": readout}
    d = {"embedding": ZERO, "hidden": ONE, "readout": ONE}
    still = Promise("stability", size, family, start, dict.fromkeys(LAYERS, ZERO))
    step = {layer: d[layer] + still.update(layer) for layer in LAYERS}
    # Head dimension times attention scale multiplies what queries and keys do to the logits.
    attention = numbers.factor("attention_scale") or ZERO
    step["query"] = step["hidden"] + (2 if family == "sgd" else 1) * attention
    return replace(still, step=step, attention=attention, published=False)


# A plan's numbers


@dataclass(frozen=True)
class Powers:
    """A tensor's kind and exponents between two sizes; None stands for a number that is zero.

    `own`: "query" of what makes queries or keys, "table" of an embedding, else the kind.
    """

    kind: str
    own: str
    start: Fraction | None
    step: Fraction | None
    multiplier: Fraction
    epsilon: Fraction | None
    decay: Fraction | None

    def of(self, quantity: str) -> Fraction | None:
        """The power of the size in a number."""
        known = {"start": self.start, "rate": self.step, "epsilon": self.epsilon}
        value = known.get(quantity, self.decay)
        return -value if value is not None and quantity in ("start", "rate") else value


def numbers_of(row: Row) -> dict[str, float]:
    """What is judged of a row; an optimiser without an epsilon has 0."""
    eps = 0.0 if row.optimizer in WITHOUT_EPS else row.eps
    start = math.hypot(row.init_std, row.init_mean)
    return {"start": start, "rate": row.lr, "epsilon": eps, "decay": row.decay_per_step}


@functools.lru_cache(4096)  # blocks have the same numbers
def power_between(small: float, large: float, ratio: float) -> Fraction | None:
    """p in large / small = ratio^p, exact for any but odd fractions; None of zero or infinity."""
    if not (0 < small < math.inf and 0 < large < math.inf):
        return None
    return Fraction(math.log(large / small) / math.log(ratio)).limit_denominator(10**6)


def kind_of(small: Row, large: Row, size: str) -> str:
    """The layer type of a tensor, from the axes that grow with the size and not from its role.

    In depth: whether a numbered block holds it. Roles decide where shapes cannot: biases and scales
    go with embeddings (Yang et al. 2022, Table 8), what is added to logits goes with nothing, and
    LoRA's A sums over the width.
    """
    role, facts = Role(small.role), Role(small.role).facts
    if facts.kind == "logits":
        return "constant"
    if size == "depth":
        inside = facts.block or (facts.branch and pooled(small.name) != small.name)
        return "hidden" if inside else "readout" if role is Role.READOUT else "embedding"
    if facts.layout is Layout.VECTOR or role is Role.LORA_B:
        return "embedding"
    axes = sum(wide > narrow for narrow, wide in zip(small.shape, large.shape, strict=True))
    if axes > 1 or (facts.kind, facts.grows) == ("hidden", (IN,)):
        return "hidden"
    if axes == 0:
        return "constant"
    return "readout" if large.fan_in > small.fan_in else "embedding"


class PlanExponents:
    """Every tensor's exponents between the sizes of a check's plans."""

    def __init__(self, plans: Mapping[int, Plan]) -> None:
        self.plans, self.size, self.sizes = plans, scanned(plans), sorted(plans)
        self.family = family_of(plans[self.sizes[0]]) or "adam"
        common = set.intersection(*({row.name for row in plan.rows} for plan in plans.values()))
        self.names = [row.name for row in plans[self.sizes[0]].rows if row.name in common]
        self.pairs = [*itertools.pairwise(self.sizes)]
        self._known: dict[tuple[str, tuple[int, int]], Powers] = {}

    def powers(self, name: str, sizes: tuple[int, int] | None = None) -> Powers:
        """A tensor's exponents between two sizes, by default the smallest and the largest."""
        low, high = sizes or (self.sizes[0], self.sizes[-1])
        if (name, (low, high)) not in self._known:
            self._known[name, (low, high)] = self._powers(name, low, high)
        return self._known[name, (low, high)]

    def _powers(self, name: str, low: int, high: int) -> Powers:
        small, large, ratio = self.plans[low][name], self.plans[high][name], high / low
        a = -(power_between(small.multiplier, large.multiplier, ratio) or ZERO)
        first, last = numbers_of(small), numbers_of(large)
        b, c, eps, decay = (power_between(first[key], last[key], ratio) for key in first)
        start = None if b is None else a - b
        step = None if c is None else SHIFT[self.family] * a - c
        if step is not None and self.by_muon(name):
            step += 1  # entries of a matrix of one spectral norm, that all point one way
        epsilon = None if eps is None else eps / epsilon_power(small.optimizer) + a
        kind = kind_of(small, large, self.size)
        own = "table" if embeds(small) else kind
        own = "query" if self.attends(name) else own
        return Powers(kind, own, start, step, -a, epsilon, decay)

    def by_muon(self, name: str) -> bool:
        """Whether a tensor's updates have one spectral norm at every width: Muon's."""
        return self.size != "depth" and self.plans[self.sizes[0]][name].optimizer == "muon"

    def between(self, name: str, quantity: str) -> list[Fraction | None]:
        """The powers between neighbouring sizes; none where the number is 0 at all of them."""
        if not any(numbers_of(self.plans[size][name])[quantity] for size in self.sizes):
            return []
        return [self.powers(name, pair).of(quantity) for pair in self.pairs]

    def usual(self, quantity: str, kind: str, attends: bool) -> Fraction:
        """The median of a number's powers over all tensors of a kind; where the head dimension is
        the size, over those that make queries and keys, or over the others."""
        apart = self.size == "head_dim"
        names = [n for n in self.names if not apart or self.attends(n) is attends]
        powers = [p for name in names if (p := self.powers(name)).kind == kind]
        values = [value for p in powers if (value := p.of(quantity)) is not None]
        return statistics.median_low(values or [ZERO])

    def attends(self, name: str) -> bool:
        """Whether a tensor makes queries or keys."""
        return self.plans[self.sizes[0]][name].role in (Role.QUERY, Role.KEY)

    def factor(self, name: str, sizes: tuple[int, int] | None = None) -> Fraction | None:
        """The power of the size in a factor of the forward pass; of attention's, times head_dim."""
        low, high = sizes or (self.sizes[0], self.sizes[-1])
        values = []
        for plan in (self.plans[low], self.plans[high]):
            factors = (f.value * (f.head_dim or 1) for f in plan.forward if f.name == name)
            values.append(next(factors, 1.0))
        return power_between(values[0], values[1], high / low)


# What is expected of a measured slope


def expectation(
    expected: Promise | None, quantity: str, part: str
) -> tuple[Fraction | None, Fraction | None]:
    """(aim, prediction) of a module's slope; None where nothing is known.

    The theory of changes is about activations that start at constant scale. Where they do not,
    hidden activations and changes are expected to be constant. A router's logits are only asked not
    to grow: they start smaller than that, and what is left of the start falls in the first steps.
    """
    if part == "router":
        return ZERO, ZERO
    if expected is None or not _is_steady(expected):
        return (None, None) if (quantity, part) == ("init", "logits") else (ZERO, ZERO)
    if quantity == "init" and part == "logits" and expected.tied:
        return (ZERO, -HALF) if expected.size == "width" else (ZERO, ZERO)
    if quantity == "init":
        return expected.init(part) if part == "logits" else ZERO, expected.init(part)
    if expected.alignment is None:
        return ZERO, ZERO
    aim = min(expected.change(part, expected.alignment), ZERO)
    return aim, expected.change(part, FIRST_STEPS)


def _is_steady(expected: Promise) -> bool:
    """Whether activations start at constant scale, and logits at most there."""
    start = expected.start
    return expected.size == "depth" or (
        start["embedding"] == 0 and start["hidden"] == HALF <= start["readout"]
    )


def expected_gradient(
    name: str, part: str, step: int, numbers: PlanExponents, expected: Promise | None
) -> Fraction | None:
    """The power of the size in the loss's gradient at a module's output, or in an embedding that no
    module holds; None where not known.

    A mean loss hands the logits a gradient without a power of the size, and a model the gradient of
    its readout's inputs down, which is the readout's initial size, or that of its first update
    where it starts at zero and gradients are taken after the first step.
    """
    if part == "router" or expected is None:
        return None
    if part == "logits":  # a factor behind the readout that the plan has; Tied's is in its output
        if expected.tied:
            return ZERO
        return numbers.factor("logit_multiplier") or ZERO
    names = [one for one in numbers.names if name in (one, one.rpartition(".")[0])]
    if not _is_steady(expected) or not names:
        return None
    heads = {tuple(one.head_dim for one in plan.forward) for plan in numbers.plans.values()}
    if any(map(numbers.attends, names)) and len(heads) > 1:  # of another dimension elsewhere
        return None
    if expected.size == "depth":
        inside = any(numbers.powers(name).kind == "hidden" for name in names)
        return expected.gradient("hidden" if inside else "embedding")
    multiplier = numbers.powers(name).multiplier if name in numbers.names else ZERO
    return multiplier + (expected.update("readout") if step else -expected.start["readout"])


def expected_update(
    name: str, numbers: PlanExponents, expected: Promise | None
) -> tuple[Fraction | None, Fraction | None]:
    """(aim, prediction) of a tensor's first update; `name` may stand for all blocks ("*")."""
    first = next(one for one in numbers.names if name in (one, pooled(one)))
    powers = numbers.powers(first)
    if expected is None or powers.step is None:
        return None, None
    if expected.family == "adafactor" and powers.start is None:
        aim = -expected.rate(powers.own, powers.kind)  # scaled by the floor, not by itself
        return aim, aim
    # Of multiplier times update; a plan that has absorbed its multipliers updates by all of it.
    aim = expected.update(powers.kind, powers.own) - powers.multiplier
    if numbers.by_muon(first):
        aim += 1  # what is measured is the spectral norm
    slower = powers.own == "query" and (expected.family, expected.size) == ("sgd", "head_dim")
    return aim, aim - (HALF if slower and expected.published else ZERO)


def exception(expected: Promise | None, quantity: str, part: str) -> str:
    """Why a slope may differ from its aim towards the prediction; "" where it may not."""
    if expected is not None and (quantity, part) == ("init", "logits") and expected.tied:
        return _OTHERS
    if expected is None or quantity == "init":
        return ""
    if quantity == "update":
        return _QUERIES if expected.family == "sgd" else ""
    if expected.alignment is None:
        return ""
    aim, predicted = expectation(expected, quantity, part)
    if aim == predicted:
        return ""
    if "table" in expected.step:
        return _TABLES
    return _NO_ALIGNMENT if expected.alignment.alpha < 1 else _OMEGA


# The exceptions, each with its source.
_OTHERS = (
    "tied logits have two sizes: that of a position's token keeps the embedding's share of what is "
    "read out at every width, if no dense layer stands before it; those of the V - 1 others are "
    "random sums that fall as width^(-1/2)"
)
_QUERIES = (
    "in the first steps of SGD the values that attention mixes do not align with the gradient yet, "
    "so queries and keys move less by a factor N^(-1/2) (Bordelon et al., Figure 13)"
)
_TABLES = (
    "embedding_exponent multiplies the rates of embeddings by a power of the width beside the "
    "paper's rates, so their changes grow by it, and so do those of what reads them"
)
_NO_ALIGNMENT = (
    "the rates assume that updates and activations are unaligned (alpha 1/2, Everett et al., "
    "section 3.2, no alignment); in the first steps they are aligned (1), so changes grow"
)
_OMEGA = (
    "the rates assume that the readout's weights do not align with the change of their input "
    "(omega 1/2, Everett et al., section 3.2, full alignment); in the first steps they do (1, the "
    "infinite-width limit of B.16), so logits grow as width^(1/2)"
)
