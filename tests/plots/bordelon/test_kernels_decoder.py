"""Figures 6 to 10 and 12 of Bordelon et al.: their sweeps, and findings from constructed tables."""

import itertools
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from plots.__main__ import make
from plots.bordelon import decoder, kernels, observed
from plots.bordelon.scans import ALPHA, HEAD_DIM, HEADS, LAYERS, Losses
from sweeps import tables as sweep_tables
from sweeps.sweep_file import load_sweep
from tests.plots.made import lines as by_name
from tests.plots.made import written
from vit_cifar5m import train

ROOT = Path(__file__).resolve().parents[3]


SMALL = """
experiment: vit_cifar5m
config: {config}
set: {{model.head_dim: 2, model.heads: 2, model.layers: 1, model.patch_size: 16,
  prescription.alpha_attention: 1.0,
  training.steps: 4, training.batch_size: 4, training.log_every: 1, training.eval_every: 4,
  training.observe_every: 2, training.observe_samples: 5, data.validation_images: 8}}
curves: {{base: {{}}, heads: {{grid: {{model.heads: [4]}}}}}}
metrics: true
observations: true
"""


def test_a_real_sweeps_tables_become_its_figures(tmp_path):
    path = tmp_path / "s.yaml"
    path.write_text(SMALL.format(config=ROOT / "vit_cifar5m/configs/laptop.yaml"))
    sweep = load_sweep(path, tmp_path)
    summaries = {p.run: train.EXPERIMENT.run(p.config, sweep.folder / p.run) for p in sweep.points}
    sweep_tables.write(sweep, sweep.points, summaries, final=True)
    paths = [
        sweep.folder / f"{table}.csv"
        for table in ("observed_kernels", "observed_attention", "metrics")
    ]
    text, written = make("bordelon/kernels", paths, tmp_path / "figures")
    names = "6_attention 6_pooled 6_spatial 6_dynamics 8_dynamics 9_kernels 10_kernels"
    assert {p.stem for p in written} == {f"figure_{name}" for name in names.split()}
    assert "base H = 2, N = 2, L = 1" in text


def place(seed=0, alpha=1.0, step=0, **sizes):
    """The columns before what was measured, of base (H, N, L) = (2, 2, 2)."""
    own = {HEADS: 2, HEAD_DIM: 2, LAYERS: 2, **{f"model.{k}": v for k, v in sizes.items()}}
    run = f"{own}-{alpha}-{seed}"
    return {"curve": "c", **own, ALPHA: alpha, "seed": seed, "step": step, "run": run}


def kernel(kind, matrix, **where):
    """The rows of one kernel."""
    return [
        {**place(**where), "kind": kind, "row": i, "column": j, "value": matrix[i, j]}
        for i, j in itertools.combinations_with_replacement(range(len(matrix)), 2)
    ]


def alignment(first, second):
    return observed.product(observed.centred(first), observed.centred(second))


def symmetric(seed, side=6):
    """A random kernel."""
    features = np.random.default_rng(seed).normal(size=(side, 2 * side))
    return features @ features.T / side


SCANS = [{}, *({key: size} for key in ("heads", "head_dim", "layers") for size in (4, 8, 16))]


def kernel_rows(alphas=(1.0,), seeds=(0, 1), add=lambda size: 1 / size):
    """Initial kernels with diagonals 1 + 2/L, final ones that approach one kernel as 1/size."""
    rows = []
    for sizes, alpha, seed in itertools.product(SCANS, alphas, seeds):
        size = max(sizes.values(), default=2)
        for kind in ("pooled", "spatial", "last_token"):
            diagonal = (1 + 2 / sizes.get("layers", 2)) * (1 + 1e-4 * seed)
            initial = np.diag(np.full(6, diagonal))
            noise = add(size) * symmetric(100 + 10 * size + seed)
            where = {"seed": seed, "alpha": alpha, **sizes}
            rows += kernel(kind, initial, **where)
            rows += kernel(kind, symmetric(1) + noise, step=9, **where)
    return pd.DataFrame(rows)


