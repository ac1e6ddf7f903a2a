"""The papers' numbers, typed from their tables, against what the prescriptions give each role."""

import functools
import itertools
from dataclasses import dataclass
from fractions import Fraction

import pytest
import torch

from param_groups import (
    Depth,
    EpsFollows,
    Everett,
    Numbers,
    PlanError,
    Prescription,
    Role,
    Rule,
    Tensor,
    plan,
)
from param_groups.rules.exponents import TENSOR_PROGRAMS, Alignment, is_stable
from tests.param_groups.table_1 import PAPER
from tests.param_groups.wrapped import numbers

NAMES = ("standard", "ntk", "mup", "mean_field")
TABLE = {
    tuple(line.split()[:2]): [float(Fraction(cell)) for cell in line.split()[2:]]
    for line in PAPER.strip().splitlines()
}
TABLE |= {(name, "readout bias"): [0.0] * 9 for name in NAMES}  # no layer of size n follows it
COLUMN = {
    (family, kind): 3 + 3 * ("full", "none").index(kind) + index
    for kind in ("full", "none")
    for index, family in enumerate(("sgd", "adam", "adafactor"))
}
FAMILY = {
    "sgd": "sgd",
    **dict.fromkeys(("adam", "AdamW", "adam_atan2"), "adam"),
    **dict.fromkeys(("adafactor", "adam_param_scaling"), "adafactor"),
}
EMBEDDINGS = (Role.TOKEN_EMBEDDING, Role.POSITION_EMBEDDING)
VECTORS = (Role.NORM_SCALE, Role.NORM_BIAS, Role.HIDDEN_BIAS, Role.READOUT_BIAS)
BLOCK = (Role.QUERY, Role.KEY, Role.VALUE, Role.ATTENTION_OUTPUT, Role.MLP_IN, Role.MLP_OUT)
TYPES = {
    **dict.fromkeys((*EMBEDDINGS, Role.PATCH_EMBEDDING, *VECTORS[:3]), "embedding"),
    **dict.fromkeys(BLOCK, "hidden"),
    Role.READOUT: "readout",
    Role.READOUT_BIAS: "readout bias",
}
ALPHAS = (0.5, 0.75, 1.0)
WIDTHS = [(256, 128), (192, 128), (64, 128), (128, 128)]  # n/b = 2, 1.5, 0.5, 1
PATCH, VOCABULARY, CLASSES = 48, 1000, 1000


def fans(role, n, mlp_ratio=4):
    """(fan_in, fan_out) of a role in a model of width n."""
    if role in (*EMBEDDINGS, *VECTORS, Role.FINAL_NORM_SCALE):
        return 1, n
    own = {Role.PATCH_EMBEDDING: (PATCH, n), Role.QKV: (n, 3 * n), Role.READOUT: (n, VOCABULARY)}
    own |= {Role.MLP_IN: (n, mlp_ratio * n), Role.MLP_OUT: (mlp_ratio * n, n)}
    return own.get(role, (n, n))


def everything(prescription, roles=tuple(TYPES)):
    n = prescription.width
    return {role: numbers(prescription, role, *fans(role, n)) for role in roles}


@pytest.mark.parametrize("optimizer", FAMILY)
@pytest.mark.parametrize("name", NAMES)
def test_everett_rates_are_the_papers_powers_of_the_width_ratio(name, optimizer):
    """Fractional ratios included: the base width need not divide the width."""
    for (n, b), alignment in itertools.product(WIDTHS, ("full", "none", "global")):
        got = everything(Everett(name, n, b, optimizer=optimizer, alignment=alignment))
        for role, layer in TYPES.items():
            power = 0.0
            if alignment != "global":
                power = TABLE[name, layer][COLUMN[FAMILY[optimizer], alignment]]
            assert got[role].lr == pytest.approx((n / b) ** power, rel=1e-14), (role, n, alignment)
            assert got[role].eps == 1.0


