"""Learning-rate sweeps over width: loss curves, how the optimum moves, and the findings in words.

    python -m plots.quickstart [results.csv] [--out FOLDER]

Reads a sweep's table and nothing else; without arguments, the shipped one. Writes PNG and PDF.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from measure.fits import Optimum, PowerLaw, optimum, power_law
from plots.tables import TableError

HERE = Path(__file__).resolve().parent
WIDTH, RATE, LOSS = "model.width", "optimizer.lr", "final_eval_loss"
STANDARD, MUP = "standard_global", "mup_full"
TITLES = {
    STANDARD: "standard, one global rate",
    MUP: "muP, full-alignment exponents",
}
TUNED_AT, USED_AT = 64, 256
COLUMNS = ("curve", WIDTH, RATE, "seed", "status", LOSS)


@dataclass(frozen=True)
class Finding:
    """A measured number beside the band it was expected in."""

    name: str
    value: float
    low: float
    high: float
    note: str = ""

    @property
    def met(self) -> bool:
        """Whether the value lies in the band."""
        return self.low <= self.value <= self.high

    def line(self) -> str:
        """The finding in one line."""
        verdict = "as expected" if self.met else "MISSED"
        return f"{self.name:<58}{self.value:+8.3f}   {self._band():<18}{verdict:<13}{self.note}"

    def _band(self) -> str:
        if math.isinf(self.high):
            return f"> {self.low:g}"
        return f"< {self.high:g}" if math.isinf(self.low) else f"[{self.low:g}, {self.high:g}]"


def read(path: Path) -> pd.DataFrame:
    """A sweep's table; TableError if it is missing, lacks a column or is empty."""
    try:
        table = pd.read_csv(path)
    except (OSError, pd.errors.ParserError, pd.errors.EmptyDataError, UnicodeDecodeError) as error:
        raise TableError(f"{path}: cannot read the table: {error}") from None
    missing = [column for column in COLUMNS if column not in table]
    if missing:
        raise TableError(f"{path}: no column {missing[0]!r}; is it the results.csv of this sweep?")
    if table.empty:
        raise TableError(f"{path}: no runs in it; run the sweep first")
    for curve in (STANDARD, MUP):
        best = optima(table, curve)
        for width in (TUNED_AT, USED_AT):
            if width not in best:
                raise TableError(
                    f"{path}: no finished run of curve {curve!r} at {WIDTH} {width}; "
                    "finish the sweep first"
                )
    return table


def mean_losses(table: pd.DataFrame, curve: str, width: int) -> dict[float, float]:
    """Learning rate -> mean final loss over seeds, infinite where a seed diverged."""
    rows = table[(table.curve == curve) & (table[WIDTH] == width) & (table.status != "failed")]
    losses = rows[LOSS].fillna(math.inf).groupby(rows[RATE]).mean()
    return dict(losses.items())


def optima(table: pd.DataFrame, curve: str) -> dict[int, Optimum]:
    """Width -> optimum of the learning rate."""
    widths = sorted(table[table.curve == curve][WIDTH].unique())
    losses = {int(width): mean_losses(table, curve, width) for width in widths}
    finite = {w: row for w, row in losses.items() if any(map(math.isfinite, row.values()))}
    return {width: optimum(row) for width, row in finite.items()}


def exponent(best: Mapping[int, Optimum]) -> PowerLaw:
    """The power of width in the optimal learning rate."""
    return power_law(list(best), [entry.value for entry in best.values()])


def transfer_penalty(table: pd.DataFrame, curve: str) -> float:
    """Loss at USED_AT with the best grid rate of TUNED_AT, above the loss with its own; NaN if
    that rate was not run there."""
    best = optima(table, curve)
    tuned = best[TUNED_AT].grid_value
    return mean_losses(table, curve, USED_AT).get(tuned, math.nan) - best[USED_AT].loss


def seed_spread(table: pd.DataFrame, curve: str) -> tuple[float, int]:
    """(standard deviation of the final loss over seeds, number of points it is pooled over)."""
    rows = table[(table.curve == curve) & table[LOSS].notna()]
    groups = rows.groupby([WIDTH, RATE])[LOSS]
    variances = groups.var()[groups.count() > 1]
    return math.sqrt(variances.mean()) if len(variances) else math.nan, len(variances)


def findings(table: pd.DataFrame) -> list[Finding]:
    """The quickstart's claims, measured."""
    laws = {curve: exponent(optima(table, curve)) for curve in (STANDARD, MUP)}
    penalties = {curve: transfer_penalty(table, curve) for curve in (STANDARD, MUP)}
    notes = {curve: _law_note(law) for curve, law in laws.items()}
    name = "exponent of the optimal rate in width, "
    transfer = f"loss at D={USED_AT} with the rate of D={TUNED_AT}, "
    return [
        Finding(name + "standard", laws[STANDARD].exponent, -1.3, -0.5, notes[STANDARD]),
        Finding(name + "muP", laws[MUP].exponent, -0.3, 0.3, notes[MUP]),
        Finding("muP minus standard", laws[MUP].exponent - laws[STANDARD].exponent, 0.5, math.inf),
        Finding(transfer + "standard", penalties[STANDARD], 0.05, math.inf, "nats above the best"),
        Finding(transfer + "muP", penalties[MUP], -math.inf, 0.05, "nats above the best"),
    ]


