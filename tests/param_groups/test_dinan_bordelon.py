"""Dinan et al.'s and Bordelon et al.'s numbers against their prescriptions, and theirs together."""

import itertools
import json
import math

import pytest

from param_groups import Bordelon, Depth, Dinan, Everett, Role, Tensor
from param_groups.rules.exponents import Alignment
from tests.param_groups.test_prescriptions import (
    ALPHAS,
    BLOCK,
    CLASSES,
    EMBEDDINGS,
    FAMILY,
    PATCH,
    everything,
    fans,
)
from tests.param_groups.wrapped import numbers

# Dinan, Yaida & Zhang

POWERS = {"neural_tangent": 0.0, "hybrid": 0.5, "maximal_update": 1.0}
STRATEGIES = [({"strategy": name}, s) for name, s in POWERS.items()]
STRATEGIES += [({"strategy": "meta_principled", "s": s}, s) for s in (0.0, 0.25, 0.8, 1.0)]
HEAD = (Role.READOUT, Role.READOUT_BIAS)
VIT = (Role.PATCH_EMBEDDING, Role.POSITION_EMBEDDING, *BLOCK, *HEAD)
BART = (*EMBEDDINGS, *BLOCK)


def vit(prescription, mlp_ratio=4):
    """All roles of the paper's vision model with its 1000 classes."""
    shapes = {role: fans(role, prescription.width, mlp_ratio) for role in VIT}
    shapes |= {Role.READOUT: (prescription.width, CLASSES), Role.READOUT_BIAS: (1, CLASSES)}
    return {role: prescription(Tensor(role, *shape)) for role, shape in shapes.items()}


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize(("strategy", "s"), STRATEGIES)
def test_dinan_rates_are_those_of_the_papers_table(strategy, s, optimizer):
    """(1.108)-(1.116) for Adam, (1.99)-(1.107) for SGD, times n^(s/2) and n^s but at the head."""
    for n in (192, 384, 768):
        got = vit(Dinan(n, optimizer=optimizer, **strategy))
        if optimizer == "adam":
            damp, head, bias = n ** (-(1 - s) / 2), 1 / (n * math.sqrt(1000)), 1 / math.sqrt(1000)
        else:
            damp, head, bias = n**s, 1 / n, 1.0
        expected = {Role.PATCH_EMBEDDING: damp / PATCH, Role.POSITION_EMBEDDING: damp}
        expected |= dict.fromkeys(BLOCK, damp / n) | {Role.READOUT: head, Role.READOUT_BIAS: bias}
        for role, value in expected.items():
            assert got[role].lr == pytest.approx(value, rel=1e-14), (role, n)
            assert got[role].eps == got[role].multiplier == 1.0
        words = Dinan(n, optimizer=optimizer, init="bart", **strategy)
        assert words(Tensor("token_embedding", 1, n)).lr == pytest.approx(damp, rel=1e-14)


@pytest.mark.parametrize(("strategy", "s"), STRATEGIES)
def test_dinan_mlp_factor_is_kept_or_dropped(strategy, s):
    """(1.114), (1.115) and (1.106); the other tensors do not know M."""
    for n, ratio in itertools.product((192, 768), (2, 4)):
        keep = vit(Dinan(n, mlp_factor="keep", **strategy), ratio)
        drop = vit(Dinan(n, mlp_factor="drop", **strategy), ratio)
        sgd = vit(Dinan(n, optimizer="sgd", mlp_factor="keep", **strategy), ratio)
        damp = n ** (s / 2)
        assert keep[Role.MLP_IN].lr == pytest.approx(damp / (n * math.sqrt(ratio * n)), rel=1e-14)
        assert keep[Role.MLP_OUT].lr == pytest.approx(damp / (ratio * n * math.sqrt(n)), rel=1e-14)
        assert sgd[Role.MLP_IN].lr == pytest.approx(n ** (s - 1), rel=1e-14)
        assert sgd[Role.MLP_OUT].lr == pytest.approx(n ** (s - 1) / ratio, rel=1e-14)
        for role in set(VIT) - {Role.MLP_IN, Role.MLP_OUT}:
            assert keep[role] == drop[role]


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_dinan_standard_runs_have_one_rate(optimizer):
    got = vit(Dinan(768, strategy="standard", optimizer=optimizer))
    assert {row.lr for row in got.values()} == {1.0}
    assert got[Role.READOUT].init_std == pytest.approx(768**-0.5, rel=1e-14)


