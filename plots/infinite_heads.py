"""Many heads (Bordelon et al., Figures 3 and 4b): kernels and attention at the start, then logits.

    python -m plots.infinite_heads [KERNELS ATTENTION DENSITY DISTANCES] [--out FOLDER]

The first three tables are those of `python -m vit_cifar5m.initial`, the last one that of
`python -m vit_cifar5m.distances`; without arguments the shipped ones. Writes two figures as PNG and
PDF. Exponents are unweighted fits to means over networks or seeds; their errors are jackknife ones,
each network or seed left out of all sizes at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from plots import style, tables
from plots.findings import HEADER, Finding, claimed_gain, distance, number
from plots.tables import TableError
from training.fits import PowerLaw, power_law

KERNELS, ATTENTION, DENSITY = "initial_kernels", "initial_attention", "initial_density"
DISTANCES = "cifar5m_figure_4_distances"
STEMS = (KERNELS, ATTENTION, DENSITY, DISTANCES)
FIGURES = ("figure_3_initial_heads", "figure_4_many_heads")
HEADS = "model.heads"
COLUMNS = {
    KERNELS: ("head_dim", "layers", "heads", "network", "layer", "square_error",
              "reference_square"),
    ATTENTION: ("alpha_attention", "head_dim", "heads", "network", "second_moment",
                "fourth_moment"),
    DENSITY: ("alpha_attention", "head_dim", "heads", "networks", "low", "high", "count"),
    DISTANCES: (HEADS, "seed", "step", "square_distance"),
}
_INITIAL = "`python -m vit_cifar5m.initial --ship` makes it"
_SWEEP = "vit_cifar5m/sweeps/figure_4.yaml --preset laptop"
_FOLDER = "results/vit_cifar5m/figure_4_laptop"
MAKERS = {
    KERNELS: _INITIAL,
    ATTENTION: _INITIAL,
    DENSITY: _INITIAL,
    DISTANCES: f"`python -m training.sweep {_SWEEP}`, `python -m vit_cifar5m.distances {_FOLDER}` "
               f"and `python -m plots.ship {_FOLDER}/distances.csv {DISTANCES}` make it",
}
STEPS = (0, 25, 100, 250, 500, 1000, 2000)  # Fig. 4b, and the start
PREDICTED = -1.0  # power of H in square errors, section 3.3
KURTOSIS = 6.0  # excess of a product of two Gaussians; a sum of N has a Nth of it


# ------------------------------------------------------------------------------------------------
# Tables


def read(path: Path, stem: str) -> pd.DataFrame:
    """One of the four tables as numbers; TableError if it is missing or another one."""
    if path.parent == tables.DATA and not path.exists():
        raise TableError(f"{path}: no such table; {MAKERS[stem]}")
    table = tables.read(path, COLUMNS[stem], f"{stem} table")
    return tables.numbers(table, path, COLUMNS[stem])


def read_all(paths: Sequence[Path]) -> list[pd.DataFrame]:
    """The tables in the order of STEMS; TableError unless there are four."""
    if len(paths) != len(STEMS):
        raise TableError(
            f"{len(paths)} table{'s' * (len(paths) != 1)} given, expected four: "
            "initial_kernels.csv initial_attention.csv initial_density.csv distances.csv"
        )
    return [read(path, stem) for path, stem in zip(paths, STEMS)]


# ------------------------------------------------------------------------------------------------
# Exponents


def jackknife(
    rows: pd.DataFrame, group: str, statistic: Callable[[pd.DataFrame], float]
) -> tuple[float, float]:
    """The statistic of all rows, and its standard error from leaving out one group after another;
    NaN for a single group or where a part has no value."""
    groups = rows[group].unique()
    value, count = statistic(rows), len(groups)
    if count < 2:
        return value, math.nan
    parts = np.array([statistic(rows[rows[group] != one]) for one in groups])
    return value, math.sqrt((count - 1) * parts.var())


def law(rows: pd.DataFrame, size: str, value: str) -> PowerLaw | None:
    """The power of `size` in the mean of `value`; None with fewer than two sizes above zero."""
    return _fitted(rows.groupby(size)[value].mean())


def _fitted(means: pd.Series) -> PowerLaw | None:
    means = means[means > 0]
    if len(means) < 2:
        return None
    return power_law(means.index.tolist(), means.tolist())


def exponent(rows: pd.DataFrame, group: str, size: str, value: str) -> tuple[float, float]:
    """The power and its jackknife error."""

    def power(part: pd.DataFrame) -> float:
        found = law(part, size, value)
        return math.nan if found is None else found.exponent

    return jackknife(rows, group, power)


def relative_errors(kernels: pd.DataFrame) -> pd.DataFrame:
    """The table with `error`, square error over the mean square of the limit's kernel."""
    return kernels.assign(error=kernels["square_error"] / kernels["reference_square"])


