"""Bordelon et al., Infinite Limits of Multi-head Transformer Dynamics (2024)."""

PAPER = "Bordelon et al."
FIGURES = (
    "rate_transfer",
    "head_dimension",
    "dynamics",
    "initial_heads",
    "heads",
    "depth",
    "kernels",
    "decoder",
)
