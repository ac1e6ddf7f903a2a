"""Tables as files, and findings by name."""

import functools

import pandas as pd
import yaml

from plots.claims import CLAIMS, Claim
from plots.findings import Finding


def written(folder, **named):
    """Tables (or their rows) as files called NAME.csv; their paths in the given order.

    A run `x` gets a name of its own at every point of the grid and seed."""
    folder.mkdir(exist_ok=True, parents=True)
    paths = [folder / f"{name}.csv" for name in named]
    for path, table in zip(paths, named.values(), strict=True):
        table = pd.DataFrame(table)
        if "run" in table and set(table["run"]) == {"x"}:
            grid = [key for key in table if "." in key or key in ("curve", "horizon", "seed")]
            table["run"] = [f"{path.stem} {row}" for row in table[grid].itertuples(index=False)]
        table.to_csv(path, index=False)
    return paths


def rows(columns, values):
    """A table with these columns (their names, apart by spaces), a tuple per row."""
    return pd.DataFrame(values, columns=columns.split())


def lines(findings):
    """Findings by name, each of which stands once."""
    found = [line for line in findings if isinstance(line, Finding)]
    assert len(found) == len({finding.name for finding in found})
    return {finding.name: finding for finding in found}


@functools.cache
def unjudged():
    """The claims of the file, not judged."""
    entries = yaml.safe_load(CLAIMS.read_text(encoding="utf-8"))
    return [Claim(paper, entry) for paper, listed in entries.items() for entry in listed]
