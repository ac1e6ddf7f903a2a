"""What Bordelon et al. print and findings are compared with, each with its source."""

from plots.bordelon.scans import HEAD_DIM, HEADS, LAYERS

DERIVED = "derived"  # next to exponents that follow from the paper's but do not stand in it

# Caption of Figure 2b: exponent of N in the variance of A over heads at alpha_A = 1.
CAPTION_2B = -2

# Section 3.3: power of H in square errors of kernels (Figure 3a) and logits (Figure 4b).
SQUARE_ERROR = -1.0
# Figure 4b: the steps at which logits are compared with the limit, and the start.
FIGURE_4B_STEPS = (0, 25, 100, 250, 500, 1000, 2000)

# Section 4: what growing a size gains in loss; depth, "little to no benefit".
GROWTH = {HEADS: "above 0", HEAD_DIM: "above 0", LAYERS: "little"}
# Its claims of the loss at alpha_A = 1 minus that at 1/2 contradict each other.
ALPHA_CLAIMS = "7a: > 0, 12: < 0"
ALPHA_SIDES = {
    "agrees": "as Fig. 7a, against the caption of Fig. 12",
    "disagrees": "as the caption of Fig. 12, against Fig. 7a",
}
FLOPS_PER_PARAMETER = 6  # and token (the caption of Figure 12 leaves the tokens out)
