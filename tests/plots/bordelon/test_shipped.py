"""The shipped tables of Bordelon et al.: what is read off them stands in the README."""

import json
import re
from pathlib import Path

import pytest

from plots import tables
from plots.catalogue import of_shipped
from plots.findings import Finding

ROOT = Path(__file__).resolve().parents[3]


def of_head_dimension(f):
    return (
        "variance of A" in f.name
        or "by W_Q, W_K" in f.name
        or "t = 200: change of A in all" in f.name
    )


def of_initial_heads(f):
    return f.name.startswith(("3a: the same, all layers", "3c: N in the variance"))


def of_heads(f):
    return f.name.startswith(
        (
            "4b: H in",
            "4b: the same, step 500",
            "4b: exponent at step 500",
            "4a: final loss, H = 4 minus",
            "4a: the same, of H that",
        )
    )


def of_depth(f):
    return f.name.startswith(("5a", "5b: final loss, alpha_L = 1/2 minus 1, L = 16"))


def of_depth_desktop(f):
    return f.name.startswith("5a") or re.match("5b: each at its best.* L = (16|32|64) ", f.name)


def of_kernels(f):
    return f.name.endswith("RMS change of A, exponent of N")


def of_kernels_desktop(f):
    return True


def of_decoder(f):
    return "loss of the base minus that of the largest" in f.name


def of_rate_transfer(f):
    return "exponent of N" in f.name


@pytest.mark.parametrize(
    ("kept", "count"),
    [
        (of_head_dimension, 4 + 16 + 4),
        (of_initial_heads, 1 + 2),
        (of_heads, 6),
        (of_depth, 13),
        (of_depth_desktop, 12 + 3),
        (of_kernels, 2),
        (of_kernels_desktop, 22),
        (of_decoder, 6),
        (of_rate_transfer, 2),
        (None, 6),
    ],
)
def test_the_readme_quotes_the_shipped_tables(kept, count):
    readme = (ROOT / "vit_cifar5m/README.md").read_text(encoding="utf-8").replace("−", "-")
    said = printed if kept in (of_head_dimension, of_heads) else of_shipped  # which are desktop's
    found = (
        of_dynamics()
        if kept is None
        else [
            line
            for line in said(f"bordelon/{kept.__name__.removeprefix('of_')}")
            if isinstance(line, Finding) and kept(line)
        ]
    )
    assert len(found) == count
    for finding in found:
        measured = re.escape(finding.measured.split(" (n")[0].lstrip("+"))
        assert re.search(rf"(?<![-\d.]){measured}", readme), str(finding)


def of_dynamics():
    """What doublings change, of preset desktop; the README says in words which way."""
    found = [line for line in of_shipped("bordelon/dynamics_desktop") if isinstance(line, Finding)]
    changes = [
        tuple(map(float, re.findall(r"[-\d.]+", line.measured)[:2]))
        for line in found
        if " minus that of " in line.name
    ]
    assert [change > 0 for change, _ in changes] == [True, False, False, True, True, True]
    return [Finding("11", f"{abs(change):.3f} ± {error:.3f}") for change, error in changes]


def test_the_readme_names_the_commit_of_its_tables():
    readme = (ROOT / "vit_cifar5m/README.md").read_text(encoding="utf-8")
    made = list((tables.DATA / "bordelon").glob("*.json"))
    assert len(made) == 31
    for path in made:
        environment = json.loads(path.read_text(encoding="utf-8"))["environment"]
        assert environment["commit"][:7] in readme and "+" not in environment["commit"], path.name


def test_the_readme_quotes_the_decoders_of_ten_seeds():
    readme = re.sub(r"\s+", " ", (ROOT / "vit_cifar5m/README.md").read_text(encoding="utf-8"))
    found = [line for line in of_shipped("bordelon/decoder_desktop") if isinstance(line, Finding)]
    for line in found:
        value, error = (float(one) for one in re.findall(r"\d+\.\d+", line.measured)[:2])
        if line.verdict.startswith("as ") or line.name.startswith("gain of growing N"):
            assert f"{value:.3f} ± {error:.3f}" in readme, line
    rising = [line for line in found if re.search("kernel: alignment with [HN]", line.name)]
    assert len(rising) == 8 and all(line.verdict == "agrees" for line in rising)
