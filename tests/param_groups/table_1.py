"""Everett et al., Table 1, as powers of n, typed from the paper and not from the module."""

# Init variance, multiplier, gradient, then the learning rates of sgd, adam and adafactor with full
# alignment and with none.
PAPER = """
standard   embedding   0    0  -1/2   1/2    0    0   1/2    0    0
standard   hidden     -1    0  -1/2  -1/2   -1 -1/2     0 -1/2    0
standard   readout    -1    0     0    -1   -1 -1/2  -1/2 -1/2    0
ntk        embedding   0    0  -1/2   1/2    0    0   1/2    0    0
ntk        hidden      0 -1/2    -1   1/2 -1/2 -1/2     1    0    0
ntk        readout     0 -1/2  -1/2     0 -1/2 -1/2   1/2    0    0
mup        embedding  -1  1/2  -1/2     0 -1/2    0     0 -1/2    0
mup        hidden     -1    0    -1     0   -1 -1/2   1/2 -1/2    0
mup        readout    -1 -1/2  -1/2     0 -1/2    0     0    0    0
mean_field embedding   0    0    -1     1    0    0     1    0    0
mean_field hidden      0 -1/2  -3/2     1 -1/2 -1/2   3/2    0    0
mean_field readout     0   -1    -1     1    0    0     1  1/2    0
"""
