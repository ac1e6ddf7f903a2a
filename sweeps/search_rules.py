"""How a search turns trials into constants (Everett et al., App. C.2; the rules are pure).

Symbols: a constant is one gamma of eta_l = beta_n * gamma_l * (n/b)^(-c_l).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from sweeps.trials import Bounds, Trial


def is_near_edge(value: float, bounds: Bounds, share: float) -> bool:
    """Whether a value lies within `share` of the log range from either end.

    The paper says "at or near the edge" and gives no number; 10% is this repository's.
    """
    low, high = map(math.log, bounds)
    margin = share * (high - low) + 1e-9  # a value at the margin counts, whatever the rounding
    return math.log(value) - low <= margin or high - math.log(value) <= margin


def next_ranges(
    best: Mapping[str, float], ranges: Mapping[str, Bounds], share: float, factor: float
) -> dict[str, Bounds]:
    """The ranges of the next round: those of constants whose best value is near an edge move.

    They become best / factor to best * factor; the others stay.
    """
    return {
        key: (best[key] / factor, best[key] * factor)
        if is_near_edge(best[key], bounds, share)
        else bounds
        for key, bounds in ranges.items()
    }


def best_trial(trials: Sequence[Trial]) -> Trial:
    """The complete trial with the lowest loss, the first of equals."""
    return min(trials, key=lambda trial: (trial.loss, trial.number))


def equally_good(trials: Sequence[Trial], within: float) -> list[Trial]:
    """The trials whose loss exceeds the lowest by at most the share `within` of it."""
    bound = (1 + within) * best_trial(trials).loss
    return [trial for trial in trials if trial.loss <= bound]


def arithmetic_means(trials: Sequence[Trial]) -> dict[str, float]:
    """The mean of every constant: the paper's "average"."""
    return {key: sum(t.values[key] for t in trials) / len(trials) for key in trials[0].values}


def geometric_means(trials: Sequence[Trial]) -> dict[str, float]:
    """The mean of every constant in the logarithm, in which they are searched."""
    return {
        key: math.exp(sum(math.log(t.values[key]) for t in trials) / len(trials))
        for key in trials[0].values
    }
