"""Everett et al., Scaling Exponents Across Parameterizations and Optimizers (2024)."""

PAPER = "Everett et al."
FIGURES = (
    "quickstart",
    "loss_vs_size",
    "alignment",
    "epsilon",
    "weight_decay",
    "adafactor",
    "learning_rates",
    "depth",
    "length",
    "transfer",
    "table_4",
    "table_4_constants",
)
