"""What holds for every figure of Dinan et al., Part II: the order of its tables, gaps in them, and
what is said of wrong ones."""

import math

import pandas as pd
import pytest
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.text import Text

from plots.__main__ import make
from plots.catalogue import load
from plots.dinan.searches import by_accuracy, by_loss
from plots.tables import TableError
from tests.plots.dinan.searched import RATES, both, complete, frames, point, r2c2, run, written

VIT = ("dinan/vit_search", "dinan/vit_strategies")
BART = ("dinan/bart_rates", "dinan/bart_strategies")
DRAWN = {
    "dinan/vit_search": {"figure_1_vit_search", "figure_1_vit_optima"},
    "dinan/vit_strategies": {"figure_2_vit_strategies"},
    "dinan/bart_rates": {"figure_3_bart_rates", "figure_3_bart_optima"},
    "dinan/bart_strategies": {"figure_4_bart_strategies", "figure_5_bart_r2c2"},
}
each_figure = pytest.mark.parametrize("name", [*VIT, *BART])


def whole(name):
    """(results, metrics) of every sweep that the figure is drawn of."""
    if name in VIT:
        return [complete(dips=(25,))]
    seeds = {"seeds": (0, 1)}
    sweeps = [frames(both(width=64, skips=(20,), **seeds) + both(width=128, **seeds))]
    return sweeps + [frames(r2c2())] * (name == "dinan/bart_strategies")


def shown(figure):
    """The words, lines and rectangles of a figure."""
    found = [text.get_text() for text in figure.findobj(Text)]
    found += [(line.get_color(), line.get_xydata().tolist()) for line in figure.findobj(Line2D)]
    found += [(box.get_facecolor(), box.get_bbox().bounds) for box in figure.findobj(Rectangle)]
    return repr(found)


@each_figure
def test_neither_the_order_of_tables_nor_that_of_rows_matters(tmp_path, name):
    figure, made = load(name), []
    for order in (1, -1):
        paths = []
        for index, (results, metrics) in enumerate(whole(name)):
            folder = tmp_path / f"{order}{index}"
            paths += written(folder, results[::order], metrics[::order])
        data = figure.read(paths[::order])
        made.append(
            (
                "\n".join(map(str, figure.findings(data))),
                {stem: shown(item) for stem, item in figure.draw(data)},
            )
        )
    (text, drawn), again = made
    assert (text, drawn) == again
    assert ("median of the 50" if name in VIT else "standard errors") in text
    assert {*drawn} == DRAWN[name] and all(len(found) > 1000 for found in drawn.values())


@each_figure
def test_a_search_with_holes_is_drawn_all_the_same(tmp_path, name):
    """One strategy has one run, another one that diverged without a line and one that failed."""
    if name in VIT:
        made = [
            point("hybrid", rate, 2e-4, 0.8, status=status)[0]
            for rate, status in ((4.0, "diverged"), (8.0, "failed"))
        ]
        runs, left_out = [point("standard", 1e-3, 0.8, 0.8)], "hybrid"
    else:
        made = [
            run("neural_tangent", rate, math.nan, status=status)[0]
            for rate, status in ((1e-3, "diverged"), (2e-3, "failed"))
        ]
        runs, left_out = [run("standard", 1e-3, 2.0)], "neural-tangent"
    paths = written(tmp_path, *frames([*runs, *((row, []) for row in made)]))
    text, files = make(name, paths, tmp_path / "out")
    assert all(file.stat().st_size for file in files)
    assert "not measured" in text and text.endswith(f"{left_out}: 1 failed run left out")


@pytest.mark.parametrize("name", BART)
def test_diverged_runs_alone_are_drawn(tmp_path, name):
    runs = [
        run(strategy, rate, 9.0, status="diverged")
        for strategy in ("standard", "neural_tangent")
        for rate in RATES[:2]
    ]
    text, files = make(name, written(tmp_path, *frames(runs)), tmp_path / "out")
    assert files and ("every run diverged" in text or "not measured" in text)