@pytest.mark.parametrize("optimizer", FAMILY)
@pytest.mark.parametrize("name", NAMES)
def test_everett_at_the_base_width_is_the_global_rate_and_epsilon(name, optimizer):
    """Exactly, so that the whole model shares one optimiser group there."""
    for n, kind in itertools.product((8, 128), ("full", "none", "global", TENSOR_PROGRAMS)):
        rule = EpsFollows(Everett(name, n, n, optimizer=optimizer, alignment=kind))
        assert {(row.lr, row.eps) for row in everything(rule).values()} == {(1.0, 1.0)}


@pytest.mark.parametrize("optimizer", FAMILY)
@pytest.mark.parametrize("name", NAMES)
def test_everett_epsilon_follows_the_gradient_if_asked(name, optimizer):
    for n, b in WIDTHS:
        got = everything(EpsFollows(Everett(name, n, b, optimizer=optimizer)))
        for role, layer in TYPES.items():
            # Adafactor adds epsilon to the gradient's square, the others to the gradient.
            expected = (n / b) ** (TABLE[name, layer][2] * (2 if optimizer == "adafactor" else 1))
            assert got[role].eps == pytest.approx(expected, rel=1e-14), (role, n)


@pytest.mark.parametrize(("n", "b"), WIDTHS)
@pytest.mark.parametrize("name", NAMES)
def test_everett_multipliers_and_initial_scales(name, n, b):
    """Absolute powers of n, whatever the base width."""
    got = everything(Everett(name, n, b))
    for role, layer in TYPES.items():
        variance, multiplier, *_ = TABLE[name, layer]
        assert got[role].multiplier == pytest.approx(n**multiplier, rel=1e-14), role
        if role in (*BLOCK, Role.READOUT) and role is not Role.MLP_OUT:
            assert got[role].init_std == pytest.approx(n ** (variance / 2), rel=1e-14), role
            assert (got[role].init_distribution, got[role].init_mean) == ("normal", 0.0)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ratio", [1, 3, 4])
def test_everett_second_mlp_matrix_has_variance_one_over_its_fan_in(name, ratio):
    """The constant is in the std; multiplier, rate and epsilon are those of the width."""
    n = 192
    prescription = EpsFollows(Everett(name, n, 128))
    down = numbers(prescription, Role.MLP_OUT, ratio * n, n)
    query = numbers(prescription, Role.QUERY, n, n)
    assert down.multiplier * down.init_std == pytest.approx((ratio * n) ** -0.5, rel=1e-14)
    assert (down.multiplier, down.lr, down.eps) == (query.multiplier, query.lr, query.eps)


@pytest.mark.parametrize("role", EMBEDDINGS)
@pytest.mark.parametrize(
    ("name", "given", "effective"),
    [
        *((name, None, 1.0 if name == "mup" else 0.01) for name in NAMES),
        *(("standard", 0.5, 0.5), ("mup", 0.01, 0.01), ("mean_field", 1.0, 1.0)),
    ],
)
def test_everett_embeddings_have_the_effective_scale_asked_for(name, given, effective, role):
    for n in (64, 192):
        row = Everett(name, n, 128, embedding_std=given)(Tensor(role, 1, n))
        assert row.init_distribution == "normal"
        assert row.init_std * row.multiplier == pytest.approx(effective, rel=1e-14)


@pytest.mark.parametrize("name", NAMES)
def test_everett_patches_see_inputs_of_order_one_norms_start_at_one_and_biases_at_zero(name):
    got = everything(Everett(name, 192, 128))
    patches = got[Role.PATCH_EMBEDDING]
    assert patches.init_std * patches.multiplier == pytest.approx(PATCH**-0.5, rel=1e-14)
    scale = got[Role.NORM_SCALE]
    assert scale.init_mean * scale.multiplier == pytest.approx(1.0, rel=1e-14)
    got |= everything(Everett(name, 192, 128), (Role.RELATIVE_POSITION,))
    for role in (*VECTORS, Role.RELATIVE_POSITION):
        assert (got[role].init_distribution, got[role].init_std) == ("constant", 0.0)
    assert {got[role].init_mean for role in VECTORS[1:]} == {0.0}
    assert all(row.decay == 1 for row in got.values())


