"""Many heads at the start (Bordelon et al., Figure 3): kernels' limit and the law of logits.

    python -m plots bordelon/initial_heads [KERNELS ATTENTION DENSITY]

The tables are those of `python -m vit_cifar5m.initial`. Exponents are fits to means over networks;
the widest networks of Figure 3a, with which the others are compared, keep the network that the
jackknife leaves out. Densities pool all networks; dotted lines are powers of the paper.
"""

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd

from plots import style, tables
from plots.bordelon import scans
from plots.bordelon.published import SQUARE_ERROR
from plots.bordelon.scans import ALPHA_LOOKS
from plots.findings import HEADER, Finding, Report
from plots.statistics import exponent, exponent_in

TABLES = ("bordelon/initial_kernels", "bordelon/initial_attention", "bordelon/initial_density")
ALPHA, N, H, NETWORK = "alpha_attention", "head_dim", "heads", "network"
COLUMNS = {
    "initial_kernels.csv": (N, "layers", H, NETWORK, "layer", "square_error", "reference_square"),
    "initial_attention.csv": (ALPHA, N, H, NETWORK, "second_moment", "fourth_moment"),
    "initial_density.csv": (ALPHA, N, H, "networks", "low", "high", "count"),
}
KURTOSIS = 6.0  # excess of a product of two Gaussians; a sum of N has a Nth of it


def read(paths: tables.Paths) -> list[pd.DataFrame]:
    """The tables as numbers, in the order of COLUMNS; `error` is the square error over the mean
    square of the limit's kernel."""
    kernels, attention, bins = tables.read_each(paths, COLUMNS, ["layer"])
    error = kernels["square_error"] / kernels["reference_square"]
    return [kernels.assign(error=error), attention, bins]


def kurtoses(attention: pd.DataFrame) -> pd.Series:
    """Head dimension -> excess kurtosis of A, from moments averaged over networks of all H."""
    moments = attention.groupby(N)[["second_moment", "fourth_moment"]].mean()
    return moments["fourth_moment"] / moments["second_moment"] ** 2 - 3


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


def findings(all_tables: Sequence[pd.DataFrame]) -> Report:
    """Fig. 3a, the power of H in the error of kernels, then 3b and c."""
    kernels, attention, _ = all_tables
    yield f"3a: {kernels[NETWORK].nunique()} networks each; 3b, c: {attention[NETWORK].nunique()}"
    yield HEADER
    for layer in sorted(kernels["layer"].unique()):
        power = exponent(kernels[kernels["layer"] == layer], NETWORK, H, "error")
        name = f"3a: H in the kernel's square error, layer {layer:.0f}"
        yield power.finding(name, SQUARE_ERROR)
    power = exponent(kernels, NETWORK, H, "error")
    yield power.finding("3a: the same, all layers", SQUARE_ERROR)
    for alpha, rows in attention.groupby(ALPHA):
        place = scans.alpha_name(alpha)
        power = exponent(rows, NETWORK, N, "second_moment")
        yield power.finding(f"3c: N in the variance of A, {place}", 1 - 2 * alpha)
        power = exponent_in(rows, NETWORK, kurtoses)
        yield power.finding(f"3c: N in the excess kurtosis of A, {place}", -1.0)
        values = ", ".join(f"{v * n:.2f}" for n, v in kurtoses(rows).items())
        yield Finding(f"3c: N x excess kurtosis, {place}", values, f"{KURTOSIS:g} (exact)")


def draw(all_tables: Sequence[pd.DataFrame]) -> style.Drawn:
    """Figure 3, with the variance and kurtosis that its text speaks of."""
    kernels, attention, bins = all_tables
    figure, axes = style.subplots("initial kernels and attention", 2, 2, (4.3, 3.2))
    _draw_kernels(axes[0][0], kernels)
    _draw_moments(axes[0][1], attention)
    alpha = bins[ALPHA].min()
    shown = bins[bins[ALPHA] == alpha]
    sizes = sorted(shown[N].unique())
    for axis, label, size in zip(axes[1], "bc", (sizes[0], sizes[-1]), strict=True):
        _draw_density(axis, shown[shown[N] == size], size, alpha)
        title = f"({label}) $N = {size:.0f}$, {scans.alpha_title(alpha)}"
        axis.set_title(title, fontsize=9)
    yield "figure_3_initial_heads", figure