@each_figure
@pytest.mark.parametrize("bad", [0, 1])
def test_a_table_of_another_figure_is_one_line(tmp_path, name, bad, refused):
    paths = written(tmp_path, *whole(name)[0])
    pd.read_csv(paths[bad]).assign(curve="unheard_of").to_csv(paths[bad], index=False)
    message = "no row with curve standard, neural_tangent"
    assert refused(name, *paths).startswith(f"error: {paths[bad]}: {message}")


def without(column):
    return lambda results, metrics: (results.drop(columns=column), metrics)


def changed(column, value):
    def change(results, metrics):
        results = results.astype({column: object})
        results.loc[3, column] = value
        return results, metrics

    return change


# Of both, with the third row's run, the number that runs are compared by and its evaluations.
EACH = [
    (lambda own: without(own.best), "results.csv: no column '{best}'; is it the results.csv of"),
    (
        lambda own: without("status"),
        "expected results.csv and metrics.csv of every sweep; the "
        "results are the tables with a column 'status'",
    ),
    (
        lambda own: lambda r, m: (r, m.drop(columns=own.logged)),
        "metrics.csv: no column '{logged}'; is it the metrics.csv of the sweep",
    ),
    (
        lambda own: lambda r, m: (r, m[m.run != r.run[3]]),
        "metrics.csv: no {logged} of run {run}; are results and metrics of the same sweep",
    ),
    (lambda own: changed("optimizer.lr", "fast"), "column 'optimizer.lr' has no number: .*fast"),
    (lambda own: changed("optimizer.lr", math.nan), "run {run} has no optimizer.lr above 0"),
    (lambda own: changed("optimizer.weight_decay", -1), "has no optimizer.weight_decay "),
    (lambda own: changed(own.best, math.nan), "is finished but has no {best}"),
    (lambda own: changed("final_eval_loss", math.nan), "is finished but has no final_eval_loss"),
    (lambda own: changed("optimizer.lr", own.taken), "two runs with curve standard, {twice}"),
]


class Vit:
    read, tables = by_accuracy, staticmethod(complete)
    best, logged, run, taken = "best_eval_top1", "eval_top1", "standard-0.002-0.8-0", 1e-3
    twice = (
        "optimizer.lr 0.001, optimizer.weight_decay 0.8, seed 0; expected one; is it the "
        "results.csv of one search per strategy"
    )


class Bart:
    read, tables = by_loss, staticmethod(lambda: frames(both()))
    best, logged, run, taken = "best_eval_loss", "eval_loss", "standard-1024-0.001-0", 5e-4
    twice = (
        "model.width 1024, optimizer.lr 0.0005, seed 0; expected one; is it the results.csv "
        "of a sweep with one weight decay per rate"
    )


BART_ALONE = [
    (without("model.width"), "results.csv: no column 'model.width'"),
    (
        lambda r, m: (r, m.assign(skipped_steps="many")),
        "metrics.csv: column 'skipped_steps' has no number: .*many",
    ),
    (changed("model.width", math.nan), "column 'model.width' has no number"),
    (lambda r, m: (r.assign(status="failed"), m), "every run failed"),
]
WRONG = [(own, change(own), message) for own in (Vit, Bart) for change, message in EACH]
WRONG += [(Bart, change, message) for change, message in BART_ALONE]
WRONG += [(Vit, lambda r, m: (r, m.drop(columns="lr_factor")), "no column 'lr_factor'")]


@pytest.mark.parametrize(("own", "change", "message"), WRONG)
def test_what_is_wrong_with_a_table_is_said(tmp_path, own, change, message):
    paths = written(tmp_path, *change(*own.tables()))
    words = {key: getattr(own, key) for key in ("best", "logged", "run", "twice")}
    with pytest.raises(TableError, match=message.format(**words)) as caught:
        own.read(paths)
    assert str(caught.value).startswith(str(tmp_path)) and "\n" not in str(caught.value)