def test_everett_gammas_multiply_the_rates_of_their_layer_type():
    plain = everything(Everett("mup", 192, 128))
    gammas = {"gamma_embedding": 3.0, "gamma_hidden": 0.5, "gamma_readout": 7.0}
    tuned = everything(Everett("mup", 192, 128, **gammas))
    gamma = {"embedding": 3.0, "hidden": 0.5, "readout": 7.0, "readout bias": 3.0}
    for role, layer in TYPES.items():
        assert tuned[role].lr == pytest.approx(gamma[layer] * plain[role].lr, rel=1e-14)
        assert tuned[role].init_std == plain[role].init_std


@pytest.mark.parametrize(
    ("name", "given", "power"),
    [
        *((name, None, power) for name, power in zip(NAMES, (-0.5, -0.5, -1, -1), strict=True)),
        *(("mup", -0.5, -0.5), ("standard", -1.0, -1.0), ("standard", 0.0, 0.0)),
    ],
)
def test_everett_attention_scales(name, given, power):
    forward = Everett(name, 256, 128, qk_exponent=given).forward()
    assert forward.attention_scale(48) == pytest.approx(48.0**power, rel=1e-14)
    assert forward.residual_multiplier == forward.logit_multiplier == 1.0


# The published special case with omega = 1 at the readout (Everett et al., B.16), worked out by
# hand: muP and mean field keep Adam's rates of full alignment; standard and NTK, whose readout
# starts sqrt(n) larger, must slow everything below it by n^(-1/2).
TENSOR_PROGRAMS_ADAM = {
    "standard": ("-1/2", "-3/2", "-1"),
    "ntk": ("-1/2", "-1", "-1/2"),
    "mup": ("-1/2", "-1", "-1/2"),
    "mean_field": ("0", "-1/2", "0"),
}


@pytest.mark.parametrize("name", NAMES)
def test_everett_takes_any_alignment(name):
    alignment = Alignment(alpha=1, omega="1/2", u=1, omega_readout=1)
    got = everything(Everett(name, 192, 128, alignment=alignment))
    powers = dict(zip(("embedding", "hidden", "readout"), TENSOR_PROGRAMS_ADAM[name], strict=True))
    powers["readout bias"] = "0"
    for role, layer in TYPES.items():
        assert got[role].lr == pytest.approx(1.5 ** float(Fraction(powers[layer])), rel=1e-14)


def test_everett_asks_for_the_hidden_layers_where_each_of_them_changes_the_rates():
    """With omega > 1/2 each adds to the change of the one before; below, each takes from it."""
    for values in ((1, 1, 1), (1, "3/4", 1), ("1/2", 0, 1, 1)):
        with pytest.raises(PlanError, match="every hidden layer changes the stable rates; give"):
            Everett("standard", 192, 128, alignment=Alignment(*values))
    for layers, power in ((1, -1), (8, -4.5)):
        deep = Everett("mup", 192, 128, alignment=Alignment(1, 1, 1), hidden_layers=layers)
        assert deep(Tensor("query", 192, 192)).lr == pytest.approx(1.5**power, rel=1e-14)
        rates = {layer: -deep.lr_exponent(layer) for layer in ("embedding", "hidden", "readout")}
        assert is_stable("mup", "adam", Alignment(1, 1, 1), rates, hidden_layers=layers)
        assert deep.describe()["hidden_layers"] == layers


def test_a_rule_of_ones_own_says_its_optimiser_wherever_it_has_it():
    @dataclass(frozen=True)
    class Mine(Prescription):
        width: int
        optimizer = "sgd"  # of the class, and no field

        def __call__(self, tensor):
            return Numbers(1.0)

    assert Mine(8).describe() == {"name": "mine", "width": 8, "optimizer": "sgd"}


