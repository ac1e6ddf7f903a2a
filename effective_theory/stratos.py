"""Stratos, "Scale-Invariant Parameterizations": his Table 1 and his conditions for stability.

His layers l = 0, 1..L and L+1 are the embedding, the hidden matrices and the readout of
`param_groups.exponents`. The optimiser is Adam throughout.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

from param_groups.exponents import (
    HALF,
    LAYERS,
    Alignment,
    Exponents,
    Number,
    Parameterization,
    fraction,
    residuals,
)

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
        symbol: dict(zip(LAYERS, map(fraction, row.split()), strict=True))
        for symbol, row in symbols.items()
    }
    for name, symbols in _ROWS.items()
}


def violations(
    table: Parameterization,
    c: Mapping[str, Number],
    omega_readout: Number = HALF,
    *,
    omega: Number = HALF,
) -> list[str]:
    """Those of conditions (6)-(8) and (21)-(24) that fail; empty when all hold.

    They are sufficient for stability with full alignment: they credit the layers with no residual,
    so rates that are stable only thanks to r_L > 0 are reported under (24).
    """
    bound = max(HALF, fraction(omega_readout))
    rates = {layer: fraction(c[layer]) for layer in LAYERS}
    return _failures([
        ("(6) a + b = 0 at embedding", -abs(table.embedding.scale)),
        ("(7) a + b = 1/2 at hidden", -abs(table.hidden.scale - HALF)),
        ("(8) a + b >= 1/2 at readout", table.readout.scale - HALF),
        ("(21) a + c >= 0 at embedding", table.embedding.a + rates["embedding"]),
        ("(22) a + c >= 1 at hidden", table.hidden.a + rates["hidden"] - 1),
        ("(22) a + c >= 1 at readout", table.readout.a + rates["readout"] - 1),
        ("(23) omega <= 1/2 at hidden", HALF - fraction(omega)),
        (f"(24) a + b >= {bound} at readout", table.readout.scale - bound),
    ])


def general_violations(
    table: Parameterization,
    c: Mapping[str, Number],
    alignment: Alignment,
    *,
    hidden_layers: int = 1,
) -> list[str]:
    """Those of conditions (14) and (18)-(20) that fail.

    These hold for any alignment and use each layer's input residual, which `residuals` computes
    from the same rates. Together with (6)-(8) they are equivalent to `is_stable` for Adam. Raises
    as `residuals` does.
    """
    inputs = residuals(table, "adam", alignment, c, hidden_layers=hidden_layers)[:-1]
    conditions = [("(14) a + c >= 0 at embedding", inputs[0])]
    for index, before in enumerate(inputs):
        layer = "hidden" if index < hidden_layers else "readout"
        where = f"hidden layer {index + 1}" if layer == "hidden" else layer
        alpha, omega, u = alignment.at(layer)
        update = table[layer].a + fraction(c[layer])
        conditions += [
            (f"(18) a + b + r >= omega at {where}", table[layer].scale + before - omega),
            (f"(19) a + c >= alpha at {where}", update - alpha),
            (f"(20) a + c + r >= u at {where}", update + before - u),
        ]
    return _failures(conditions)


def _failures(conditions: list[tuple[str, Fraction]]) -> list[str]:
    """The conditions whose slack is negative."""
    return [f"{name} fails by {-slack}" for name, slack in conditions if slack < 0]
