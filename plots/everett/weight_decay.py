"""Runs with and without independent weight decay (Everett et al., Appendix F, Figure 9).

    python -m plots everett/weight_decay [with_decay.csv without_decay.csv]

Reads the table of Figure 9 and, for the runs without decay, that of Figure 12. A column per
parameterisation; loss against rate with decay for both horizons; best loss against size with and
without.
"""

import pandas as pd

from plots import naming, panels, rates, style, tables
from plots.everett import horizons
from plots.everett.horizons import HORIZONS
from plots.findings import HEADER, Report
from plots.tables import CURVE, DECAY, PARAMETERIZATION, WIDTH

TABLES = ("everett/figure_9_weight_decay", "everett/figure_12_adam")
CURVES = {f"decay_{horizon}": horizon for horizon in HORIZONS}
PLAIN = (*horizons.COLUMNS, tables.PARAMETERS)


def read(paths: tables.Paths) -> tuple[pd.DataFrame, pd.DataFrame]:
    """(with decay, without decay). A curve of one's own is a column of its own."""
    sources = {"results.csv (with decay)": (*PLAIN, PARAMETERIZATION), "results.csv": PLAIN}
    decayed, plain = tables.read_each(paths, sources)
    tables.only(decayed, paths[0], CURVE, CURVES)
    own = ~decayed[CURVE].isin(CURVES)
    grows = decayed[tables.HORIZON] != "fixed" if tables.HORIZON in decayed else False
    names = decayed[CURVE] + ", " + decayed[PARAMETERIZATION]
    curves = decayed[CURVE].mask(own, "decay_fixed").mask(own & grows, "decay_compute_optimal")
    rules = decayed[PARAMETERIZATION].mask(own, names)
    decayed = decayed.assign(**{PARAMETERIZATION: rules, CURVE: curves})
    return decayed, horizons.by_rule(plain)


def lines(table: pd.DataFrame) -> rates.Lines:
    """(parameterisation, horizon) -> sweeps by width of the runs with decay."""
    by_curve = rates.lines_of(table, {PARAMETERIZATION: style.LABELS}, CURVES)
    return {(rule, CURVES[curve]): sweeps for (rule, curve), sweeps in by_curve.items()}


def findings(data: tuple[pd.DataFrame, pd.DataFrame]) -> Report:
    """The exponents with and without decay, and what decay changes at the largest width."""
    decayed, plain = data
    with_decay, without = lines(decayed), horizons.lines(plain)
    rules = naming.present(style.LABELS, decayed[PARAMETERIZATION])
    exponents, gains = [], []
    for horizon, words in horizons.horizon_labels(decayed).items():
        for rule, label in rules.items():
            pair = [runs_of.get((rule, horizon), {}) for runs_of in (without, with_decay)]
            if not all(pair):
                continue
            old, new = map(rates.exponent, pair)
            change, name = new - old, f"exponent with decay - without: {label}, {words}"
            text = f"{change.through_widths()} ({new.value:+.2f}, {old.value:+.2f})"
            exponents.append(change.judged(name, "equal", "similar", text=text))
            name = f"gain in loss from decay: {label}, {words}"
            gains.append(rates.compared(name, *pair, "gains", "slight gain"))
    keys = [CURVE, PARAMETERIZATION]
    yield horizons.EXPONENT_NOTE
    yield HEADER
    yield from (*exponents, *gains)
    yield from rates.basis(decayed, with_decay, keys)
    yield from (f"without decay, {line}" for line in rates.basis(plain, without, keys))


def draw(data: tuple[pd.DataFrame, pd.DataFrame]) -> style.Drawn:
    """Figure 9."""
    decayed, plain = data
    with_decay, without = lines(decayed), horizons.lines(plain)
    labels, shown = horizons.horizon_labels(decayed), horizons.drawn_horizons(with_decay)
    rules = naming.present(style.LABELS, decayed[PARAMETERIZATION])
    values = sorted(decayed[DECAY].dropna().unique()) if DECAY in decayed else []
    per_step = f" of {', '.join(f'{value:g}' for value in values)} per step" if values else ""
    title = f"Adam, one global learning rate, independent weight decay{per_step}"
    figure, axes = style.subplots(title, len(shown) + 1, len(rules), (2.5, 2.3))
    colors = style.width_colors(sorted(map(int, decayed[WIDTH].unique())))
    horizons.draw_rows(axes[:-1], with_decay, rules, labels, colors)
    looks = naming.looks(list(rules))
    drawn = [
        [
            (runs_of.get((rule, horizon)), {"color": color, **horizons.LOOKS[horizon]})
            for horizon in shown
            for runs_of, color in ((with_decay, looks[rule]["color"]), (without, "gray"))
        ]
        for rule in rules
    ]
    panels.size_panels(axes[-1], drawn)
    for axis in axes[-1, 1:]:
        axis.sharey(axes[-1, 0])
        axis.tick_params(labelleft=False)
    axes[-1, 0].autoscale(axis="y")  # over all panels; sharey takes the first one's range
    axes[-1, 0].set_ylabel(f"best rate's\n{style.LOSS_LABEL}")
    entries = [*style.width_entries(colors), *horizons.legend_entries(shown, labels, 4)]
    entries.append(("without decay", {"color": "gray", "marker": "o", "ms": 4}))
    entries += style.rate_entries(with_decay.items())
    style.legend(figure, [*entries, *panels.lost_entries({**with_decay, **without})])
    yield "figure_9_weight_decay", figure, [0, 1]
