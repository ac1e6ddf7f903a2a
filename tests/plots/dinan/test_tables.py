"""Figures of searches: drawn with holes in their tables, and refused in one line."""

import math

import pytest

from plots.__main__ import make
from tests.plots.dinan.searched import both, complete, frames, point, r2c2, run, tables_of
from tests.plots.made import written

VIT = {
    "dinan/vit_search": {"figure_1_vit_search", "figure_1_vit_optima"},
    "dinan/vit_strategies": {"figure_2_vit_strategies"},
}
BART = {
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


@pytest.mark.parametrize("name", ["dinan/vit_search", "dinan/bart_strategies"])
def test_the_order_of_rows_does_not_matter(tmp_path, name):
    made = []
    for order in (1, -1):
        paths = []
        for index, (results, metrics) in enumerate(whole(name)):
            paths += written(
                tmp_path / f"{order}{index}", results=results[::order], metrics=metrics[::order]
            )
        text, files = make(name, paths, tmp_path / f"out{order}")
        made.append((text, [f.read_bytes() for f in files if f.suffix == ".png"]))
    assert made[0] == made[1]
    assert {file.stem for file in files} == {**VIT, **BART}[name]


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
    paths = tables_of(tmp_path, [*runs, *((row, []) for row in made)])
    text, files = make(name, paths, tmp_path / "out")
    assert all(file.stat().st_size for file in files)
    assert text.endswith(f"{left_out}: 1 failed left out")
