"""Stratos, "Scale-Invariant Parameterizations": his Table 1.

His layers l = 0, 1..L and L+1 are the embedding, the hidden matrices and the readout of
`param_groups.rules.exponents`. The optimiser is Adam throughout.
"""

from __future__ import annotations

from fractions import Fraction

from param_groups.rules.exponents import LAYERS, Exponents

# His names for Everett et al.'s parameterisations.
STRATOS_NAMES = {"sp": "standard", "ntk": "ntk", "mup": "mup", "mf": "mean_field"}
# Table 1 (full alignment): STRATOS_TABLE[name][symbol][layer]. The values of each symbol are those
# of l = 0 (embedding), h (hidden) and L+1 (readout).
_ROWS = {
    "sp": {"a": "0 0 0", "b": "0 1/2 1/2", "c": "0 1 1"},
    "ntk": {"a": "0 1/2 1/2", "b": "0 0 0", "c": "0 1/2 1/2"},
    "mup": {"a": "-1/2 0 1/2", "b": "1/2 1/2 1/2", "c": "1/2 1 1/2"},
    "mf": {"a": "0 1/2 1", "b": "0 0 0", "c": "0 1/2 0"},
}
STRATOS_TABLE: dict[str, dict[str, Exponents]] = {
    name: {
        symbol: dict(zip(LAYERS, map(Fraction, row.split()), strict=True))
        for symbol, row in symbols.items()
    }
    for name, symbols in _ROWS.items()
}