def kurtoses(attention: pd.DataFrame) -> pd.Series:
    """Head dimension -> excess kurtosis of A, from moments averaged over networks of all H."""
    moments = attention.groupby("head_dim")[["second_moment", "fourth_moment"]].mean()
    return moments["fourth_moment"] / moments["second_moment"] ** 2 - 3


def kurtosis_exponent(attention: pd.DataFrame) -> tuple[float, float]:
    """The power of N in the excess kurtosis."""

    def power(part: pd.DataFrame) -> float:
        found = _fitted(kurtoses(part))
        return math.nan if found is None else found.exponent

    return jackknife(attention, "network", power)


def density(a: np.ndarray, head_dim: int, alpha: float) -> np.ndarray:
    """The exact density of A = N^(-alpha) q.k for Gaussian q, k: it is that of every H."""
    from scipy.special import gammaln, kve

    order = (head_dim - 1) / 2
    z = np.maximum(np.abs(a) * head_dim**alpha, 1e-12)
    logarithm = order * np.log(z / 2) + np.log(kve(order, z)) - z - gammaln(head_dim / 2)
    return np.exp(logarithm) * head_dim**alpha / math.sqrt(math.pi)


def gaussian(a: np.ndarray, head_dim: int, alpha: float) -> np.ndarray:
    """The Gaussian of the same variance N^(1 - 2 alpha)."""
    deviation = head_dim ** (0.5 - alpha)
    return np.exp(-((a / deviation) ** 2) / 2) / (deviation * math.sqrt(2 * math.pi))


# ------------------------------------------------------------------------------------------------
# Findings


def findings(all_tables: Sequence[pd.DataFrame]) -> list[Finding]:
    """Fig. 3a, then 3b and c, then 4b."""
    kernels, attention, bins, distances = all_tables
    return [*_of_kernels(kernels), *_of_attention(attention), *_of_density(bins),
            *_of_distances(distances)]


def _of_kernels(kernels: pd.DataFrame) -> list[Finding]:
    rows, result = relative_errors(kernels), []
    for layer in sorted(rows["layer"].unique()):
        value, error = exponent(rows[rows["layer"] == layer], "network", "heads", "error")
        result.append(_power(f"3a: H in the kernel's square error, layer {layer:.0f}", value, error,
                             PREDICTED))
    value, error = exponent(rows, "network", "heads", "error")
    return [*result, _power("3a: the same, all layers", value, error, PREDICTED)]


def _power(name: str, value: float, error: float, predicted: float) -> Finding:
    return Finding(name, number(value, error), f"{predicted:g}", distance(value, error, predicted))


