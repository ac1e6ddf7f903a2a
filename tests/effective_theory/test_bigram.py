"""The bigram family against autograd, dense training, the lemmas and the published tables."""

import itertools
import json
from fractions import Fraction

import numpy as np
import pytest
import torch

from effective_theory.stratos import bigram
from effective_theory.stratos import exponents as bigram_exponents
from effective_theory.stratos import training as bigram_training
from effective_theory.stratos.bigram import BigramConfig, GaussianMatrix, Model, Sum, propagate
from effective_theory.stratos.table_1 import STRATOS_TABLE
from param_groups.rules import exponents as ex
from tests.effective_theory.test_bigram_exponents import FITTED

SMALL = BigramConfig(
    vocabulary=5, widths=(6, 9), seeds=3, steps=3, learning_rate=0.1, small_learning_rate=0.1
)


class Dense:
    """Matrices that are stored: (networks, rows, columns)."""

    def __init__(self, weights):
        self.weights = weights

    def times(self, right):
        return torch.einsum("smn,sn->sm", self.weights, right)

    def transposed_times(self, left):
        return torch.einsum("smn,sm->sn", self.weights, left)


def dense_weights(width, networks, vocabulary=5, hidden_layers=2, std=1.0, seed=0):
    """Stored W_0..W_{L+1} with entries of variance std^2 / columns; W_0 is d x 1."""
    generator = torch.Generator().manual_seed(seed)
    dims = [1, *[width] * (hidden_layers + 1), vocabulary]
    shapes = [(networks, rows, columns) for columns, rows in itertools.pairwise(dims)]
    draw = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    return [std * w / w.shape[2] ** 0.5 for w in draw]


def model_of(weights, multipliers=None, rms_norm=False):
    matrices = tuple(Sum((Dense(w),)) for w in weights)
    return Model(matrices, tuple(multipliers or [1.0] * len(weights)), rms_norm)


def reference(weights, multipliers, rms_norm=False):
    """Losses and the activations h_1.. of the same networks, in plain torch for autograd."""
    h = torch.ones(len(weights[0]), 1, 1, dtype=torch.float64)
    kept = []
    for l, (weight, multiplier) in enumerate(zip(weights, multipliers, strict=True)):
        h = multiplier * (weight @ h)
        if rms_norm and l + 1 < len(weights):
            h = h / h.pow(2).mean(1, keepdim=True).sqrt()
        kept.append(h)
    losses = -torch.log_softmax(h[:, :, 0], dim=1)[:, bigram.WORD]
    return losses, kept


@pytest.mark.parametrize("rms_norm", [False, True])
def test_hand_written_gradients_are_those_of_autograd(rms_norm):
    multipliers = [0.7, 1.3, 0.4, 2.0]
    weights = [w.requires_grad_() for w in dense_weights(7, 4)]
    losses, activations = reference(weights, multipliers, rms_norm)
    wanted = torch.autograd.grad(losses.sum(), [*activations, *weights])
    found = propagate(model_of([w.detach() for w in weights], multipliers, rms_norm), 4)
    for l, (h, gradient) in enumerate(zip(activations, wanted, strict=False), 1):
        torch.testing.assert_close(found.h[l], h.detach()[:, :, 0])
        torch.testing.assert_close(found.h_gradient[l], gradient[:, :, 0])
    for item, gradient in zip(found.weight_gradient, wanted[len(activations) :], strict=True):
        formed = item.left[:, :, None] * item.right[:, None]
        torch.testing.assert_close(formed, gradient)
        torch.testing.assert_close(item.mean_square(), gradient.square().mean((1, 2)))


def test_logit_gradient_survives_a_saturated_softmax():
    logits = torch.tensor([[60.0, 0.0, 0.0]], dtype=torch.float64)
    gradient = bigram.cross_entropy_gradient(logits)
    small = float(np.exp(-60.0))
    wanted = gradient.new_tensor([[-2 * small, small, small]])
    torch.testing.assert_close(gradient, wanted, rtol=1e-6, atol=0.0)


def test_rms_norm_gradient_is_the_jacobian_of_lemma_d2():
    u = torch.tensor([[0.3, -1.2, 2.0, 0.5]], dtype=torch.float64)
    incoming = torch.tensor([[1.0, 0.2, -0.7, 0.4]], dtype=torch.float64)
    v, rms = bigram.rms_norm(u)
    jacobian = torch.autograd.functional.jacobian(lambda x: bigram.rms_norm(x)[0], u)[0, :, 0]
    outgoing = bigram.rms_norm_gradient(incoming, v, rms)
    torch.testing.assert_close(outgoing, incoming @ jacobian)
    assert abs(float(outgoing @ u.T)) < 1e-12
    torch.testing.assert_close(v.norm(), torch.tensor(2.0, dtype=torch.float64))


