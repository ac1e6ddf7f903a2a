"""Numbers that the papers print and that findings stand beside, each with its source."""

from typing import NamedTuple

# Everett et al., Table 4: exponent of the optimal global learning rate in the width.
STEPS = 50_000  # of the fixed horizon
TABLE_4 = {
    "fixed": {
        "sgd": {"standard": -0.68, "ntk": 0.65, "mup": -0.12, "mean_field": 0.25},
        "adam": {"standard": -1.09, "ntk": -0.50, "mup": -0.99, "mean_field": -0.09},
        "adafactor": {"standard": -0.16, "ntk": -0.16, "mup": -0.21, "mean_field": -0.15},
    },
    "compute_optimal": {
        "sgd": {"standard": -0.91, "ntk": 0.06, "mup": -1.17, "mean_field": -0.72},
        "adam": {"standard": -1.27, "ntk": -0.89, "mup": -1.24, "mean_field": -0.49},
        "adafactor": {"standard": -0.59, "ntk": -0.57, "mup": -0.62, "mean_field": -0.51},
    },
}

# Everett et al., Section 4.2, Figures 2 and 3: does the second beat the first? Else it is open.
EVERY = dict.fromkeys(("standard", "ntk", "mup", "mean_field"), True)
INTERVENTIONS = {
    "adam": {
        ("global", "full"): EVERY | {"ntk": False},
        ("full", "full_constants"): EVERY,
        ("full_constants", "none_constants"): EVERY | {"standard": False},
    },
    "adam_param_scaling": {("full_constants", "none_constants"): EVERY},
}
# "Standard parameterization outperforms muP and in fact substantially so" (Section 4.2, and the
# abstract): with exponents of full alignment and constants for both, Figure 2(c), so under Adam.
STANDARD_BEATS_MUP = "adam"
# The best of all: Adam + parameter scaling, NTK, no alignment (Section 4.2).
BEST = ("adam_param_scaling", "ntk", "none_constants")

# Everett et al., Section 4.1, for Adam and Adafactor: peak of the log alignment ratio.
ALIGNMENT_WIDTH = 4096  # Figure 1
ALIGNMENT_START = 0.5
READOUT_PEAK = dict.fromkeys(("standard", "ntk"), (0.7, 0.8))
READOUT_PEAK |= dict.fromkeys(("mup", "mean_field"), (0.9, 1.0))
MLP_PEAK = 0.8
# The same section on SGD, in words only.
SGD_ALIGNMENT = dict.fromkeys(("standard", "mup"), "low amounts")
SGD_ALIGNMENT |= dict.fromkeys(("ntk", "mean_field"), "almost none")

# Everett et al., Section 4.3: which parameterisations gain from a smaller epsilon.
EPSILON_GAIN = {"standard": False, "ntk": True, "mup": False, "mean_field": True}

# The transfer table: which rule keeps its best value as the model grows, and who says so.


class Rule(NamedTuple):
    """A curve of a sweep; the `power` of the size that the rule gives to the best value, and who
    says that it is right (nobody: ""); the curve that it is compared with, and how it compares."""

    label: str
    paper: str
    curve: str
    against: str = ""
    claim: str = "no claim"
    power: float = 0.0


TRANSFER = {
    "width": (
        Rule("one rate", "", "standard_global", "mup_full", "above 0"),
        Rule(
            "embedding's rate kept",
            "Kalra & Barkeshli 2026",
            "standard_embedding",
            "mup_full",
            "about 0",
        ),
        Rule("standard, rate per layer", "Everett 2024", "standard_full", "mup_full"),
        Rule("muP", "Yang 2021", "mup_full"),
    ),
    **{
        f"depth, {words}": (
            Rule("no rule", "", f"{curve}_no_rule", f"{curve}_one", "above 0"),
            Rule(
                "branches times L^(-1/2)", "Yang 2023", f"{curve}_half", f"{curve}_one", "above 0"
            ),
            Rule("branches times 1/L", "Dey 2025", f"{curve}_one"),
        )
        for words, curve in (("norms", "norms"), ("no norms", "bare"))
    },
    "decay": (
        Rule("decay per step as D^0", "Wang & Aitchison 2024", "mup"),
        Rule("decay per step as D^(-1/2)", "Fan 2025", "mup", power=-0.5),
        Rule("decay per step as 1/D", "Qiu 2025", "mup", power=-1.0),
    ),
    "Muon": (
        Rule("Muon, spectral", "Bernstein 2024", "muon_spectral", "adam_mup"),
        Rule("Muon, match RMS", "Liu 2025", "muon_match_rms", "adam_mup"),
        Rule("Muon, match RMS, D^(-1/2)", "ours", "muon_match_rms_scaled", "adam_mup"),
        Rule("Adam, muP", "Yang 2021", "adam_mup"),
    ),
    "tied": (Rule("tied", "", "tied_mup", "untied_mup"), Rule("untied", "Yang 2021", "untied_mup")),
    **{
        f"batch, D = {n}": (
            Rule("rate as B^0", "", f"batch_{n}"),
            Rule("rate as B^(1/2)", "Malladi 2022", f"batch_{n}", power=0.5),
        )
        for n in (64, 128)
    },
    **{
        f"tokens, D = {n}": (
            Rule("rate as T^0", "nanochat", f"horizon_{n}"),
            Rule("rate as T^(-0.32)", "Ren 2026", f"horizon_{n}", power=-0.32),
            Rule("rate as T^(-1/2)", "held noise", f"horizon_{n}", power=-0.5),
        )
        for n in (64, 128)
    },
    "decay by batch": (
        Rule("decay per step as B", "Wang & Aitchison 2024", "batch_decay_64", power=1.0),
    ),
    "decay by tokens": (
        Rule("decay per step as 1/T", "Wang & Aitchison 2024", "horizon_decay_64", power=-1.0),
        Rule("decay per step as T^(-0.47)", "Power Lines", "horizon_decay_64", power=-0.473),
    ),
}