def _of_attention(attention: pd.DataFrame) -> list[Finding]:
    result = []
    for alpha, rows in attention.groupby("alpha_attention"):
        value, error = exponent(rows, "network", "head_dim", "second_moment")
        name = f"3c: N in the variance of A, alpha_A = {alpha:g}"
        result.append(_power(name, value, error, 1 - 2 * alpha))
        value, error = kurtosis_exponent(rows)
        name = f"3c: N in the excess kurtosis of A, alpha_A = {alpha:g}"
        result.append(_power(name, value, error, -1.0))
        measured = kurtoses(rows)
        values = ", ".join(f"{v * n:.2f}" for n, v in measured.items())
        result.append(Finding(f"3c: N x excess kurtosis, alpha_A = {alpha:g}", values,
                              f"{KURTOSIS:g} (exact)"))
    return result


def _of_density(bins: pd.DataFrame) -> list[Finding]:
    """How far the pooled densities are from the Gaussian, and how far the exact ones are."""
    result, alpha = [], bins["alpha_attention"].min()
    rows = bins[bins["alpha_attention"] == alpha]
    for head_dim in sorted(rows["head_dim"].unique()):
        own = rows[rows["head_dim"] == head_dim].groupby(["low", "high"])["count"].sum()
        edges = [own.index.get_level_values(0)[0], *own.index.get_level_values(1)]
        shares = own.to_numpy() / own.sum()
        normal = _shares(gaussian, edges, head_dim, alpha)
        exact = _shares(density, edges, head_dim, alpha)
        text = (f"{np.abs(shares - normal).sum() / 2:.3f} from the Gaussian, "
                f"{np.abs(shares - exact).sum() / 2:.3f} from exact")
        result.append(Finding(f"3b, c: density of A, N = {head_dim:.0f}, total variation "
                              f"(n = {own.sum():.0f})", text,
                              f"{np.abs(exact - normal).sum() / 2:.3f} (exact)"))
    return result


def _shares(law: Callable, edges: Sequence[float], head_dim: float, alpha: float) -> np.ndarray:
    """What a symmetric density has between edges, the outermost bins with their tails."""
    fine = [np.linspace(low, high, 201) for low, high in zip(edges, edges[1:])]
    middles = [(points[1:] + points[:-1]) / 2 for points in fine]
    inside = np.array([law(m, head_dim, alpha).sum() * (p[1] - p[0])
                       for m, p in zip(middles, fine)])
    inside[[0, -1]] += (1 - inside.sum()) / 2
    return inside


def shown_steps(distances: pd.DataFrame) -> list[int]:
    """The paper's steps as far as they were observed, and the last one."""
    steps = sorted(int(step) for step in distances["step"].unique())
    return sorted({step for step in STEPS if step in steps} | {steps[-1]})


def _of_distances(distances: pd.DataFrame) -> list[Finding]:
    result, steps = [], shown_steps(distances)
    for step in steps:
        rows = distances[distances["step"] == step]
        value, error = exponent(rows, "seed", HEADS, "square_distance")
        if step in (0, min(s for s in steps if s or len(steps) == 1)):
            result.append(_power(f"4b: H in the logits' square error, step {step}", value, error,
                                 PREDICTED))
        else:
            result.append(Finding(f"4b: the same, step {step}", number(value, error)))
    return [*result, _weakening(distances, steps)]


def _weakening(distances: pd.DataFrame, steps: Sequence[int]) -> Finding:
    """Whether the last exponent is closer to zero than the earliest of training."""
    first, last = next((s for s in steps if s), steps[0]), steps[-1]

    def gain(part: pd.DataFrame) -> float:
        laws = [law(part[part["step"] == step], HEADS, "square_distance") for step in (last, first)]
        return math.nan if None in laws else laws[0].exponent - laws[1].exponent

    value, error = jackknife(distances, "seed", gain)
    return Finding(f"4b: exponent at step {last} minus step {first}", number(value, error),
                   "above 0", claimed_gain(value, error))


