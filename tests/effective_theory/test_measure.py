"""Measured kernels against loops over gradients and closed forms."""

import math

import numpy as np
import pytest
import torch

from effective_theory.dinan.config import ALPHABET, Config, block_names
from effective_theory.dinan.inputs import inputs
from effective_theory.dinan.measure import (
    combine,
    extrapolate,
    limit,
    measure,
    measure_widths,
    network,
)
from effective_theory.dinan.network import Encoder
from effective_theory.dinan.observation import observe, rate, tangent_kernels

STEMS = ["vision", "language"]


def config(stem="vision", rates=None, init=None, widths=(8,), seeds=(3,), outputs=2, **model):
    language = stem == "language"
    settings = {"depth": 1, "outputs": 40, "pooling": not language, "causal": language} | model
    sections = {"model": {"stem": stem, **settings}, "rates": rates or {}, "init": init or {}}
    return Config(**sections, measure={"widths": widths, "seeds": seeds, "outputs": outputs})


def encoder(settings, width=8, dtype=torch.float64):
    return Encoder(settings, width, dtype).initialise(torch.Generator().manual_seed(0))


def flat_outputs(z, free=0):
    """z (D, T, n) or (D, n) -> rows (P, 2) of the components whose gradients are measured."""
    return z[..., free : free + 2].reshape(-1, 2)


def looped_kernels(model, x, block):
    """Gram matrices (2, 2, P, P) of gradients taken one output at a time, by tensor."""
    free = ALPHABET if model.tied and block == "head" else 0
    outputs = flat_outputs(model(x)[block], free)
    parameters, keep = dict(model.named_parameters()), {"retain_graph": True}
    gradients = [
        torch.autograd.grad(one, [*parameters.values()], **keep, materialize_grads=True)
        for one in outputs.T.flatten()
    ]
    kernels = {}
    for name, rows in zip(parameters, zip(*gradients, strict=True), strict=True):
        rows = torch.stack([row.flatten() for row in rows]).view(2, len(outputs), -1)
        kernels[name] = torch.einsum("iap,jbp->ijab", rows, rows)
    return kernels


@pytest.mark.parametrize("pooling", [True, False])
@pytest.mark.parametrize("stem", STEMS)
def test_tangent_kernels_are_products_of_gradients(stem, pooling):
    settings = config(stem, pooling=pooling and stem == "vision", causal=not pooling)
    model, x, trace = encoder(settings), inputs(settings), {}
    z = model(x, trace)
    for block in block_names(1):
        kernels = tangent_kernels(model, z, trace, block)
        expected = looped_kernels(model, x, block)
        if stem == "language" and block == "head":
            # without a cross term: no input has the outputs that are measured
            kernels["stem"] = kernels["stem"] + kernels.pop("readout")
        for name, kernel in expected.items():
            if kernel.any():
                torch.testing.assert_close(kernels.pop(name), kernel, rtol=1e-10, atol=1e-12)
        assert not kernels


@pytest.mark.parametrize("stem", STEMS)
def test_float32_kernels_are_those_of_float64(stem):
    settings = config(stem)
    model, x, trace = encoder(settings, 32, torch.float32), inputs(settings), {}
    exact = encoder(settings, 32)
    exact.load_state_dict(model.state_dict())
    z = model(x, trace)
    for block in ("attention.0", "head"):
        kernels = tangent_kernels(model, z, trace, block)
        expected = looped_kernels(exact, x, block)
        if stem == "language" and block == "head":
            kernels["stem"] = kernels["stem"] + kernels.pop("readout")
        for name, kernel in kernels.items():
            difference = (expected[name] - kernel).abs().max()
            assert difference <= 1e-5 * expected[name].abs().max()


@pytest.mark.parametrize("stem", STEMS)
def test_rates(stem):
    width, s, ratio = 8, 0.5, 3
    names = "stem position query key value attention_output mlp_in mlp_out readout readout_bias"
    rates = {name: 2.0 + index for index, name in enumerate(names.split())}
    own = {name: rate for name, rate in rates.items() if stem == "vision" or "readout" not in name}
    model = Encoder(config(stem, own, s=s, mlp_ratio=ratio), width)
    head = rates["stem"] * width**s if stem == "language" else rates["readout"] / width
    expected = {  # (1.99)-(1.107), times n^s except for an untied head
        "stem": rates["stem"] * width**s / (16 if stem == "vision" else 1),
        "position": rates["position"] * width**s,
        "attention.0.query": rates["query"] * width**s / width,
        "attention.0.attention_output": rates["attention_output"] * width**s / width,
        "mlp.0.mlp_in": rates["mlp_in"] * width**s / width,
        "mlp.0.mlp_out": rates["mlp_out"] * width**s / (ratio * width),
        "readout": head,
    }
    if stem == "vision":
        expected["readout_bias"] = rates["readout_bias"]
    assert {name: rate(model, name) for name in expected} == pytest.approx(expected)


