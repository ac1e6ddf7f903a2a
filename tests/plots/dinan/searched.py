"""Tables of searches with known answers: runs of ViTs and of BARTs, as files."""

import math

import pandas as pd

from plots.dinan.published import MODELS
from plots.dinan.vit_search import NEIGHBOURS
from tests.plots.made import lines, written

OPTIMA = {
    "standard": (1e-3, 0.8),
    "neural_tangent": (20.0, 4e-5),
    "hybrid": (4.0, 2e-4),
    "maximal_update": (1.0, 8e-4),
}
# Best accuracies of the three seeds at the optimum.
SEEDS = {
    "standard": (0.80, 0.81, 0.82),
    "neural_tangent": (0.85, 0.86, 0.87),
    "hybrid": (0.88, 0.88, 0.88),
    "maximal_update": (0.80, 0.80, 0.80),
}
STEPS, WARM_UP = 30, 5


def point(strategy, rate, decay, best, *, seed=0, status="finished", loss=None, dips=()):
    """(row of results, rows of metrics): accuracy rises to `best`; it drops to 0 for one
    evaluation at every step of `dips`, and the training loss doubles there."""
    run = f"{strategy}-{rate:g}-{decay:g}-{seed}"
    key = {"curve": strategy, "optimizer.lr": rate, "optimizer.weight_decay": decay, "seed": seed}
    lost = status != "finished"
    result = {
        **key,
        "status": status,
        "best_eval_top1": math.nan if lost else best,
        "run": run,
        "final_eval_loss": math.nan if lost else 1 - best if loss is None else loss,
        "model.width": 768,
    }
    lines = [
        {
            **key,
            "run": run,
            "step": step,
            "epoch": step / 2,
            "gradient_norm": 1.0,
            "train_loss": 2.0 if step in dips else 1.0,
            "lr_factor": min(step / WARM_UP, (STEPS + WARM_UP - step) / STEPS),
            "eval_loss": 1.0,
            "eval_top1": 0.0 if step in dips else best * step / STEPS,
            "eval_top5": 1.0,
        }
        for step in range(1, STEPS + 1)
    ]
    return result, lines


def search(strategy, *, seeds=3, without=(), accuracies=None, **options):
    """An optimum with its seeds, and neighbours five points lower by default."""
    rate, decay = OPTIMA[strategy]
    found = [
        point(strategy, rate, decay, best, seed=seed, **options)
        for seed, best in enumerate(SEEDS[strategy][:seeds])
    ]
    for index, (up, wider) in enumerate(NEIGHBOURS):
        if index not in without:
            best = (accuracies or {}).get(index, SEEDS[strategy][0] - 0.05)
            found.append(point(strategy, rate * 2.0**up, decay * 2.0**wider, best))
    return found


def complete(**options):
    return frames([p for strategy in OPTIMA for p in search(strategy, **options)])


RATES = tuple(1e-3 * 2.0**octave for octave in (-3, -2, -1, 0, 1, 2))  # mapped
STEPS = 100


def run(
    strategy,
    mapped,
    loss,
    *,
    width=1024,
    seed=0,
    status="finished",
    skips=(),
    steps=STEPS,
    **columns,
):
    """(row of results, rows of metrics): the loss falls on a line from twice `loss` to it.

    The final loss in the results falls with the rate: it is not what counts. `skips` are the steps,
    of those logged, at which one more step had been skipped.
    """
    power = 1 if strategy == "standard" else width**1.5
    name = f"{strategy}-{width}-{mapped:.4g}-{seed}"
    key = {
        "curve": strategy,
        "prescription.strategy": strategy,
        "optimizer.lr": mapped * power,
        "optimizer.weight_decay": 0.01 / power,
        "model.width": width,
        "seed": seed,
        "run": name,
    }
    lost = status != "finished"
    result = {
        **key,
        "status": status,
        "best_eval_loss": loss,
        "final_eval_loss": math.nan if lost else 9 - math.log2(mapped),
        "parameters": MODELS.get(width, ("", 0.0))[1],
        **columns,
    }
    lines = [
        {
            **key,
            "step": step,
            "train_loss": 1.0,
            "eval_loss": math.nan if step % 10 else loss * (2 - step / steps),
            "skipped_steps": sum(skip <= step for skip in skips),
        }
        for step in range(5, steps + 1, 5)
    ]
    return result, lines


def parabola(strategy, *, best=1e-3, lowest=2.0, curvature=0.04, width=1024, seeds=(0,), **options):
    """Losses on the grid around a mapped optimum; the seed shifts all by 0.01."""
    return [
        run(
            strategy,
            rate,
            lowest + curvature * math.log2(rate / best) ** 2 + 0.01 * seed,
            width=width,
            seed=seed,
            **options,
        )
        for rate in RATES
        for seed in seeds
    ]


def both(**options):
    """Neural-tangent is flatter by half and 0.05 higher."""
    return parabola("standard", **options) + parabola(
        "neural_tangent", lowest=2.05, curvature=0.02, **options
    )


def r2c2(**options):
    points = (("standard", 3.0), ("neural_tangent", 2.4))
    return [run(s, 7e-4, loss, width=2048, steps=50, **options) for s, loss in points]


def frames(points):
    """(results, metrics) as tables."""
    results, metrics = zip(*points, strict=True)
    return pd.DataFrame(results), pd.DataFrame([line for lines in metrics for line in lines])


def tables_of(folder, points):
    """The files of a search's results and metrics."""
    results, metrics = frames(points)
    return written(folder, results=results, metrics=metrics)


def read_rows(module, folder, rows):
    """What a figure's module reads from a results.csv of these rows."""
    return module.read(written(folder, results=rows))


def found(module, folder, points):
    """A figure's findings of a search with these runs, by name."""
    return lines(module.findings(module.read(tables_of(folder, points))))