def attention_rows(alphas=(1.0, 0.5), heads=400, seeds=(0,)):
    """A with variance N^(1 - 2 alpha) at both steps, moved by 3 between."""
    rows = []
    for alpha, n, seed in itertools.product(alphas, (2, 4, 8, 16), seeds):
        values = np.random.default_rng(n + 100 * seed).normal(size=heads) * n ** (0.5 - alpha)
        for step, other in itertools.product((0, 9), (0, 3)):
            at = place(alpha=alpha, head_dim=n, step=step, seed=seed)
            at |= {"block": 0, "token": 5, "attended": other}
            rows += [{**at, "head": h, "value": v + step / 3} for h, v in enumerate(values)]
    return pd.DataFrame(rows)


def data(kernel_table, attention_table):
    """Both without losses."""
    none = Losses(pd.DataFrame(), [])
    return kernels.Data(kernel_table, attention_table, none, none)


def test_alignment_knows_neither_scale_nor_a_constant():
    first, second = symmetric(1), symmetric(2)
    assert alignment(first, 3 * first + 7) == pytest.approx(1)
    centring = np.eye(6) - 1 / 6
    a, b = (centring @ k @ centring for k in (first, second))
    expected = np.trace(a @ b) / math.sqrt(np.trace(a @ a) * np.trace(b @ b))
    assert alignment(first, second) == pytest.approx(expected)
    assert math.isnan(alignment(np.ones((6, 6)), first))


def test_kernels_are_symmetric_again_and_each_scan_has_the_base_and_its_own_sizes():
    rows = kernel_rows()
    shuffled = rows.sample(frac=1, random_state=3)
    found = observed.pairs(shuffled, "pooled", HEADS, 1.0)
    assert sorted(found) == [(size, seed) for size in (2, 4, 8, 16) for seed in (0, 1)]
    expected = symmetric(1) + symmetric(100 + 40 + 1) / 4
    np.testing.assert_allclose(found[4, 1][1], expected)
    np.testing.assert_allclose(
        observed.pairs(rows, "pooled", LAYERS, 1.0)[8, 0][0], np.eye(6) * 1.25
    )


def test_final_kernels_that_approach_one_are_found_to_and_others_are_not():
    def verdict(seeds=(0, 1, 2, 3), **options):
        found = observed.pairs(kernel_rows(seeds=seeds, **options), "pooled", HEADS, 1.0)
        return observed.aligned(found, "pooled", HEADS, 1)

    finding = verdict()
    assert finding.verdict == "agrees" and "alignment with H = 16" in finding.name
    assert "(n = 4)" in finding.measured
    # By seed: what is common to both sizes' kernels does not count.
    found = observed.pairs(kernel_rows(seeds=(0, 1, 2, 3)), "pooled", HEADS, 1.0)
    values = observed.to_largest(found, 1)
    gain = observed.over_seeds({pair: values[8][pair] - values[2][pair] for pair in values[2]})
    assert finding.estimate == gain
    rising = verdict(add=lambda size: 0 if size in (2, 16) else 9)
    assert rising.verdict == "disagrees"
    assert verdict(seeds=(0, 1)).verdict == "undecided (n = 2)"
    assert verdict(seeds=(0,)).measured == "not measured"


def test_kernels_are_aligned_with_those_of_other_seeds_alone():
    found = observed.pairs(kernel_rows(seeds=(0, 1, 2)), "pooled", HEADS, 1.0)
    values = observed.to_largest(found, 1)
    own = {
        (s, t): alignment(
            symmetric(1) + symmetric(120 + s) / 2, symmetric(1) + symmetric(260 + t) / 16
        )
        for s, t in itertools.permutations(range(3), 2)
    }
    assert set(values) == {2, 4, 8} and values[2] == pytest.approx(own)
    lines = observed.basis(kernel_rows(seeds=(0, 1, 2)))
    assert "runs of different seeds" in lines[0] and "over 6 pairs of 3 seeds" in lines[0]
    assert "the H and N scans start from the same networks" in lines[1]
    assert len(observed.basis(kernel_rows(alphas=(0.5,)))) == 1


def test_the_error_over_pairs_of_seeds_is_that_of_independent_seeds():
    # Where a pair's value is the sum of its seeds' own, the mean is twice that of the seeds.
    own = np.random.default_rng(0).normal(size=5)
    pairs = {(s, t): own[s] + own[t] for s, t in itertools.permutations(range(5), 2)}
    expected = 2 * own.mean(), 2 * own.std(ddof=1) / math.sqrt(5), 5
    found = observed.over_seeds(pairs)
    assert (found.value, found.error, found.groups) == pytest.approx(expected)
    two = observed.over_seeds({(0, 1): 1.0, (1, 0): 2.0})
    assert (two.value, two.groups) == (1.5, 2) and math.isnan(two.error)
    assert math.isnan(observed.over_seeds({}).value)