def report(all_tables: Sequence[pd.DataFrame]) -> str:
    """The findings in words, with what they rest on."""
    kernels, attention, _, distances = all_tables
    seeds = distances.groupby(HEADS)["seed"].nunique()
    text = [
        f"3a: N = {kernels['head_dim'].iloc[0]:.0f}, L = {kernels['layers'].iloc[0]:.0f}, "
        f"H = {_sizes(kernels['heads'])}, {kernels['network'].nunique()} networks each; "
        "square error over the mean square of the limit's kernel",
        f"3b, c: N = {_sizes(attention['head_dim'])}, H = {_sizes(attention['heads'])}, "
        f"{attention['network'].nunique()} networks each; ± is jackknife over networks",
        f"4b: H = {_sizes(distances[HEADS])}, {span(seeds)} seeds; ± is jackknife over seeds",
        HEADER,
    ]
    return "\n".join(text + [finding.line() for finding in findings(all_tables)])


def span(counts: pd.Series) -> str:
    """The range of some counts in words."""
    low, high = counts.min(), counts.max()
    return f"{low}" if low == high else f"{low} to {high}"


def _sizes(column: pd.Series) -> str:
    return ", ".join(f"{size:g}" for size in sorted(column.unique()))


# ------------------------------------------------------------------------------------------------
# Figures


def draw_initial(kernels: pd.DataFrame, attention: pd.DataFrame, bins: pd.DataFrame, folder: Path):
    """Figure 3, and the variance and kurtosis that its text speaks of."""
    figure, axes = style.subplots(2, 2, (4.3, 3.2))
    _draw_kernels(axes[0][0], relative_errors(kernels))
    _draw_moments(axes[0][1], attention)
    alpha = bins["alpha_attention"].min()
    shown = bins[bins["alpha_attention"] == alpha]
    sizes = sorted(shown["head_dim"].unique())
    for axis, label, size in zip(axes[1], "bc", (sizes[0], sizes[-1])):
        _draw_density(axis, shown[shown["head_dim"] == size], size, alpha)
        axis.set_title(rf"({label}) $N = {size:.0f}$, $\alpha_A = {alpha:g}$", fontsize=9)
    return style.save(figure, folder, FIGURES[0])


def _draw_kernels(axis, rows: pd.DataFrame) -> None:
    layers = sorted(rows["layer"].unique())
    for layer, color in style.width_colors(layers).items():
        own = rows[rows["layer"] == layer]
        _line(axis, own, "heads", "error", color, rf"$\ell = {layer:.0f}$")
    _guide(axis, rows.groupby("heads")["error"].mean(), PREDICTED, r"$H^{-1}$")
    _size_axis(axis, rows["heads"], "heads $H$")
    axis.set_ylabel(r"$\|\mathbf{H}^\ell-\mathbf{H}^\ell_\infty\|^2"
                    r"/\|\mathbf{H}^\ell_\infty\|^2$")
    axis.set_title(rf"(a) initial kernels, $N = {rows['head_dim'].iloc[0]:.0f}$", fontsize=9)
    axis.legend(fontsize=6, ncols=2)


def _line(axis, rows: pd.DataFrame, size: str, value: str, color, label: str, **look) -> None:
    """Means with standard errors; what is not above zero has no place on a log axis."""
    groups = rows.groupby(size)[value]
    means, errors = groups.mean(), groups.sem().fillna(0)
    means = means[means > 0]
    low = np.minimum(errors[means.index], 0.99 * means)
    axis.errorbar(means.index, means, [low, errors[means.index]], color=color, label=label,
                  marker="o", ms=3, lw=1, elinewidth=0.7, **look)


def _guide(axis, means: pd.Series, power: float, label: str, above: float = 1.6) -> None:
    """A dotted line of the predicted power, above the points."""
    means = means[means > 0]
    if len(means) > 1:
        sizes = means.index.to_numpy(float)
        line = above * means.iloc[0] * (sizes / sizes[0]) ** power
        axis.plot(sizes, line, ":", color="black", lw=1.2, label=label)


def _size_axis(axis, sizes: pd.Series, label: str) -> None:
    ticks = sorted(sizes.unique())
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.minorticks_off()
    axis.set_xlabel(label)