def _draw_kernels(axis, rows: pd.DataFrame) -> None:
    layers = sorted(rows["layer"].unique())
    for layer, color in style.width_colors(layers).items():
        own = rows[rows["layer"] == layer]
        label = rf"$\ell = {layer:.0f}$" if layer in (layers[0], layers[-1]) else ""
        scans.mean_line(axis, own, H, "error", color, label)
    scans.guide(axis, rows.groupby(H)["error"].mean(), SQUARE_ERROR, r"$H^{-1}$")
    scans.size_axis(axis, rows[H], "heads $H$")
    axis.set_ylabel(r"$\|\mathbf{H}^\ell-\mathbf{H}^\ell_\infty\|^2/\|\mathbf{H}^\ell_\infty\|^2$")
    axis.set_title(rf"(a) initial kernels, $N = {rows[N].iloc[0]:.0f}$", fontsize=9)
    axis.legend(fontsize=6)


def _draw_moments(axis, attention: pd.DataFrame) -> None:
    for alpha, rows in attention.groupby(ALPHA):
        color = ALPHA_LOOKS.get(alpha, {}).get("color", "gray")
        label = f"variance, {scans.alpha_title(alpha)}"
        scans.mean_line(axis, rows, N, "second_moment", color, label)
        sizes = np.array(sorted(rows[N].unique()))
        axis.plot(sizes, sizes ** (1 - 2 * alpha), ":", color=color, lw=1)
    measured = kurtoses(attention[attention[ALPHA] == attention[ALPHA].min()])
    measured = measured[measured > 0]
    axis.plot(measured.index, measured, "s", ms=4, color=style.GREEN, label="excess kurtosis")
    axis.plot(measured.index, KURTOSIS / measured.index, ":", color=style.GREEN, lw=1)
    axis.plot([], [], ":", color="black", lw=1, label=r"$N^{1-2\alpha_A}$ and $6/N$")
    scans.size_axis(axis, attention[N], "head dimension $N$")
    axis.set_ylabel(r"variance, excess kurtosis of $A$")
    axis.set_title("(section 3.2) moments of attention logits", fontsize=9)
    axis.legend(fontsize=6)


def _draw_density(axis, bins: pd.DataFrame, head_dim: float, alpha: float) -> None:
    top = gaussian(np.zeros(1), head_dim, alpha)[0]
    for heads, color in style.width_colors(sorted(bins[H].unique())).items():
        own = bins[bins[H] == heads].groupby(["low", "high"], as_index=False)["count"].sum()
        heights = own["count"] / own["count"].sum() / (own["high"] - own["low"])
        edges, look = [own["low"].iloc[0], *own["high"]], {"color": color, "lw": 1}
        axis.stairs(heights, edges, label=f"$H = {heads:.0f}$", **look)
        top = max(top, heights.max())
    ends = 4 * head_dim ** (0.5 - alpha)
    grid = np.linspace(-ends, ends, 400)
    axis.plot(grid, gaussian(grid, head_dim, alpha), "--", color="black", lw=1.2, label="Gaussian")
    exact = density(grid, head_dim, alpha)
    axis.plot(grid, exact, ":", color=style.VERMILION, lw=1.4, label="exact")
    axis.set_xlim(-ends, ends)
    axis.set_ylim(0, 1.25 * top)  # for N = 1 the exact density has a pole at 0
    axis.set_xlabel(r"$A_h$ at one pair of tokens")
    axis.set_ylabel("density over heads")
    axis.legend(fontsize=6)
