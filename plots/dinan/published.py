"""What Dinan et al. (Part II) print and findings are compared with, each with its source."""

from fractions import Fraction

# Section 1E: (lr*, wd*) of the ViT, n = 768, from lr* and lr* wd* = 8e-4, as (1.94) has it: decay
# is not multiplied by lambda_G. Those of the other two strategies stand in a figure only.
VIT_OPTIMA = {"standard": (1e-3, 0.8), "neural_tangent": (20.0, 4e-5)}
VIT_WIDTH = 768
# Section 1E and footnote 43: (better, worse). The hybrid is the best of the four and
# maximal-update the worst, neural-tangent improves on standard.
VIT_CLAIMS = (
    ("neural_tangent", "standard"),
    ("hybrid", "neural_tangent"),
    ("hybrid", "standard"),
    ("hybrid", "maximal_update"),
    ("neural_tangent", "maximal_update"),
    ("standard", "maximal_update"),
)
# Table II1E: lr factor of Q, K, V, U, W and X, as a power of the width.
BULK_EXPONENTS = {
    "standard": Fraction(0),
    "neural_tangent": Fraction(-3, 2),
    "hybrid": Fraction(-5, 4),
    "maximal_update": Fraction(-1),
}
# Power of the width in the best global rate, derived. lambda_G has all of it in the scaled
# strategies, (1.108)-(1.116) and footnote 26, so none is left. Standard runs start as those of
# s = 0 do, with lambda_G = 1: changes of order one then ask of the one rate what lambda_G says of
# the blocks' matrices, (1.110)-(1.115), where it falls fastest.
TRANSFER_EXPONENTS = {
    **dict.fromkeys(BULK_EXPONENTS, Fraction(0)),
    "standard": BULK_EXPONENTS["neural_tangent"],
}

# Section 2E: the optimal learning rates of BART-large, n = 1024.
BART_RATES = {"standard": 1e-3, "neural_tangent": 32.768}
BART_WIDTH = 1024
# Power of the width that leads from a strategy's global rate to the mapped one (section 2E).
RATE_EXPONENTS = {"standard": Fraction(0), "neural_tangent": Fraction(-3, 2)}
MODELS = {1024: ("BART-large", 4.04e8), 2048: ("R2C2", 2.69e9)}  # name and parameters, by width