@pytest.mark.parametrize(("strategy", "s"), [*STRATEGIES, ({"strategy": "standard"}, 0.0)])
def test_dinan_initialises_the_vision_model_as_the_paper_did(strategy, s):
    """And decays all but the head's bias."""
    for n in (192, 768):
        got = vit(Dinan(n, **strategy))
        expected = {
            Role.PATCH_EMBEDDING: ("normal", PATCH**-0.5),
            Role.POSITION_EMBEDDING: ("normal", 0.02),
            **dict.fromkeys(BLOCK[:3], ("uniform", math.sqrt(1 / 2 / n))),
            Role.ATTENTION_OUTPUT: ("uniform", math.sqrt(1 / 3 / n)),
            Role.MLP_IN: ("uniform", math.sqrt(2 / 5 / n)),
            Role.MLP_OUT: ("uniform", math.sqrt(8 / 5 / (4 * n))),
            Role.READOUT: ("normal", n ** (-(1 + s) / 2)),
            Role.READOUT_BIAS: ("constant", 0.0),
        }
        for role, (distribution, std) in expected.items():
            assert got[role].init_distribution == distribution, role
            assert got[role].init_std == pytest.approx(std, rel=1e-14), role
            assert got[role].init_mean == 0.0
        assert [role for role, row in got.items() if not row.decay] == [Role.READOUT_BIAS]


@pytest.mark.parametrize(
    ("strategy", "words", "rescale"),
    [
        ({"strategy": "standard"}, 0.02, 1.0),
        ({"strategy": "neural_tangent"}, 1.0, 1024**-0.5),
        ({"strategy": "hybrid"}, 1.0, 1024**-0.75),
        ({"strategy": "maximal_update"}, 1.0, 1 / 1024),
        ({"strategy": "meta_principled", "s": 0.2}, 1.0, 1024**-0.6),
    ],
)
def test_dinan_initialises_the_language_model_as_the_paper_did(strategy, words, rescale):
    prescription = Dinan(1024, init="bart", **strategy)
    got = everything(prescription, BART)
    assert prescription.forward().logit_multiplier == pytest.approx(rescale, rel=1e-14)
    assert {row.init_distribution for row in got.values()} == {"normal"}
    assert got.pop(Role.TOKEN_EMBEDDING).init_std == words
    assert {row.init_std for row in got.values()} == {0.02}


@pytest.mark.parametrize("head_dim", [16, 48, 64])
def test_dinan_attention_is_divided_by_the_root_of_the_head_dimension(head_dim):
    forward = Dinan(192).forward()
    assert forward.attention_scale(head_dim) == pytest.approx(head_dim**-0.5, rel=1e-14)
    assert forward.residual_multiplier == 1.0


# Bordelon, Chaudhry & Pehlevan

SIZES = [(8, 4, 1), (16, 16, 4), (5, 7, 12)]  # head dimension, heads, depth
LANGUAGE = (*EMBEDDINGS, *BLOCK, *HEAD)


def bordelon(prescription, roles=LANGUAGE):
    """All roles of the paper's model, whose MLP is as wide as its residual stream."""
    return {role: prescription(Tensor(role, *fans(role, prescription.width, 1))) for role in roles}


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adam_atan2"])
@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize(("N", "H", "L"), SIZES)
def test_bordelon_rates_first_layer_and_readout(N, H, L, alpha, optimizer):
    """One rate; multiplier beta^(1/2) L^(1/2 - alpha) or sqrt(n) L^(1 - alpha), over its std."""
    beta, gamma, n = 4.0, 0.25, N * H
    keys = {"optimizer": optimizer, "beta0": beta, "gamma0": gamma}
    prescription = Bordelon(N, H, L, alpha_depth=alpha, **keys)
    first, rate = {
        "sgd": (beta**0.5 * L ** (0.5 - alpha), gamma**2 * n * L ** (2 * alpha - 1)),
        "adam": (math.sqrt(n) * L ** (1 - alpha), 1 / math.sqrt(n) / L ** (1 - alpha)),
    }[FAMILY[optimizer]]
    got = bordelon(prescription)
    for row in got.values():
        assert row.lr == pytest.approx(rate, rel=1e-14)
        assert row.eps == 1.0 and row.decay == 1
    for role in EMBEDDINGS:
        assert got[role].multiplier == pytest.approx(first, rel=1e-13)
        assert got[role].init_std * got[role].multiplier == pytest.approx(1.0, rel=1e-13)
    readout = got[Role.READOUT]
    assert readout.multiplier == pytest.approx(first / (gamma * n), rel=1e-13)
    assert readout.init_std == pytest.approx(1 / first, rel=1e-13)
    bias = got[Role.READOUT_BIAS]
    assert (bias.init_distribution, bias.init_std, bias.init_mean) == ("constant", 0.0, 0.0)
    patches = prescription(Tensor("patch_embedding", PATCH, n))
    assert patches.init_std == pytest.approx(1 / first, rel=1e-13)
    assert patches.multiplier == pytest.approx(first / math.sqrt(PATCH), rel=1e-13)


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize(("N", "H", "L"), SIZES)
def test_bordelon_queries_and_keys_start_at_order_one(N, H, L, alpha):
    """n (multiplier std)^2 = 1 for every alpha, with std N^(1 - alpha)."""
    got = bordelon(Bordelon(N, H, L, alpha_attention=alpha))
    for role in (Role.QUERY, Role.KEY):
        assert got[role].init_std == pytest.approx(N ** (1 - alpha), rel=1e-14)
        assert got[role].multiplier == pytest.approx(H**-0.5 * N ** (alpha - 1.5), rel=1e-13)
        entry = N * H * (got[role].multiplier * got[role].init_std) ** 2
        assert entry == pytest.approx(1.0, rel=1e-13)


