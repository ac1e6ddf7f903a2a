"""Eval loss against size under four interventions (Everett et al., Figures 2 and 3).

    python -m plots everett/loss_vs_size [results.csv ...]

One row per optimiser of a table: one global learning rate; per-layer exponents under full
alignment; these with tuned constants; exponents under no alignment with tuned constants. Every
point is the lowest loss of a learning-rate sweep. One figure per table, which has its name.
Embeddings of scale 1 in all four parameterisations (embedding_1.yaml) are ours.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pandas as pd

from plots import naming, panels, rates, style, tables
from plots.everett.published import BEST, INTERVENTIONS, STANDARD_BEATS_MUP
from plots.findings import HEADER, Finding, Report
from plots.naming import AnyOf, split, told_apart
from plots.tables import CURVE, OPTIMIZER, PARAMETERIZATION

TABLES = AnyOf(
    f"everett/{name}"
    for name in ("figure_2_adam", "figure_3_sgd", "figure_3_param_scaling", "embedding_1")
)
CURVES = {
    "global": "one global rate",
    "full": "full alignment",
    "full_constants": "full + constants",
    "none_constants": "no alignment + constants",
}
FAIR = "full_constants"  # where the paper compares parameterisations: both are tuned
EMBEDDING = "prescription.embedding_std"
OPTIMIZERS = ("adam", "sgd", "adam_param_scaling")  # of Figures 2 and 3
STEPS = (("global", "full"), ("full", "full_constants"), ("full_constants", "none_constants"))
KEYS = [OPTIMIZER, PARAMETERIZATION, CURVE]
COLUMNS = (*tables.RESULTS, tables.PARAMETERS, *KEYS, tables.WIDTH, tables.RATE)


def read(paths: tables.Paths) -> dict[str, pd.DataFrame]:
    """File name -> table of Figure 2 or 3; one of several optimisers names them in its curves."""
    data = {}
    for name, (_, path) in told_apart(paths, tables.name).items():
        table = tables.read(path, COLUMNS).dropna(subset=KEYS)
        plain = {c: split(c, ("adam", "param_scaling"), CURVES) for c in table[CURVE].unique()}
        curves = table[CURVE].map({c: parts[1] if parts else c for c, parts in plain.items()})
        data[name] = table.assign(**{CURVE: curves})
    return data


def lines(table: pd.DataFrame) -> rates.Lines:
    """(optimiser, parameterisation, curve) -> sweeps by width, of what has a finished run."""
    keys = {OPTIMIZER: style.OPTIMIZERS, PARAMETERIZATION: style.LABELS}
    return rates.lines_of(table, keys, CURVES)


def ours(table: pd.DataFrame) -> str:
    """Words for a table of which the paper has no figure: of embeddings of scale 1."""
    return "embeddings of 1: " if EMBEDDING in table and (table[EMBEDDING] == 1).all() else ""


def findings(data: Mapping[str, pd.DataFrame]) -> Report:
    """What every intervention changes at the largest width and what the paper says, and what muP
    loses against standard, table by table; then the lowest loss of all."""
    basis = "loss before minus after in nats ± its error from seeds, at the largest width"
    every = {name: lines(table) for name, table in data.items()}
    for name, table in data.items():
        sweeps_of, place = every[name], ours(table)
        yield f"{name}: {basis}"
        yield HEADER
        own = [("global", curve) for curve in table[CURVE].unique() if curve not in CURVES]
        for optimizer in naming.present(style.OPTIMIZERS, table[OPTIMIZER]):
            for before, after in (*STEPS, *own):
                for rule, label in naming.present(style.LABELS, table[PARAMETERIZATION]).items():
                    keys = ((optimizer, rule, curve) for curve in (before, after))
                    pair = [sweeps_of.get(key, {}) for key in keys]
                    gains = INTERVENTIONS.get(optimizer, {}).get((before, after), {}).get(rule)
                    claim = None if gains is None or place else "gains" if gains else "loses"
                    step = f"{place}{optimizer}, {label}: {before} -> {after}"
                    if all(pair):
                        yield rates.compared(step, *pair, claim)
            claim = "gains" if optimizer == STANDARD_BEATS_MUP and not place else None
            one_rate, fair, tuned = ("standard", "global"), ("standard", FAIR), ("mup", FAIR)
            for words, *keys in (
                (f"muP - standard: {FAIR}", tuned, fair),
                # Section 4.2: the comparison of muTransfer
                ("tuned muP against standard with one rate", one_rate, tuned),
            ):
                pair = [sweeps_of.get((optimizer, *key), {}) for key in keys]
                if all(pair):
                    yield rates.compared(f"{place}{optimizer}, {words}", *pair, claim)
            for rule, label in naming.present(style.LABELS, table[PARAMETERIZATION]).items():
                if sweeps := sweeps_of.get((optimizer, rule, "full")):
                    fit = rates.exponent(sweeps)
                    name = f"{place}{optimizer}, {label}, full: exponent of D in the best rate"
                    claims = ("no claim", "") if place else ("0", fit.distance(0.0))
                    yield Finding(name, fit.text(), *claims, fit)
        yield from rates.basis(table, sweeps_of, KEYS)
        if place:
            yield best([sweeps_of], place)
    yield best([every[name] for name in data if not ours(data[name])])


def best(tables_of_lines: Sequence[rates.Lines], place: str = "") -> Finding:
    """The loss of the paper's best setting minus the lowest of all others, at the largest width:
    below zero if that setting is the best. The paper speaks of all three optimisers, so that tables
    of some of them are compared without a claim."""
    every = [(key, sweeps) for table in tables_of_lines for key, sweeps in table.items()]
    optimizers = {optimizer for (optimizer, _, _), _ in every}
    whole = optimizers >= set(OPTIMIZERS) and not place
    name = f"{place}lowest loss of {'all' if whole else ', '.join(sorted(optimizers))}: "
    name += f"{', '.join(BEST)} - next best"
    largest = max((width for _, sweeps in every for width in sweeps), default=0)
    ended = {key: sweeps for key, sweeps in every if largest in sweeps and sweeps[largest].ended}
    others = {key: sweeps[largest].loss for key, sweeps in ended.items() if key != BEST}
    if BEST not in ended or not others:
        return Finding(name, f"not measured at D = {largest}", "lowest", "not measured")
    key, by_width = min(others, key=lambda one: others[one]), {}
    for width in sorted(ended[BEST].keys() & ended[key].keys()):
        # Errors by seed have too few degrees of freedom for the lowest of many.
        by_width[width] = rates.unpaired(ended[BEST][width], ended[key][width])
    change = by_width[largest]
    measured = f"{change.text()} at D = {largest} (next: {', '.join(key)})"
    if change.value < 0:  # a loss of constants near an edge is an upper bound
        change = replace(change, blocked=max(s[largest].blocked for s in ended.values()))
    verdict = (-change).claimed_gain()
    # The lowest of many losses is biased downwards.
    if verdict == "disagrees" and change.value <= change.reach_of(len(others)) * change.error:
        verdict = "within noise"
    return Finding(name, measured, *(("lowest", verdict) if whole else ("no claim", "")), change)


def draw(data: Mapping[str, pd.DataFrame]) -> style.Drawn:
    """One figure per table: a row per optimiser, a column per intervention."""
    for index, (name, table) in enumerate(data.items()):
        sweeps_of, curves = lines(table), naming.present(CURVES, table[CURVE])
        if not ours(table):  # all panels of the paper's, those without a run, too
            curves = CURVES | curves
        optimizers = naming.present(style.OPTIMIZERS, table[OPTIMIZER])
        rules = naming.present(style.LABELS, table[PARAMETERIZATION])
        looks = naming.looks(list(rules))
        names, shape = " and ".join(optimizers.values()), (len(optimizers), len(curves))
        title = f"{ours(table)}{names}, loss against size by intervention"
        figure, axes = style.subplots(title, *shape, (2.5, 2.5), sharex=True, sharey="row")
        for row, optimizer in zip(axes, optimizers, strict=True):
            drawn = (
                [(sweeps_of.get((optimizer, rule, curve)), looks[rule]) for rule in rules]
                for curve in curves
            )
            panels.size_panels(row, drawn)
        rows = (f"{label}\n{style.LOSS_LABEL}" for label in optimizers.values())
        style.label_grid(axes, curves.values(), y=rows)
        style.legend(figure, [*naming.rule_entries(rules), *panels.lost_entries(sweeps_of)])
        yield name, figure, [index]