@pytest.mark.parametrize("stem", STEMS)
def test_an_observation_is_made_of_averages_over_components(stem):
    settings = config(stem, {"query": 3.0})
    model, x = encoder(settings), inputs(settings)
    values, z = observe(model, x), model(x)
    free = ALPHABET if stem == "language" else 0
    outputs = z["head"].reshape(-1, 40)[:, free:].detach()
    torch.testing.assert_close(values["G", "head"], outputs @ outputs.T / (40 - free))
    rows = z["mlp.0"].detach().view(8, 8)
    torch.testing.assert_close(values["G", "mlp.0"], rows @ rows.T / 8)
    rows = model.norm(rows)
    torch.testing.assert_close(values["F", "mlp.0"], rows @ rows.T / 8)
    assert ("F", "head") not in values
    kernel = looped_kernels(model, x, "head")["attention.0.query"] * 3 / 8
    average = (kernel[0, 0] + kernel[1, 1]) / 2
    torch.testing.assert_close(values["theta", "head", "attention.0.query"], average)
    total = sum(
        value for key, value in values.items() if key[:2] == ("theta", "head") and key[2] != "total"
    )
    torch.testing.assert_close(values["theta", "head", "total"], total)
    kernels = looped_kernels(model, x, "attention.0")
    mixed = sum(
        rate(model, name) * (kernel[0, 1] + kernel[1, 0]) / 2
        for name, kernel in kernels.items()
        if kernel.any()
    )
    torch.testing.assert_close(values["off_diagonal", "attention.0"], mixed)


@pytest.mark.parametrize("stem", STEMS)
def test_gradient_magnitudes(stem):
    settings = config(stem)
    model, x = encoder(settings), inputs(settings)
    values = observe(model, x)
    kernels = looped_kernels(model, x, "head")
    squares = {
        name: (kernel[0, 0].trace() + kernel[1, 1].trace()) / 2 / len(kernel[0, 0])
        for name, kernel in kernels.items()
    }
    assert values["magnitudes", "mlp.0.mlp_in"] == pytest.approx(
        squares["mlp.0.mlp_in"].item() / (8 * 32)
    )
    assert values["magnitudes", "position"] == pytest.approx(squares["position"].item() / (4 * 8))
    if stem == "vision":
        assert values["magnitudes", "readout_bias"] == pytest.approx(1 / 40)
    else:  # one row of words, at each of its uses
        both = values["magnitudes", "stem"] + values["magnitudes", "readout"]
        assert both == pytest.approx(squares["stem"].item() / 8)