def ask(matrix, networks, columns):
    """Products that depend on earlier ones: vectors asked for with what was answered."""
    first = torch.zeros(networks, columns, dtype=torch.float64)
    first[:, 0], first[:, 1] = 0.6, -1.1
    rights, lefts = [(first, matrix.times(first))], []
    for _ in range(2):
        left = rights[-1][1].tanh() + 0.3
        lefts.append((left, matrix.transposed_times(left)))
        right = lefts[-1][1].sin() - 0.2
        rights.append((right, matrix.times(right)))
    return rights, lefts


def test_lazily_drawn_matrices_answer_like_one_matrix():
    generator = torch.Generator().manual_seed(0)
    matrix = GaussianMatrix(50, 9, 7, 0.8, generator)
    rights, lefts = ask(matrix, 50, 7)
    for (right, product), (left, transposed) in itertools.product(rights, lefts):
        torch.testing.assert_close((left * product).sum(1), (transposed * right).sum(1))
    mixture = 2 * rights[0][0] - rights[1][0]
    torch.testing.assert_close(matrix.times(mixture), 2 * rights[0][1] - rights[1][1])
    everything = torch.eye(7, dtype=torch.float64).expand(50, 7, 7)
    drawn = torch.stack([matrix.times(everything[:, i]) for i in range(7)], dim=2)
    for right, product in rights:
        torch.testing.assert_close(Dense(drawn).times(right), product)
    for left, transposed in lefts:
        torch.testing.assert_close(Dense(drawn).transposed_times(left), transposed)


def test_lazily_drawn_matrices_have_the_gaussian_law():
    networks = 40_000
    matrix = GaussianMatrix(networks, 4, 3, 0.5, torch.Generator().manual_seed(1))
    ask(matrix, networks, 3)
    units = torch.eye(3, dtype=torch.float64).expand(networks, 3, 3)
    entries = torch.stack([matrix.times(units[:, i]) for i in range(3)], dim=2).flatten(1) / 0.5
    covariance = entries.T @ entries / networks
    assert entries.mean(0).abs().max() < 5 / networks**0.5
    assert (covariance - torch.eye(12, dtype=torch.float64)).abs().max() < 5 * (2 / networks) ** 0.5
    assert (entries.pow(4).mean(0) - 3).abs().max() < 5 * (96 / networks) ** 0.5
    products = (entries.square().T @ entries.square() / networks).fill_diagonal_(1.0)
    assert (products - 1).abs().max() < 5 * (8 / networks) ** 0.5  # uncorrelated squares, too


def test_with_rms_norm_initial_scales_reach_only_their_own_gradients():
    """Lemma D.3: the forward pass ignores sigma_0..sigma_L; Var(W'_l) goes as 1/sigma_l^2."""
    weights = dense_weights(8, 3)
    base = propagate(model_of(weights, rms_norm=True), 3)
    scaled = [w * factor for w, factor in zip(weights, (3.0, 0.25, 5.0, 1.0), strict=True)]
    other = propagate(model_of(scaled, rms_norm=True), 3)
    for l in range(1, 5):
        torch.testing.assert_close(other.h[l], base.h[l])
        torch.testing.assert_close(other.h_gradient[l], base.h_gradient[l])
    for l, factor in enumerate((3.0, 0.25, 5.0, 1.0)):
        ours, theirs = other.weight_gradient[l].mean_square(), base.weight_gradient[l].mean_square()
        torch.testing.assert_close(ours, theirs / factor**2)


def dense_sign_training(weights, multipliers, rates, steps):
    """Plain sign descent by autograd; yields (weights, activations, weights after, after)."""
    for _ in range(steps):
        weights = [w.detach().requires_grad_() for w in weights]
        losses, before = reference(weights, multipliers)
        gradients = torch.autograd.grad(losses.sum(), weights)
        moved = [
            w.detach() - rate * g.sign()
            for w, rate, g in zip(weights, rates, gradients, strict=True)
        ]
        _, after = reference(moved, multipliers)
        old = [w.detach() for w in weights]
        yield old, [h.detach()[:, :, 0] for h in before], moved, [h[:, :, 0] for h in after]
        weights = moved


