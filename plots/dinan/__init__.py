"""Dinan et al., Part II: scaling strategies of Vision Transformers and of BART."""

PAPER = "Dinan et al., Part II"
FIGURES = (
    "vit_search",
    "vit_strategies",
    "rate_transfer",
    "position_rate",
    "bart_rates",
    "bart_strategies",
    "ablations",
)