@pytest.mark.parametrize("stem", STEMS)
def test_the_stem_is_the_papers_in_expectation(stem):
    rates, init = {"stem": 2.0, "position": 3.0}, {"stem": 0.7, "position": 0.4}
    settings = config(stem, rates=rates, init=init, depth=0, norm_eps=0.3)
    x = inputs(settings)
    measured = measure(settings, 64, range(120), x)
    rows = (
        torch.nn.functional.one_hot(x, 40).double().flatten(0, 1)
        if stem == "language"
        else x.flatten(0, 1) / 16**0.5
    )
    before = rows @ rows.T  # G^(0), (1.40) or (1.44)
    same = torch.eye(4, dtype=torch.float64).repeat(2, 2)
    error = measured.mean.G["stem"] - (0.7 * before + 0.4 * same)  # (1.41)
    assert (error.abs() <= 5 * measured.se.G["stem"]).all()
    assert measured.se.G["stem"].max() < 0.05
    theta = measured.mean.theta["stem"]  # (1.122), (1.123), of every network
    torch.testing.assert_close(theta["stem"], 2 * before, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(theta["position"], 3 * same, rtol=1e-6, atol=1e-6)
    assert measured.se.theta["stem"]["total"].max() < 1e-6
    kernel = 0.7 * before + 0.4 * same
    scale = (kernel.diagonal() + 0.3).rsqrt()
    expected = scale[:, None] * kernel * scale  # (1.53)
    assert ((measured.mean.F["stem"] - expected).abs() <= 5 * measured.se.F["stem"] + 2 / 64).all()


def test_means_and_standard_errors_are_those_of_the_networks():
    settings = config()
    x, seeds = inputs(settings), range(30)  # more than one partial sum
    measured = measure(settings, 8, seeds, x)
    observed = [observe(network(settings, 8, seed), x) for seed in seeds]
    theta = np.stack([values["theta", "head", "total"].numpy() for values in observed])
    np.testing.assert_allclose(measured.mean.theta["head"]["total"], theta.mean(0), rtol=1e-12)
    expected = theta.std(0, ddof=1) / math.sqrt(30)
    np.testing.assert_allclose(measured.se.theta["head"]["total"], expected, rtol=1e-10)
    squares = np.stack([values["magnitudes", "stem"].numpy() for values in observed])
    root = math.sqrt(squares.mean())
    assert measured.mean.magnitudes["stem"] == pytest.approx(root)
    expected = squares.std(ddof=1) / math.sqrt(30) / (2 * root)
    assert measured.se.magnitudes["stem"] == pytest.approx(expected)
    assert measured.count == 30
    assert measure(settings, 8, [0], x).se.G["stem"].isnan().all()


def test_seeds_name_networks_however_they_are_split():
    settings = config(depth=0)
    x = inputs(settings)
    together = measure(settings, 8, range(6), x)
    split = combine([measure(settings, 8, seeds, x) for seeds in ([4, 1], [0], [5, 2, 3])])
    for one, other in ((together.mean, split.mean), (together.se, split.se)):
        torch.testing.assert_close(one.theta["head"], other.theta["head"], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(one.G, other.G, rtol=1e-12, atol=1e-12)
    assert not torch.equal(network(settings, 8, 0).stem, network(settings, 8, 1).stem)
    wide, narrow = network(settings, 16, 0).stem, network(settings, 8, 0).stem
    assert not torch.isin(narrow, wide).any()


@pytest.mark.thorough
def test_two_processes_measure_what_one_does():
    settings = config(depth=0, widths=(8, 16), seeds=(30, 3))
    calls = []
    one = measure_widths(settings)
    two = measure_widths(settings, processes=2, progress=lambda *done: calls.append(done))
    assert [(part.width, part.seeds) for part in one] == [(8, tuple(range(30))), (16, (0, 1, 2))]
    for alone, both in zip(one, two, strict=True):
        assert (alone.width, alone.seeds) == (both.width, both.seeds)
        torch.testing.assert_close(alone.averages, both.averages, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(alone.squares, both.squares, rtol=1e-4, atol=1e-7)
    assert calls[-1] == (33, 33) and len(calls) == 3


def test_extrapolation_is_exact_on_straight_lines():
    widths = [64, 128, 256, 1024]
    a, b = torch.randn(2, 2, 5, generator=torch.Generator().manual_seed(0)).double()
    ses = [torch.rand(2, 5, generator=torch.Generator().manual_seed(n)) + 0.1 for n in widths]
    line = [a + b / n for n in widths]
    torch.testing.assert_close(extrapolate(widths, line, ses).value, a)
    known = [torch.zeros(2, 5)] * 4
    value, se = extrapolate(widths, line, known)
    torch.testing.assert_close(value, a)
    assert se.max() < 1e-7
    assert not extrapolate(widths, known, known).value.any()


def test_extrapolation_weighs_by_standard_errors():
    y, errors = [2.0, 1.2], [0.1, 0.3]
    tensors = [torch.tensor([value]) for value in y], [torch.tensor([error]) for error in errors]
    value, se = extrapolate([100, 300], *tensors)
    assert value.item() == pytest.approx((300 * y[1] - 100 * y[0]) / 200, rel=1e-6)
    expected = math.hypot(300 * errors[1], 100 * errors[0]) / 200
    assert se.item() == pytest.approx(expected, rel=1e-6)
    widths, y, errors = np.array([50, 100, 400]), np.array([3.0, 2.5, 2.6]), np.array([1, 0.1, 0.2])
    (_slope, constant), covariance = np.polyfit(1 / widths, y, 1, w=1 / errors, cov="unscaled")
    value, se = extrapolate(
        widths.tolist(), list(torch.from_numpy(y)), list(torch.from_numpy(errors))
    )
    assert value.item() == pytest.approx(constant)
    assert se.item() == pytest.approx(covariance[1, 1] ** 0.5)


def test_the_limit_extrapolates_every_kernel():
    settings = config(depth=0, outputs=1)
    x = inputs(settings)
    parts = [measure(settings, width, range(4), x) for width in (8, 16, 32)]
    result = limit(parts)
    means = [part.mean.theta["head"]["position"] for part in parts]
    ses = [part.se.theta["head"]["position"] for part in parts]
    value, se = extrapolate([8, 16, 32], means, ses)
    torch.testing.assert_close(result.mean.theta["head"]["position"], value)
    torch.testing.assert_close(result.se.theta["head"]["position"], se)
    assert not result.mean.magnitudes and not result.mean.off_diagonal