@pytest.mark.parametrize(("N", "H", "L"), SIZES)
def test_bordelon_dense_layers_are_divided_by_the_root_of_their_fan_in(N, H, L):
    prescription = Bordelon(N, H, L)
    for role in (Role.VALUE, Role.ATTENTION_OUTPUT, Role.MLP_IN, Role.MLP_OUT):
        row = prescription(Tensor(role, 3 * N * H, N * H))
        assert (row.init_distribution, row.init_mean, row.init_std) == ("normal", 0.0, 1.0)
        assert row.multiplier == pytest.approx((3 * N * H) ** -0.5, rel=1e-14)


def test_bordelon_language_model_starts_from_zero_logits():
    got = bordelon(Bordelon(8, 4, 3, zero_readout=True))
    for role in HEAD:
        row = got[role]
        assert (row.init_distribution, row.init_std, row.init_mean) == ("constant", 0.0, 0.0)
    # The listing divides the bias with the matrix.
    assert got[Role.READOUT_BIAS].multiplier == got[Role.READOUT].multiplier


@pytest.mark.parametrize("alpha", ALPHAS)
def test_bordelon_scalars_of_the_forward_pass(alpha):
    prescription = Bordelon(9, 4, 5, alpha_attention=alpha, alpha_depth=alpha, beta0=4.0)
    assert prescription.width == 36
    forward = prescription.forward()
    assert forward.attention_scale(9) == pytest.approx(9**-alpha, rel=1e-14)
    assert forward.residual_multiplier == pytest.approx(4 * 5**-alpha, rel=1e-14)
    assert forward.logit_multiplier == 1.0


# What they have in common

FUSED = [Everett("mup", 192, 128), Dinan(192)]
FUSED += [Bordelon(*size, alpha_attention=1.0) for size in SIZES]  # below 1 it is refused


@pytest.mark.parametrize("rule", FUSED)
def test_a_fused_matrix_has_what_its_parts_get(rule):
    n = rule.width
    assert numbers(rule, Role.QKV, n, 3 * n) == numbers(rule, Role.VALUE, n, n)


ALIGNED = {"alpha": "3/4", "omega": "1/2", "u": "1"}
ALIGNED |= {f"{key}_readout": value for key, value in ALIGNED.items()}


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adam_atan2"])
@pytest.mark.parametrize("depth", [1, 6])
def test_everetts_mean_field_with_a_rule_for_the_depth_is_bordelons(depth, optimizer, alpha):
    """The same training: scale and rate of every tensor once multipliers are absorbed, at constants
    that agree: beta0 = base_depth^alpha, and base_depth's share in the branches' rates a gamma."""
    base, n = 3, 32
    rate = base ** (2 * alpha - 1 if optimizer == "sgd" else alpha - 1)
    fields = {"optimizer": optimizer, "embedding_std": 1.0, "gamma_hidden": rate}
    everett = Depth(Everett("mean_field", n, 1, **fields), depth, base, alpha)
    theirs = Bordelon(8, 4, depth, optimizer=optimizer, alpha_depth=alpha, beta0=base**alpha)
    # Under SGD their first and last layer's multipliers have beta0^(1/2), which enters twice.
    share = base**alpha if optimizer == "sgd" else 1.0
    for role in (*EMBEDDINGS, *BLOCK, Role.READOUT):
        mine, other = (
            rule(Tensor(role, *fans(role, n, 1))).absorbed(optimizer) for rule in (everett, theirs)
        )
        own = 1.0 if role in BLOCK else share
        assert own * mine.lr == pytest.approx(other.lr, rel=1e-13), role
        assert mine.init_std == pytest.approx(other.init_std, rel=1e-13), role
    mine, other = everett.forward(), theirs.forward()
    assert mine.residual_multiplier == pytest.approx(other.residual_multiplier, rel=1e-14)
    assert mine.attention_scale(8) == pytest.approx(other.attention_scale(8), rel=1e-14)


@pytest.mark.parametrize(
    ("prescription", "expected"),
    [
        (Everett("mup", 192, 128, alignment="none"), {"name": "everett", "alignment": "none"}),
        (Everett("ntk", 192, 128, alignment=Alignment("3/4", "1/2", 1)), {"alignment": ALIGNED}),
        (Dinan(192, "meta_principled", 0.25), {"name": "dinan", "width": 192, "s": 0.25}),
        (Bordelon(8, 4, 3), {"name": "bordelon", "width": 32, "depth": 3, "gamma0": 1.0}),
    ],
)
def test_a_prescription_describes_itself_in_json_types(prescription, expected):
    described = prescription.describe()
    assert json.loads(json.dumps(described)) == described
    assert {key: described[key] for key in expected} == expected
