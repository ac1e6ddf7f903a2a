"""Table 4 of Everett et al. as a picture: 12 exponents at fixed steps and 12 at a growing horizon,
the paper's and those measured here after 200, 800 and 3,200 steps.

    python -m plots everett/table_4

Exponents are by the paper's estimator, a power law with an irreducible term, where the widths
determine it; a small bar is the straight line's. The growing horizon has 1 token per parameter
here, 20 in the paper.
"""

from plots import rates, style, tables
from plots.everett import horizons
from plots.everett.entries import Entry, beside, entries, floored
from plots.everett.published import TABLE_4
from plots.findings import HEADER, Report
from plots.tables import CURVE, PARAMETERIZATION

LENGTH = "steps"
TABLES = (
    "everett/figure_11_sgd_desktop",
    "everett/figure_12_adam_wide",
    "everett/figure_13_adafactor_wide",
    "everett/figure_11_sgd",  # the growing horizon of preset laptop
    "everett/figure_12_adam",
    "everett/figure_13_adafactor",
    "everett/length_desktop",
)
TITLES = {"fixed": "fixed steps", "compute_optimal": "growing steps"}
LOOKS = {
    "200 steps": {"color": style.PALETTE[0], "marker": "o"},
    "800 steps": {"color": style.PALETTE[1], "marker": "s"},
    "3200 steps": {"color": style.PALETTE[2], "marker": "^"},
    "1 token per parameter": {"color": style.PALETTE[0], "marker": "o"},
}
Data = list[tuple[str, Entry]]  # length, entry


def read(paths: tables.Paths) -> Data:
    """Entries with the length of their runs: of each optimiser's table, and of the longer runs."""
    tables.expect(paths, *(f"{name.rpartition('/')[2]}.csv" for name in TABLES))
    data: Data = []
    *short, long = paths
    read = [tables.read(path, horizons.COLUMNS) for path in short]  # before anything is fitted
    table = tables.read(long, (*horizons.COLUMNS, PARAMETERIZATION, LENGTH))
    for place, (path, own) in enumerate(zip(short, read, strict=True)):
        optimizer = path.name.partition(".")[0].split("_")[2]
        horizon = "fixed" if place < 3 else "compute_optimal"
        length = "200 steps" if place < 3 else "1 token per parameter"
        found = entries({optimizer: horizons.by_rule(own)})
        data += [(length, entry) for entry in found if entry.horizon == horizon]
    table = table.assign(**{CURVE: table[LENGTH].map("{:.0f} steps".format)})
    lines = rates.lines_of(table, {PARAMETERIZATION: style.LABELS, CURVE: {}}, {})
    for (rule, steps, _), sweeps in lines.items():
        fits = rates.exponent(sweeps), floored(sweeps)
        data.append((steps, Entry("adam", rule, "fixed", "fixed steps", *fits)))
    return data


def findings(data: Data) -> Report:
    """Every measured entry beside the paper's."""
    yield HEADER
    for length, entry in data:
        name = f"{entry.optimizer}, {style.LABELS[entry.rule]}, {length}: exponent of the best rate"
        text = f"{entry.deciding.text(2)}; straight line {entry.fit.value:+.2f}"
        text = text if entry.levels_off else entry.fit.text(2)
        yield beside(name, entry.deciding, entry.published, text)


def draw(data: Data) -> style.Drawn:
    """A panel per horizon, a row per optimiser and parameterisation."""
    title = "Table 4, the paper's and ours"
    figure, axes = style.subplots(title, 1, 2, (2.45, 4.3), sharey=True, sharex=True)
    for axis, (horizon, title) in zip(axes[0], TITLES.items(), strict=True):
        rows = [(o, r) for o, rules in TABLE_4[horizon].items() for r in rules]
        places = {key: len(rows) - 1 - index for index, key in enumerate(rows)}
        for (optimizer, rule), place in places.items():
            published = TABLE_4[horizon][optimizer][rule]
            axis.plot(published, place, "D", color="black", mfc="white", ms=6)
        for length, entry in data:
            if entry.horizon == horizon:
                deciding, look = entry.deciding, LOOKS[length]
                at = places[entry.optimizer, entry.rule] + 0.2 * (list(LOOKS).index(length) % 3 - 1)
                bar = {"elinewidth": 1, "capsize": 2, "ms": 4, "ls": ""}
                axis.errorbar(deciding.value, at, xerr=deciding.bar, **bar, **look)
                axis.plot(entry.fit.value, at, "|", color=look["color"], ms=8)
        labels = [f"{style.OPTIMIZERS[o]}, {style.LABELS[r]}" for o, r in rows]
        axis.set_yticks(list(places.values()), labels, fontsize=8)
        axis.set(title=title, xlabel="exponent of the width", xlim=(-3.1, 1.7))
        for edge in (3.5, 7.5):
            axis.axhline(edge, color="0.6", lw=0.8)
    entries_ = [("the paper", {"color": "black", "marker": "D", "mfc": "white", "ls": ""})]
    entries_ += [(length, {**look, "ls": ""}) for length, look in LOOKS.items()]
    entries_ += [("straight line", {"color": "0.4", "marker": "|", "ls": "", "ms": 8})]
    style.legend(figure, entries_)
    yield "table_4_exponents", figure, []  # a line on seven tables could not be read