def test_the_spread_over_heads_and_the_change_are_measured_against_n():
    found = by_name(kernels.findings(data(kernel_rows(), attention_rows(seeds=(0, 1, 2)))))
    for alpha, slope in (("1", "-1.00"), ("1/2", "+0.00")):
        for state in ("initial", "final"):
            name = f"alpha_A = {alpha}: {state} variance of A over heads, exponent of N"
            measured = float(found[name].measured.split()[0])
            assert measured == pytest.approx(float(slope), abs=0.1)
        change = found[f"alpha_A = {alpha}: RMS change of A, exponent of N"]
        assert change.measured.startswith("+0.000 ±") and change.published == "0"
        variance = found[f"alpha_A = {alpha}: final variance of A over heads, exponent of N"]
        # What the caption of Fig. 2b says is beside it, and not what it is judged by.
        assert variance.published == ("-1 derived (2b: -2)" if alpha == "1" else "0")
        assert variance.verdict == "agrees within 95 %"


def test_spread_is_the_unbiased_variance_within_places():
    values = np.array([[1.0, 2.0, 6.0], [10.0, 10.0, 10.0]])
    assert kernels.spread(values) == pytest.approx(7 / 2)


def read(folder, *args, **options):
    """The decoder's tables, with kernels of one seed."""
    table = written(folder, kernels=kernel_rows(seeds=(0,)))
    return decoder.read([*runs(folder, *args, **options), *table])


def runs(tmp_path, seeds=(0, 1), losses=lambda alpha, key, size, seed: 3.0, statuses="finished"):
    """results.csv and metrics.csv of scans whose final loss is as said; falls by 1 per e-fold."""
    table, logged = [], []
    for sizes, alpha, seed in itertools.product(SCANS, (1.0, 0.5), seeds):
        key, size = next(iter(sizes.items()), ("base", 2))
        final, own = losses(alpha, key, size, seed), place(alpha=alpha, seed=seed, **sizes)
        counts = {"steps": 100, "parameters": 1000 * size, "targets": 100 * 7}
        table.append({**own, "status": statuses, "final_eval_loss": final, **counts})
        for step in range(1, 101):
            loss = final + math.log(100 / step)
            evaluated = loss if step % 10 == 0 else math.nan
            logged.append({**own, "step": step, "train_loss": loss, "eval_loss": evaluated})
    return written(tmp_path, results=table, metrics=logged)


def gains(alpha, key, size, seed):
    """H gains 0.1 per doubling, N 0.1 at alpha 1 and 0.3 at 1/2, L nothing."""
    per = {"base": 0, "heads": 0.1, "head_dim": 0.1 if alpha == 1 else 0.3, "layers": 0}[key]
    noise = {0: 0.01, 1: -0.01, 2: 0}[seed] * (1 if size < 16 else -1)
    return 5 - per * math.log2(size / 2) + noise


def test_the_decoders_losses_gains_and_flops(tmp_path):
    own = read(tmp_path, (0, 1, 2), gains)
    found = by_name(decoder.findings(own))
    assert found["alpha_A = 1: final loss by H"].measured.startswith("2: 5.000±0.006, 4: 4.900±0")
    base = "loss of the base minus that of the largest"
    assert found[f"alpha_A = 1: {base} H"].verdict == "agrees"
    assert found[f"alpha_A = 1/2: {base} N"].measured.startswith("+0.9000 ± 0.0115 (n = 3)")
    flat = found[f"alpha_A = 1: {base} L"]
    assert (flat.published, flat.verdict) == ("little", "") and flat.measured.startswith("+0.0000")
    more = found["alpha_A = 1: gain of 8 times H minus that of L"]
    assert more.measured.startswith("+0.3000 ± 0.0000 (n = 3)") and more.verdict == "agrees"
    assert found["gain of growing N at alpha_A = 1/2 minus that at 1"].measured.startswith("+0.6")


def test_flops_are_six_per_parameter_and_token(tmp_path):
    own = read(tmp_path).metrics
    row = own[(own[HEADS] == 4) & (own["step"] == 30)].iloc[0]
    assert row["flops"] == 6 * 4000 * 7 * 30
