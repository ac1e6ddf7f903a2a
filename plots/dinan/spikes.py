"""What counts as a mid-training spike.

Dinan et al. (Part II, section 1E) count spikes and never define one. Here:

- accuracy spike: an evaluation after warm-up whose top-1 accuracy lies more than 5 points below the
  best of all evaluations before it;
- loss spike: a logged training loss after warm-up that lies above m + max(6 MAD, 5 % of m), where m
  is the median of the WINDOW logged lines before it (at least FEWEST; those of the warm-up count)
  and MAD their median absolute deviation from m.

Consecutive lines beyond a threshold are one spike, however long. Warm-up ends with the first line
whose learning-rate factor is the highest of the run. Losses that are not finite are divergence and
no spike. Windows are counted in logged lines, so counts compare only between runs that log equally
often. Gaussian noise alone of 10 % per line crosses the loss threshold in 0.4 of 1,000 lines with a
full window and in 2 of 1,000 with a window of 20.
"""

import math
from collections.abc import Sequence
from statistics import median

import pandas as pd

ACCURACY_DROP = 0.05
WINDOW, FEWEST = 50, 20
MADS, SHARE = 6.0, 0.05
STEP, TRAIN_LOSS, LR_FACTOR, TOP1 = "step", "train_loss", "lr_factor", "eval_top1"
NOTE = (
    f"spikes, after warm-up: top-1 more than {100 * ACCURACY_DROP:g} points below its best "
    f"so far; training loss above m + max({MADS:g} MAD, {100 * SHARE:g}% of m), m "
    f"the median of the {WINDOW} logged lines before"
)


def accuracy_spikes(steps: Sequence[int], top1: Sequence[float], warm_up: int) -> list[int]:
    """The steps at which accuracy spikes begin; accuracies are fractions."""
    best, beyond = -math.inf, []
    for step, value in zip(steps, top1, strict=True):
        # A drop of exactly the threshold, as the difference of two binary fractions, is none.
        beyond.append(step >= warm_up and best - value > ACCURACY_DROP + 1e-9)
        best = max(best, value)
    return _begins(steps, beyond)


def loss_spikes(steps: Sequence[int], losses: Sequence[float], warm_up: int) -> list[int]:
    """The steps at which loss spikes begin."""
    lines = [(step, loss) for step, loss in zip(steps, losses, strict=True) if math.isfinite(loss)]
    values = [loss for _, loss in lines]
    beyond = []
    for index, (step, loss) in enumerate(lines):
        before = values[max(0, index - WINDOW) : index]
        if step < warm_up or len(before) < FEWEST:
            beyond.append(False)
            continue
        middle = median(before)
        deviation = median(abs(value - middle) for value in before)
        beyond.append(loss > middle + max(MADS * deviation, SHARE * middle))
    return _begins([step for step, _ in lines], beyond)


def _begins(steps: Sequence[int], beyond: Sequence[bool]) -> list[int]:
    """The first step of every unbroken series of lines beyond a threshold."""
    earlier = [False, *beyond[:-1]]
    points = zip(steps, beyond, earlier, strict=True) if steps else ()
    return [step for step, now, then in points if now and not then]


def of_run(rows: pd.DataFrame) -> tuple[list[int], list[int]]:
    """(accuracy spikes, loss spikes) of one run: its rows of metrics.csv by rising step."""
    trained = rows.dropna(subset=[TRAIN_LOSS, LR_FACTOR])
    peak = trained.loc[trained[LR_FACTOR] == trained[LR_FACTOR].max(), STEP]
    warm_up = peak.iloc[0] if len(peak) else 0
    evaluated = rows.dropna(subset=[TOP1])
    top1 = accuracy_spikes(evaluated[STEP].tolist(), evaluated[TOP1].tolist(), warm_up)
    return top1, loss_spikes(trained[STEP].tolist(), trained[TRAIN_LOSS].tolist(), warm_up)
