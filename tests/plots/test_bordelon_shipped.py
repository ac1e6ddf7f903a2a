"""The shipped tables of Bordelon et al.: what is read off them stands in the README."""

import json
import re
from pathlib import Path

import pytest

from plots import style, tables
from plots.bordelon import (
    decoder as infinite_decoder,
)
from plots.bordelon import (
    depth as infinite_depth,
)
from plots.bordelon import (
    dynamics as infinite_dynamics,
)
from plots.bordelon import (
    head_dimension as infinite_head_dimension,
)
from plots.bordelon import (
    heads as infinite_heads,
)
from plots.bordelon import (
    kernels as infinite_kernels,
)
from plots.bordelon import (
    rate_transfer as infinite_rate_transfer,
)
from plots.findings import Finding, number

ROOT = Path(__file__).resolve().parents[2]
DRAWN = (
    "2a_rate_transfer", "2b_head_variance", "3_initial_heads", "4_many_heads", "5_depth",
    "6_attention", "6_dynamics", "6_pooled", "6_spatial", "7_dynamics", "7_last_token",
    "7_spatial", "8_dynamics", "9_kernels", "10_kernels", "11_dynamics", "12_flops", "13_movement",
)  # fmt: skip


def paths(module):
    stems = module.STEMS if hasattr(module, "STEMS") else [module.STEM]
    return [tables.shipped(stem) for stem in stems]


def of_head_dimension():
    variance, movement = map(infinite_head_dimension.read, paths(infinite_head_dimension))
    found = infinite_head_dimension.variance_findings(variance)
    moved = infinite_head_dimension.movement_findings(movement)
    return [*found, *(f for f in moved if "by W_Q, W_K" in f.name
                      or "t = 200: change of A in all" in f.name)]


def of_heads():
    found = infinite_heads.findings(infinite_heads.read_all(paths(infinite_heads)))
    quoted = ("3a: the same, all layers", "3c: N in the variance", "4b: H in",
              "4b: the same, step 500", "4a: final loss, H = 4 minus")
    return [f for f in found if f.name.startswith(quoted)]


def of_depth():
    found = infinite_depth.findings(*infinite_depth.read_all(paths(infinite_depth)))
    claimed = ("5a", "5b: final loss, alpha_L = 1/2 minus 1, L = 16")
    return [f for f in found if f.name.startswith(claimed)]


def of_kernels():
    tables_of = paths(infinite_kernels)
    read = [infinite_kernels.read(tables_of[0], "observed_kernels.csv"),
            infinite_kernels.read(tables_of[1], "observed_attention.csv")]
    found = infinite_kernels.findings(*read)
    return [f for f in found if f.name.endswith("RMS change of A, exponent of N")]


def of_decoder():
    results, metrics, _ = paths(infinite_decoder)
    found = infinite_decoder.findings(infinite_decoder.read(results, metrics))
    return [f for f in found if "loss of the base minus that of the largest" in f.name]


def of_dynamics():
    rows = infinite_dynamics.read(*paths(infinite_dynamics), by=infinite_dynamics.HEAD_DIM)
    gaps = [gap for panel in infinite_dynamics.panels(rows).values()
            for gap in infinite_dynamics.gaps(panel, infinite_dynamics.HEAD_DIM) if gap.low == 32]
    one, half = (gap.estimate for gap in gaps)
    # The README speaks of losses that rise and fall, without signs.
    assert one.value < 0 < half.value
    return [Finding("11", number(abs(found.value), found.error)) for found in (one, half)]


def of_rates():
    found = infinite_rate_transfer.findings(
        infinite_rate_transfer.read(*paths(infinite_rate_transfer)))
    return [f for f in found if "exponent of N" in f.name]


@pytest.mark.parametrize("findings, count", [
    (of_head_dimension, 4 + 16 + 4), (of_heads, 1 + 2 + 2 + 1 + 1), (of_depth, 13), (of_kernels, 2),
    (of_decoder, 6), (of_rates, 2), (of_dynamics, 2),
])
def test_the_readme_quotes_the_shipped_tables(findings, count):
    readme = (ROOT / "vit_cifar5m/README.md").read_text(encoding="utf-8").replace("−", "-")
    found = findings()
    assert len(found) == count
    for finding in found:
        measured = re.escape(finding.measured.split(" (n")[0].lstrip("+"))
        assert re.search(rf"(?<![-\d.]){measured}", readme), finding.line()


def test_every_figure_of_the_paper_is_shipped_as_picture_and_pdf():
    for name in DRAWN:
        for kind in ("png", "pdf"):
            assert (style.FIGURES / f"infinite_figure_{name}.{kind}").stat().st_size > 5_000, name


def test_the_readme_names_the_commit_of_its_tables():
    readme = (ROOT / "vit_cifar5m/README.md").read_text(encoding="utf-8")
    data = ROOT / "plots/data"
    made = [*data.glob("infinite_*.json"), *data.glob("initial_*.json")]
    assert len(made) == 18
    for path in made:
        environment = json.loads(path.read_text(encoding="utf-8"))["environment"]
        assert environment["commit"][:7] in readme and "+" not in environment["commit"], path.name