def _law_note(law: PowerLaw) -> str:
    return f"+- {law.error:.2f} (n = {law.n} widths)"


def report(table: pd.DataFrame) -> str:
    """The findings in words, with what they rest on."""
    lines = ["finding".ljust(58) + "measured   expected", *(f.line() for f in findings(table))]
    for curve in (STANDARD, MUP):
        spread, n = seed_spread(table, curve)
        lines.append(f"{TITLES[curve]}: final loss varies by {spread:.3f} nats over seeds "
                     f"(standard deviation, pooled over {n} points with two seeds)")
        edges = [str(width) for width, best in optima(table, curve).items() if not best.inside]
        if edges:
            note = f"no parabola at width {', '.join(edges)}; grid point used"
            lines.append(f"{TITLES[curve]}: {note}")
    return "\n".join(lines)


def draw(table: pd.DataFrame, folder: Path) -> list[Path]:
    """Draws the figure into `folder` as width_sweep.png and .pdf and returns their paths."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import seaborn as sns

    sns.set_theme(style="whitegrid", context="paper")
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.4), constrained_layout=True)
    widths = sorted(table[WIDTH].unique())
    colors = dict(zip(widths, sns.color_palette("viridis", len(widths))))
    for axis, curve in zip(axes, (STANDARD, MUP)):
        _draw_losses(axis, table, curve, colors)
    axes[1].sharey(axes[0])
    axes[0].set_ylim(*_loss_limits(table))
    axes[0].set_ylabel("evaluation loss (nats per token)")
    axes[0].legend(title="width D", fontsize=7, title_fontsize=7)
    _draw_optima(axes[2], table, sns.color_palette("deep"))
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"width_sweep.{kind}" for kind in ("png", "pdf")]
    for path in paths:
        # Without a date in the file, the same table gives the same bytes.
        metadata = {"CreationDate": None} if path.suffix == ".pdf" else {}
        figure.savefig(path, dpi=160, metadata=metadata)
    plt.close(figure)
    return paths


def _draw_losses(axis, table: pd.DataFrame, curve: str, colors: Mapping[int, tuple]) -> None:
    for width, best in optima(table, curve).items():
        losses = {rate: loss for rate, loss in sorted(mean_losses(table, curve, width).items())}
        color = colors[width]
        axis.plot(list(losses), list(losses.values()), "o-", ms=3, lw=1.2, color=color, label=width)
        axis.plot(best.value, best.loss, "*", ms=11, color=color, mec="black", mew=0.5, zorder=5)
    axis.set_xscale("log", base=2)
    axis.set_title(TITLES[curve])
    axis.set_xlabel("learning rate (star: optimum)")


def _loss_limits(table: pd.DataFrame) -> tuple[float, float]:
    """From just below the best loss to where curves leave the picture."""
    best = [entry.loss for curve in (STANDARD, MUP) for entry in optima(table, curve).values()]
    return min(best) - 0.05, max(best) + 0.6


def _draw_optima(axis, table: pd.DataFrame, palette: Sequence[tuple]) -> None:
    for curve, color in zip((STANDARD, MUP), palette):
        best = optima(table, curve)
        law = exponent(best)
        widths = sorted(best)
        axis.plot(widths, [best[width].value for width in widths], "*", ms=10, color=color)
        label = f"{TITLES[curve].partition(',')[0]}: D^({law.exponent:+.2f} ± {law.error:.2f})"
        axis.plot(widths, [law(width) for width in widths], "-", lw=1.2, color=color, label=label)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log", base=2)
    axis.set_xlabel("width D")
    axis.set_ylabel("optimal learning rate")
    axis.set_title("how the optimum moves")
    axis.legend(fontsize=7)


def main(argv: Sequence[str] | None = None) -> None:
    """The command; a bad table is one line and exit code 2."""
    parser = argparse.ArgumentParser(prog="python -m plots.quickstart", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    shipped = HERE / "data" / "width_sweep.csv"
    parser.add_argument("table", type=Path, nargs="?", default=shipped, help="results.csv")
    parser.add_argument("--out", type=Path, default=HERE / "figures", help="folder to write to")
    args = parser.parse_args(argv)
    try:
        table = read(args.table)
        print(report(table))
        paths = draw(table, args.out)
    except (TableError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    print("figure: " + ", ".join(map(str, paths)))


if __name__ == "__main__":
    main()