def stem_and_block(**places):
    """{name: rate} at four times the base depth; `places` are what the rules say of trunk."""
    model = torch.nn.ModuleDict({"stem": torch.nn.Conv2d(3, 8, 4), "mix": torch.nn.Linear(8, 8)})
    model["blocks"] = torch.nn.ModuleList([torch.nn.Linear(8, 8), torch.nn.LayerNorm(8)])
    model["norm"] = torch.nn.LayerNorm(8)
    biases = ("stem.bias", "mix.bias", "blocks.0.bias", "blocks.1.bias")
    roles = dict.fromkeys(biases, Role.HIDDEN_BIAS) | {"stem.weight": Role.PATCH_EMBEDDING}
    roles |= {"mix.weight": Role.HIDDEN, "blocks.0.weight": Role.MLP_IN}
    roles |= {"blocks.1.weight": Role.NORM_SCALE, "norm.weight": Role.FINAL_NORM_SCALE}
    roles |= {"norm.bias": Role.NORM_BIAS}
    rules = [Rule(name, role, trunk=places.get(name)) for name, role in roles.items()]
    rule = Depth(Everett("mup", 8, 8), depth=16, base_depth=4, alpha=0.5)
    applied = {"residual_multiplier": 0.5}
    rows = plan(model, rules, rule, lr=1.0, applied=applied).rows
    return {row.name: row.lr for row in rows}


def test_everett_over_depth_takes_the_rules_word_for_what_stands_outside_of_branches():
    trunk = dict.fromkeys(("stem.bias", "norm.bias"), True)
    found = stem_and_block(**trunk, **dict.fromkeys(("mix.weight", "mix.bias"), False))
    inside = ("mix.", "blocks.")
    assert found == {name: 0.5 if name.startswith(inside) else 1.0 for name in found}
    assert stem_and_block(**trunk, **{"mix.weight": True, "mix.bias": True})["mix.weight"] == 1.0
    for given, message in (
        ({}, "'stem.bias' .hidden_bias. is in no numbered block.* say Rule.*trunk=True"),
        (trunk, "'mix.weight' .hidden. is in no numbered block"),
        ({"stem.weight": False}, "'stem.weight' .patch_embedding. stands outside .* by its role"),
    ):
        with pytest.raises(PlanError, match=message):
            stem_and_block(**given)


# Multipliers moved into the tensors

# What moving a multiplier m into the tensor does to rate and epsilon, by optimiser: the gradient
# shrinks by m, and Adafactor adds epsilon to its square.
ABSORBED = {"sgd": (2, 1), "adam": (1, 1), "adam_atan2": (1, 1), "adafactor": (0, 2)}
ABSORBED |= {"adam_param_scaling": (0, 1)}


@pytest.mark.parametrize("m", [4.0, 0.125])
@pytest.mark.parametrize("optimizer", ABSORBED)
def test_absorbing_a_multiplier_is_exact(optimizer, m):
    """Powers of two, so the numbers can be compared for equality."""
    numbers = Numbers(0.5, "uniform", 0.25, multiplier=m, lr=2.0, eps=8.0, decay=0.5)
    lr_power, eps_power = ABSORBED[optimizer]
    expected = {"multiplier": 1.0, "lr": 2.0 * m**lr_power, "eps": 8.0 / m**eps_power}
    moved = Numbers(0.5 * m, "uniform", 0.25 * m, decay=0.5, **expected)
    for name in (optimizer, optimizer.title()):  # as torch's classes are called
        assert numbers.absorbed(name) == moved


def test_a_number_in_the_name_of_a_stem_makes_no_block_of_it():
    """Blocks are the lists that hold the matrices of attention or an MLP."""
    stem = torch.nn.Sequential(*(torch.nn.Linear(n, 8, bias=False) for n in (3, 8)))
    blocks = torch.nn.ModuleList([torch.nn.Linear(8, 8)])
    model = torch.nn.ModuleDict({"stem": stem, "blocks": blocks})
    rule = Depth(Everett("mup", 8, 8), depth=4, alpha=0.5)
    settings = {"lr": 1.0, "applied": {"residual_multiplier": 0.5}}
    for told in (None, True):
        rules = [
            Rule("stem.0.weight", Role.PATCH_EMBEDDING),
            Rule("*.bias", Role.HIDDEN_BIAS),
            Rule("stem.1.weight", Role.HIDDEN, trunk=told),
            Rule("blocks.*.weight", Role.MLP_IN),
        ]
        make = functools.partial(plan, model, rules, rule, **settings)
        if told:
            assert [make()[name].lr for name in ("stem.1.weight", "blocks.0.bias")] == [1.0, 0.5]
        else:
            with pytest.raises(PlanError, match="'stem.1.weight' .hidden. is in no numbered bl"):
                make()
