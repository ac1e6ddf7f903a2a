"""Tables as the sweeps of Everett et al.'s figures write them, made with known answers."""

import math
from itertools import product

import pandas as pd

from plots import style
from plots.everett import adafactor, alignment, epsilon
from tests.plots.made import rows

RULES = tuple(style.LABELS)
WIDTHS = (32, 64, 128, 256)


def sweep(
    curve,
    rule,
    *,
    exponent=-0.5,
    shift=0.0,
    widths=WIDTHS,
    powers=range(-11, -2),
    seeds=(0, 1),
    spread=0.02,
    diverged_above=math.inf,
    **columns,
):
    """Rows of parabolas in log2 lr: optimum 2^-7 at width 64, moving with a power of width; two
    seeds lie `spread` apart, `shift` and a power of size with a floor are added."""
    rows = []
    for width, power, seed in product(widths, powers, seeds):
        vertex = -7 + exponent * math.log2(width / 64)
        loss = 3 + 2 * (width / 64) ** -0.5 + shift + 0.05 * (power - vertex) ** 2
        gone = 2.0**power > diverged_above
        point = {"curve": curve, "prescription.parameterization": rule, "model.width": width}
        point |= {"optimizer.lr": 2.0**power, "seed": seed, "run": "x", "parameters": width**2}
        ended = {"status": "finished", "final_eval_loss": loss + spread * seed}
        lost = {"status": "diverged", "final_eval_loss": math.nan}
        rows.append({**point, **(lost if gone else ended), **columns})
    return rows


SHIFTS = {"global": 0.3, "full": 0.2, "full_constants": 0.0, "none_constants": 0.05}


def interventions(optimizer="adam", shifts=SHIFTS, rules=RULES, **options):
    rows = [
        row
        for curve, shift in shifts.items()
        for rule in rules
        for row in sweep(curve, rule, shift=shift, **{"optimizer.name": optimizer}, **options)
    ]
    return pd.DataFrame(rows)


def horizons(fixed=-0.5, optimal=-0.9, rules=RULES, **options):
    rows = []
    for rule in rules:
        rows += sweep(f"{rule}_fixed", rule, exponent=fixed, **options)
        rows += sweep(f"{rule}_compute_optimal", rule, exponent=optimal, **options)
    return pd.DataFrame(rows)


def decayed(shift=-0.1, **options):
    rows = []
    for rule in RULES:
        rows += sweep("decay_fixed", rule, shift=shift, **options)
        rows += sweep("decay_compute_optimal", rule, shift=shift, exponent=-0.9)
    return pd.DataFrame(rows)


def families(gap=0.01, **options):
    rows = [
        row
        for family, shift in (("adafactor", gap), ("param_scaling", 0.0))
        for setting in adafactor.SETTINGS
        for index, rule in enumerate(RULES)
        for row in sweep(f"{family}_{setting}", rule, shift=shift + 0.1 * index, **options)
    ]
    return pd.DataFrame(rows)


def mitigations(
    baseline="enlarged", gains=(0.0, 0.2, 0.0, 0.6), growth=0.0, widths=(32, 64), **options
):
    """Cures gain `gains` at the first width and with every further one a share `growth` of them."""
    rows = []
    for rule, gain in zip(RULES, gains, strict=True):
        eps = {"enlarged": 1e-4, "default": 1e-9, "small": 1e-15, "per_layer": 1e-12}
        for curve in (baseline, *epsilon.MITIGATIONS):
            columns = {"optimizer.eps": eps.get(curve, math.nan)}
            for step, width in enumerate(widths):
                shift = gain * (1 + growth * step) * (curve == baseline)
                rows += sweep(curve, rule, shift=shift, widths=(width,), **columns, **options)
    return pd.DataFrame(rows)


def heat(lost=None):
    """Lowest at 1e-9, 0.1 nats per power of ten away from it; `lost` is a diverged epsilon."""
    cells = product(epsilon.SCALINGS, RULES, (64, 128), range(-12, -5))
    columns = "curve prescription.parameterization model.width optimizer.eps final_eval_loss"
    found = rows(columns, [(*at, 10.0**p, 4 + 0.1 * abs(p + 9)) for *at, p in cells])
    gone = found["optimizer.eps"] == 10.0 ** (lost or 0)
    found["final_eval_loss"] = found["final_eval_loss"].mask(gone)
    status = found["final_eval_loss"].isna().map({True: "diverged", False: "finished"})
    return found.assign(seed=0, run="x", status=status)


LAYERS = (
    "blocks.0.mlp.up blocks.1.mlp.up blocks.0.mlp.down blocks.0.attention.query "
    "blocks.0.attention.key blocks.0.attention.value blocks.0.attention.output readout"
).split()


def probes(readout=0.95, mlp=0.7, curves=tuple(alignment.FIGURES), widths=(64, 128), seeds=(0, 1)):
    """From 0.5 up to a peak at step 20 and down; the second block is 0.05 higher there."""
    found = []
    for curve, rule, width, seed, layer in product(curves, RULES, widths, seeds, LAYERS):
        top = readout if layer == "readout" else mlp + 0.05 * (".1." in layer)
        fan_in = width * (4 if layer.endswith("down") else 1)
        for step, height in ((1, 0), (20, 1), (40, 0.5)):
            ratio = 0.5 + (top - 0.5 + 0.01 * seed) * height
            found.append((curve, rule, width, seed, layer, fan_in, step, ratio))
    names = "curve prescription.parameterization model.width seed layer fan_in step alignment"
    return rows(names, found).assign(run="x")


def depths(**powers):
    """Depth in place of width: one base depth of 32, and three more in every curve."""
    powers = {"no_rule": -0.5, "half": 0.0, "one": 0.0} | powers
    rows = [
        row
        for rule in RULES
        for row in sweep("base", rule, widths=(32,), exponent=0.0, spread=0.002)
    ]
    for curve, exponent in powers.items():
        for rule in RULES:
            shifted = {"exponent": exponent, "widths": (64, 128, 256), "spread": 0.002}
            rows += sweep(curve, rule, shift=0.1 * (curve == "no_rule"), **shifted)
    # A power of 0 has its optimum at 2^-7 everywhere, so the base lies on every line but no_rule's.
    return pd.DataFrame(rows).assign(**{"model.layers": lambda table: table["model.width"]})


def longer(exponents, gains, **options):
    """Tables of longer runs: steps -> exponent of all parameterisations, steps -> loss of standard
    minus that of muP; 200 steps are those of Figures 12 and 2."""
    every = {"steps": 200, "horizon": "fixed", **options}
    short = [
        r for rule in RULES for r in sweep(f"{rule}_fixed", rule, exponent=exponents[200], **every)
    ]
    fair = interventions("adam", {"full_constants": 0.0}, ("mup",), **every).to_dict("records")
    shift = {"full_constants": gains[200]}
    fair += interventions("adam", shift, ("standard",), **every).to_dict("records")
    long, compared = [], []
    for steps in (800, 3200):
        own = {**every, "steps": steps}
        for rule in RULES:
            long += sweep(f"steps_{steps}", rule, exponent=exponents[steps], **own)
        for rule in ("standard", "mup"):
            shift = gains[steps] * (rule == "standard")
            compared += sweep(f"steps_{steps}", rule, shift=shift, **{**own, "widths": (64,)})
    return {
        "length": pd.DataFrame(long),
        "length_constants": pd.DataFrame(compared),
        "figure_12_adam": pd.DataFrame(short),
        "figure_2_adam": pd.DataFrame(fair),
    }