def _draw_moments(axis, attention: pd.DataFrame) -> None:
    import seaborn as sns

    colors = sns.color_palette("colorblind")
    for (alpha, rows), color in zip(attention.groupby("alpha_attention"), colors):
        _line(axis, rows, "head_dim", "second_moment", color, rf"variance, $\alpha_A = {alpha:g}$")
        sizes = np.array(sorted(rows["head_dim"].unique()))
        axis.plot(sizes, sizes ** (1 - 2 * alpha), ":", color=color, lw=1)
    rows = attention[attention["alpha_attention"] == attention["alpha_attention"].min()]
    measured = kurtoses(rows)
    measured = measured[measured > 0]
    axis.plot(measured.index, measured, "s", ms=4, color=colors[2], label="excess kurtosis")
    axis.plot(measured.index, KURTOSIS / measured.index, ":", color=colors[2], lw=1)
    axis.plot([], [], ":", color="black", lw=1, label=r"$N^{1-2\alpha_A}$ and $6/N$")
    _size_axis(axis, attention["head_dim"], "head dimension $N$")
    axis.set_ylabel(r"of $A$ over heads")
    axis.set_title("moments of attention logits", fontsize=9)
    axis.legend(fontsize=6)


def _draw_density(axis, bins: pd.DataFrame, head_dim: float, alpha: float) -> None:
    top = gaussian(np.zeros(1), head_dim, alpha)[0]
    for heads, color in style.width_colors(sorted(bins["heads"].unique())).items():
        own = bins[bins["heads"] == heads].groupby(["low", "high"], as_index=False)["count"].sum()
        heights = own["count"] / own["count"].sum() / (own["high"] - own["low"])
        axis.stairs(heights, [own["low"].iloc[0], *own["high"]], color=color, lw=1,
                    label=f"$H = {heads:.0f}$")
        top = max(top, heights.max())
    ends = 4 * head_dim ** (0.5 - alpha)
    grid = np.linspace(-ends, ends, 400)
    axis.plot(grid, gaussian(grid, head_dim, alpha), "--", color="black", lw=1.2, label="Gaussian")
    axis.plot(grid, density(grid, head_dim, alpha), ":", color="#D7301F", lw=1.4, label="exact")
    axis.set_xlim(-ends, ends)
    axis.set_ylim(0, 1.25 * top)  # for N = 1 the exact density has a pole at 0
    axis.set_xlabel(r"$A_h$ at one pair of tokens")
    axis.set_ylabel("density over heads")
    axis.legend(fontsize=6)


def draw_distances(distances: pd.DataFrame, folder: Path) -> list[Path]:
    """Figure 4b."""
    figure, axes = style.subplots(1, 1, (4.6, 3.4))
    axis, steps = axes[0][0], shown_steps(distances)
    for step, color in style.width_colors(steps).items():
        rows = distances[distances["step"] == step]
        _line(axis, rows, HEADS, "square_distance", color, f"step {step}")
    first = distances[distances["step"] == next((s for s in steps if s), steps[0])]
    _guide(axis, first.groupby(HEADS)["square_distance"].mean(), PREDICTED, r"$H^{-1}$")
    _size_axis(axis, distances[HEADS], "heads $H$")
    axis.set_ylabel("mean square difference of logits to the limit")
    axis.set_title("(b) convergence to many heads", fontsize=9)
    axis.legend(fontsize=7)
    return style.save(figure, folder, FIGURES[1])


def make(paths: list[Path], folder: Path) -> tuple[str, list[Path]]:
    """Findings and files of the four tables."""
    found = read_all(paths)
    written = draw_initial(*found[:3], folder) + draw_distances(found[3], folder)
    return report(found), written


def main(argv: Sequence[str] | None = None) -> None:
    """The command."""
    style.command("infinite_heads", __doc__, STEMS, make, argv)


if __name__ == "__main__":
    main()
