"""With which power of batch and tokens does the best rate go, and what does a rule cost? (ours)

    python -m plots everett/batch_and_tokens [transfer_batch.csv transfer_horizon.csv]

As `transfer`, with two other sizes: B rows a step at one number of tokens, and T steps at one
batch. Published powers are lines through one grid. What keeping the smallest size's best rate costs
when it is carried on by a power, is the price of that rule, and how far optima lie off their own
power law is in octaves.
"""

from collections.abc import Sequence
from pathlib import Path

from plots import tables
from plots.everett.published import BATCH, STEPS_OF_ONE_BATCH
from plots.everett.transfer import START, Axis, axes_of, by_size, draw, findings
from plots.tables import CURVE, RATE

__all__ = ["ANY", "PAPER", "TABLES", "draw", "findings", "read"]
PAPER = "Ours, after Malladi et al. (2022)"
TABLES = ("everett/transfer_batch", "everett/transfer_horizon")
ANY = True
BATCH_SIZE, STEPS = "training.batch_size", "training.steps"


def read(paths: Sequence[Path]) -> dict[str, Axis]:
    """The axes of the tables given; what varies in a table says which it is."""
    found: dict[str, Axis] = {}
    for place, path in enumerate(paths):
        table = tables.read(path, (*tables.RESULTS, RATE), numbers=(BATCH_SIZE, STEPS, START))
        batch = BATCH_SIZE in table
        size, symbol, rules = (
            (BATCH_SIZE, "B", BATCH) if batch else (STEPS, "T", STEPS_OF_ONE_BATCH)
        )
        known = [rule.curve for own in rules.values() for rule in own]
        rows = tables.only(by_size(table, size), path, CURVE, known)
        found |= axes_of(rows, rules, symbol, place)
    return found