def test_sign_steps_and_alignments_are_those_of_dense_training():
    weights, multipliers = dense_weights(9, 4), [1.0, 0.8, 1.2, 0.9]
    rates, variances = [0.05, 0.03, 0.04, 0.06], [0.9, 0.7, 0.5, 0.3]
    steps = bigram_training.sign_steps(model_of(weights, multipliers), rates, 3, 4)
    expected = dense_sign_training(weights, multipliers, rates, 3)
    rms = lambda t: t.square().flatten(1).mean(1)
    for step, (old, before, new, after) in zip(steps, expected, strict=True):
        found = bigram_training.alignment_sizes(step, variances)
        for l in range(1, 5):
            torch.testing.assert_close(step.after.h[l], after[l - 1])
            sizes = bigram_training.step_sizes(step)
            torch.testing.assert_close(sizes[f"dh_{l}"], rms(after[l - 1] - before[l - 1]))
        torch.testing.assert_close(sizes["dh_4[y]"], (after[3] - before[3])[:, 0].square())
        for l in (1, 2, 3):
            h, dh = before[l - 1], after[l - 1] - before[l - 1]
            moved, w = Dense(new[l] - old[l]), Dense(old[l])
            dw = rms(moved.weights)
            torch.testing.assert_close(found[f"alpha_{l}"], rms(moved.times(h)) / (dw * rms(h)))
            torch.testing.assert_close(found[f"u_{l}"], rms(moved.times(dh)) / (dw * rms(dh)))
            wanted = rms(w.times(dh)) / (variances[l] * rms(dh))
            torch.testing.assert_close(found[f"omega_{l}"], wanted)
        wanted = w.times(dh)[:, 0].square() / (variances[3] * rms(dh))
        torch.testing.assert_close(found["omega_3[y]"], wanted)


def test_initial_variances_and_multipliers_are_powers_of_the_width():
    layers = ex.Layer(-1, "1/2"), ex.Layer("1/4", "1/4"), ex.Layer(1, "-1/2")
    config = SMALL.model_copy(update={"hidden_layers": 1, "seeds": 4000})
    networks, generator = 4000, torch.Generator().manual_seed(0)
    model = bigram.sample(ex.Parameterization(*layers), 16, networks, config, generator)
    assert model.multipliers == (16.0, 0.5, 1 / 16)
    for weight, columns, variance in zip(
        model.weights, (1, 16, 16), (1 / 16, 1 / 4, 16), strict=True
    ):
        unit = torch.zeros(networks, columns, dtype=torch.float64)
        unit[:, 0] = 1.0
        found = float(bigram.mean_square(weight.times(unit)).mean())
        assert found == pytest.approx(variance, rel=0.1)


def test_table_3_in_training_and_its_hypothetical_row():
    rows = bigram_training.table_3(FITTED)
    assert {row.step for row in rows} == {1, 2}
    logits = ("dh_4", "dh_4[y]")
    for row in rows:
        hypothetical = row.row == "SP (Condition A.2)" and row.column in logits
        off = abs(row.measured - row.predicted)
        assert off > 0.35 if hypothetical else off < 0.12, row
        assert (row.kind == "hypothetical") == hypothetical
        assert row.met is None  # of 48 networks
    aligned = [row for row in rows if row.row == "SP (31)" and row.column == "dh_4[y]"]
    assert all(row.measured == pytest.approx(0.5, abs=0.03) for row in aligned)


def test_table_1_and_alignments_in_training():
    for row in bigram_training.table_1(FITTED):
        assert abs(row.measured - row.predicted) < 0.12, row
    found = {(row.row, row.column, row.step): row for row in bigram_training.alignment(FITTED)}
    for name in STRATOS_TABLE:
        for l in (1, 2, 3):
            assert found[name, f"alpha_{l}", 1].measured == pytest.approx(1.0, abs=0.01)
            u = found[name, f"u_{l}", 1]
            assert u.measured == pytest.approx(0.5, abs=0.15) and u.kind == "bound"
        assert found[name, "omega_1", 1].measured == pytest.approx(0.5, abs=0.02)
        assert found[name, "omega_2", 1].measured == pytest.approx(0.5, abs=0.02)
        assert found[name, "omega_3[y]", 1].measured == pytest.approx(1.0, abs=0.03)


def test_training_moves_activations_where_logits_stay_put_and_barely_where_they_grow():
    """Measured here with the rates written out."""
    rows = bigram_training.table_1(SMALL.model_copy(update={"small_learning_rate": 0.002}))
    moved = {(row.row, row.step): row.moved for row in rows}
    for name in STRATOS_TABLE:
        rate = 0.1 if name in ("mup", "mf") else 0.002
        squares = []
        for networks, generator in bigram.batches(9, SMALL):
            item = bigram_training.member(name)
            model = bigram.sample(item.parameterization, 9, networks, SMALL, generator)
            c = dict(zip(ex.LAYERS, item.c, strict=True))
            rates = [rate * 9.0 ** -float(c[bigram.kind(l, 2)]) for l in range(4)]
            first, _second, third = bigram_training.sign_steps(model, rates, 3, networks)
            change = third.before.h[3] - first.before.h[3]
            squares.append(change.square().sum(1) / first.before.h[3].square().sum(1))
        expected = float(torch.cat(squares).mean().sqrt())
        assert moved[name, 3] == pytest.approx(expected) and moved[name, 1] == 0
        assert (expected > 0.1) == (rate == 0.1)
    assert all(row.moved == 0 for row in bigram_exponents.table_2(SMALL, ["1"]))


