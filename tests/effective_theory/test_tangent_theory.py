"""Neural tangent kernels against hand calculations, random weights and the closed-form rates."""

import pytest
import torch

from effective_theory.dinan.config import RatesConfig
from effective_theory.dinan.gaussian import activation_kernels
from effective_theory.dinan.kernels import forward
from effective_theory.dinan.tangent import adamw_factors, magnitudes, tangent, tensors
from tests.effective_theory.test_kernel_theory import _close, _config, _x


def _derive(config, x):
    kernels = forward(config, x)
    return kernels, tangent(config, x, kernels)


def _hat(kernels, block, theta):
    scale = (kernels.G[block].diagonal() + 1e-5).sqrt()
    return theta / (scale[:, None] * scale)


def test_depth_zero_by_hand():
    rates = {"stem": 2.0, "position": 3.0, "readout": 0.5, "readout_bias": 0.25}
    config = _config(init={"readout": 0.7}, rates=rates, depth=0, pooling=False)
    x = _x()
    kernels, derived = _derive(config, x)
    same = torch.eye(3).double().repeat(2, 2)
    stem = 2.0 * x.flatten(0, 1) @ x.flatten(0, 1).T / 5
    _close(derived.parts["stem"]["stem"], stem)
    _close(derived.theta["stem"], stem + 3.0 * same)
    head = derived.groups("head")
    assert list(head) == ["stem", "position", "readout", "readout_bias"]
    _close(head["stem"], 0.7 * _hat(kernels, "stem", stem))
    _close(head["position"], 0.7 * _hat(kernels, "stem", 3.0 * same))
    _close(head["readout"], 0.5 * kernels.F["stem"])
    _close(head["readout_bias"], torch.full((6, 6), 0.25).double())
    pooled = _derive(_config(init={"readout": 0.7}, rates=rates, depth=0), x)[1]
    total = sum(head.values()).view(2, 3, 2, 3).mean((1, 3))
    _close(pooled.theta["head"], total)


def test_a_tied_head_by_hand():
    config = _config("language", init={"stem": 0.4}, rates={"stem": 3.0}, depth=0, s=1.0)
    ids = torch.tensor([[0, 1], [1, 1]])
    kernels, derived = _derive(config, ids)
    same = (ids.view(-1, 1) == ids.view(1, -1)).double()
    head = derived.parts["head"]
    _close(head["stem"], 0.4 * _hat(kernels, "stem", 3.0 * same))
    _close(head["readout"], 3.0 * kernels.F["stem"])
    assert head.keys() == {"stem", "position", "readout"}


def test_one_token_has_no_gradient_of_queries_and_keys():
    init = {"value": 0.9, "attention_output": 0.5}
    kernels, derived = _derive(_config(init=init), _x(3, 1))
    parts = derived.parts["attention.0"]
    assert parts["attention.0.query"].abs().max() < 1e-12
    assert parts["attention.0.key"].abs().max() < 1e-12
    _close(parts["attention.0.value"], 0.5 * kernels.F["stem"])
    _close(parts["attention.0.attention_output"], 0.9 * kernels.F["stem"])
    before = derived.theta["stem"]
    _close(parts["stem"] + parts["position"], before + 0.45 * _hat(kernels, "stem", before))


def test_uniform_attention_by_hand():
    # Without queries the softmax is flat: Xi is that of p = q = 1/T, and keys have no gradient.
    init = {"query": 0.0, "key": 1.7, "value": 0.9, "attention_output": 0.5}
    kernels, derived = _derive(_config(init=init), _x())
    f = kernels.F["stem"]
    jacobian = torch.eye(3).double() / 3 - 1 / 9
    blocks = f.view(2, 3, 2, 3)
    xi = torch.einsum("is,ju,asbu,aibj->ab", jacobian, jacobian, blocks, blocks)
    xi = xi.repeat_interleave(3, 0).repeat_interleave(3, 1)
    parts = derived.parts["attention.0"]
    _close(parts["attention.0.query"], 0.45 * 1.7 * f * xi)
    assert parts["attention.0.key"].abs().max() == 0
    mixed = blocks.mean((1, 3)).repeat_interleave(3, 0).repeat_interleave(3, 1)
    _close(parts["attention.0.value"], 0.5 * mixed)


