"""Predictions and networks: Dinan et al., Part I, and Stratos' bigram family."""

PAPER = "Dinan et al., Part I"
FIGURES = ("kernels", "error", "shares", "bigram")