def test_gradients_of_standard_vanish_when_its_logits_have_grown():
    rates = {"learning_rate": 0.2, "small_learning_rate": 0.2}
    large = FITTED.model_copy(update={**rates, "seeds": 16})
    found = bigram_training.table_1(large, ["sp", "mup"])
    rows = {(row.row, row.column, row.step): row for row in found}
    assert rows["sp", "h'_3", 2].measured < -1
    assert "saturate" in rows["sp", "h'_3", 2].note
    assert rows["mup", "h'_3", 2].measured == pytest.approx(-1, abs=0.1)
    # u grows to its full alignment once activations have taken up the changes
    aligned = {(row.column, row.step): row for row in bigram_training.alignment(large, ["mup"])}
    assert aligned["u_2", 2].measured == pytest.approx(1.0, abs=0.1)


def shifted(item, theta, optimizer="adam"):
    """The member after the shift of 1.2.1, by another theta for every kind of layer."""
    moved = [
        ex.shift(item.parameterization[layer], c, by, optimizer)
        for layer, c, by in zip(ex.LAYERS, item.c, theta, strict=True)
    ]
    layers, rates = zip(*moved, strict=True)
    return bigram_training.Member(ex.Parameterization(*layers), tuple(rates))


def equivalence_gap(first, second, config):
    """How far the logits of two members differ in training, relative to their RMS.

    The largest difference over widths, networks, logits and steps, from the same draws of the
    weights: rounding, about 1e-12, for members of one equivalence class (1.2.1).
    """
    gap = 0.0
    for width in config.widths:
        found = [_logits(item, width, config) for item in (first, second)]
        difference = (found[0] - found[1]).abs().amax(dim=(1, 2))
        scale = found[0].square().mean(dim=(1, 2)).sqrt()
        gap = max(gap, float((difference / scale).max()))
    return gap


def _logits(item, width, config):
    """(steps + 1, networks, V): before, and after every step."""
    found = []
    for networks, generator in bigram.batches(width, config):
        model = bigram.sample(item.parameterization, width, networks, config, generator)
        rates = item.rates(width, config)
        steps = list(bigram_training.sign_steps(model, rates, config.steps, networks))
        passes = [steps[0].before, *(step.after for step in steps)]
        found.append(torch.stack([item.h[-1] for item in passes]))
    return torch.cat(found, dim=1)


def test_equivalent_parameterizations_train_the_same_functions():
    first = {name: bigram_training.member(name) for name in STRATOS_TABLE}
    assert equivalence_gap(first["sp"], first["ntk"], SMALL) < 1e-9
    assert equivalence_gap(first["mup"], first["mf"], SMALL) < 1e-9
    assert equivalence_gap(first["sp"], first["mup"], SMALL) > 0.1
    theta = (Fraction(1, 3), Fraction(-2, 5), Fraction(3, 4))
    assert equivalence_gap(first["mup"], shifted(first["mup"], theta), SMALL) < 1e-9
    wrong = shifted(first["mup"], theta, "sgd")
    assert equivalence_gap(first["mup"], wrong, SMALL) > 1e-3


def test_rows_are_a_function_of_the_seed_and_plain_json():
    first, again = bigram_exponents.table_2(SMALL, ["2"]), bigram_exponents.table_2(SMALL, ["2"])
    assert first == again
    other = bigram_exponents.table_2(SMALL.model_copy(update={"seed": 1}), ["2"])
    assert other[5].values != first[5].values
    plain = first[5].to_dict()
    assert json.loads(json.dumps(plain)) == plain
    assert (plain["predicted"], plain["widths"]) == ("-1", [6, 9])


def test_widths_have_independent_weights():
    first = [next(bigram.batches(width, SMALL))[1] for width in SMALL.widths]
    draws = [torch.randn(4, generator=generator) for generator in first]
    assert not torch.equal(*draws)


def test_many_networks_are_drawn_in_batches(monkeypatch):
    monkeypatch.setattr(bigram, "_NUMBERS_AT_ONCE", 18)
    many = bigram_exponents.table_2(SMALL.model_copy(update={"seeds": 7}), ["1"])
    assert [networks for networks, _ in bigram.batches(9, SMALL)] == [2, 1]
    assert many[0].seeds == 7 and len(set(many[0].values)) == 2