def test_a_change_of_the_signal_is_one_of_all_that_reads_it():
    """Of the signal's own kernel: as changes of queries, keys and values, each by its variance."""
    init = {"query": 1.5, "key": 0.7, "value": 0.8, "attention_output": 1.2}
    kernels, derived = _derive(_config(init=init | {"position": 0.0}), _x())
    before, parts = derived.parts["stem"]["stem"], derived.parts["attention.0"]
    _close(before, kernels.G["stem"])
    readers = (init[key] * parts[f"attention.0.{key}"] for key in ("query", "key", "value"))
    _close(parts["stem"] - before, sum(readers))


def test_mlp_by_hand():
    init = {"mlp_in": 0.6, "mlp_out": 1.4, "query": 0.0}  # exact attention
    rates = {"mlp_in": 2.0, "mlp_out": 3.0}
    for activation in ("identity", "gelu"):
        kernels, derived = _derive(_config(init=init, rates=rates, activation=activation), _x())
        f = kernels.F["attention.0"]
        values, slopes = activation_kernels(0.6 * f, activation)
        parts, before = derived.parts["mlp.0"], derived.parts["attention.0"]
        _close(parts["mlp.0.mlp_out"], 3.0 * values)
        _close(parts["mlp.0.mlp_in"], 2.0 * 1.4 * slopes * f)
        value = before["attention.0.value"]
        hat = _hat(kernels, "attention.0", value)
        _close(parts["attention.0.value"], value + 0.84 * slopes * hat)


@pytest.mark.parametrize("stem", ["vision", "language"])
def test_theta_is_the_same_for_every_strategy_and_size(stem):
    x = _x() if stem == "vision" else torch.tensor([[1, 2, 3], [2, 2, 5]])
    base = {"width": 48, "heads": 2, "draws": 256}
    _, expected = _derive(_config(stem, **base), x)
    factors = adamw_factors(_config(stem, **base), expected)
    assert 0.5 < float(expected.theta["head"].diagonal().mean()) < 10
    changes = [{"s": 0.5}, {"width": 768, "s": 1.0}, {"mlp_ratio": 1}, {"heads": 12}]
    for change in (*changes, {"outputs": 1000}):
        config = _config(stem, **base | change)
        _, derived = _derive(config, x)
        _close(derived.theta["head"], expected.theta["head"], 1e-9)
        for name, part in expected.parts["head"].items():
            _close(derived.parts["head"][name], part, 1e-9)
        for name, factor in adamw_factors(config, derived).items():
            assert factor.ratio == pytest.approx(factors[name].ratio)


def test_ratio_does_not_know_the_patch_size():
    config, x = _config(), _x()
    _, small = _derive(config, x)
    _, large = _derive(config, x.repeat(1, 1, 7))  # the same G^(0) from 7 times the pixels
    for name, factor in adamw_factors(config, small).items():
        assert adamw_factors(config, large)[name].ratio == pytest.approx(factor.ratio)


def test_theta_is_the_sum_of_parts_and_linear_in_every_rate():
    config, x = _config(depth=2), _x()
    _, derived = _derive(config, x)
    twice = _config(depth=2, rates={"query": 2.0, "mlp_out": 0.0})
    _, changed = _derive(twice, x)
    for block in derived.theta:
        _close(sum(derived.groups(block).values()), derived.theta[block])
        old, new = derived.groups(block), changed.groups(block)
        for group in old:
            _close(new[group], {"query": 2.0, "mlp_out": 0.0}.get(group, 1.0) * old[group])
    assert magnitudes(twice, changed) == pytest.approx(magnitudes(config, derived))
    assert adamw_factors(twice, changed)["mlp.1.mlp_out"].predicted == 0


def test_rates_and_closed_forms_are_those_of_the_paper():
    n, out, patch, m = 64, 10, 5, 4
    config = _config(width=n, outputs=out)
    _, derived = _derive(config, _x())
    root = n**-0.5
    attention = (f"attention.0.{name}" for name in ("query", "key", "value", "attention_output"))
    expected = {  # (1.99)-(1.107) and (1.108)-(1.116)
        "stem": (1 / patch, root / patch),
        "position": (1, root),
        **dict.fromkeys(attention, (1 / n, root / n)),
        "mlp.0.mlp_in": (1 / n, 1 / (n * (m * n) ** 0.5)),
        "mlp.0.mlp_out": (1 / (m * n), root / (m * n)),
        "readout": (1 / n, 1 / (n * out**0.5)),
        "readout_bias": (1, out**-0.5),
    }
    assert derived.rates == pytest.approx({name: sgd for name, (sgd, _) in expected.items()})
    factors = adamw_factors(config, derived)
    assert factors.keys() == expected.keys() == tensors(config, patch, 3).keys()
    for name, (sgd, adam) in expected.items():
        assert factors[name].closed_form == pytest.approx(adam)
        assert factors[name].gradient_scaling == pytest.approx(adam / sgd)
        assert factors[name].predicted == pytest.approx(factors[name].ratio * adam)


def test_magnitudes_by_hand():
    config, x = _config(depth=0, pooling=False, width=64, outputs=10, init={"readout": 0.7}), _x()
    kernels, derived = _derive(config, x)
    found = magnitudes(config, derived)
    variance = kernels.G["stem"].diagonal() + 1e-5
    inputs = x.flatten(0, 1).square().sum(-1)
    assert found["stem"] == pytest.approx(float((0.7 * inputs / variance).mean() / 64 / 5) ** 0.5)
    assert found["position"] == pytest.approx(float((0.7 / variance).mean() / 3 / 64) ** 0.5)
    assert found["readout"] == pytest.approx(10**-0.5, rel=1e-4)
    assert found["readout_bias"] == pytest.approx(10**-0.5)


def test_order_of_samples_is_a_label():
    config, x = _config(draws=4096, depth=2), _x()
    _, one = _derive(config, x)
    _, two = _derive(config, x.flip(0))
    apart = (one.theta["head"].flip(0, 1) - two.theta["head"]).abs()
    error = (one.theta_se["head"].flip(0, 1) ** 2 + two.theta_se["head"] ** 2).sqrt()
    assert float(error.min()) > 0 and float(error.max()) < 0.01
    assert bool((apart < 5 * error + 2e-3).all())


def test_the_mask_takes_future_tokens_from_the_first():
    # Alone behind the mask, the first token sees itself: no gradient of its queries and keys.
    _, derived = _derive(_config(causal=True, draws=256), _x())
    first = torch.tensor([0, 3])
    for name in ("query", "key"):
        part = derived.parts["attention.0"][f"attention.0.{name}"]
        assert part[first].abs().max() < 1e-12
        assert float(part[1, 1]) > 1e-3


def test_errors_are_the_spread_over_seeds():
    found = [
        _derive(_config(depth=2, draws=256, theory={"seed": seed}), _x()) for seed in range(10)
    ]
    for block in ("attention.0", "mlp.1", "head"):
        for which, values, errors in ((0, "G", "G_se"), (1, "theta", "theta_se")):
            own = [pair[which] for pair in found]
            spread = torch.stack([getattr(one, values)[block] for one in own]).var(0).mean()
            error = torch.stack([getattr(one, errors)[block] for one in own]).square().mean()
            assert 0.6 < float((spread / error).sqrt()) < 1.6


def test_errors_of_the_forward_kernels_are_part_of_those_of_theta():
    rates = dict.fromkeys(RatesConfig.model_fields, 0.0) | {"readout": 1.0}
    kernels, derived = _derive(_config(rates=rates, draws=256), _x())
    assert float(kernels.G_se["head"].min()) > 0
    _close(derived.theta["head"], kernels.G["head"])
    _close(derived.theta_se["head"], kernels.G_se["head"])
