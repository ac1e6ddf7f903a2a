"""Rules for the depth on models that people have, CompleteP, decay as data of the prescription."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from param_groups import (
    CompleteP,
    Decay,
    Depth,
    EpsFollows,
    Everett,
    PlanError,
    Prescription,
    Role,
    Rule,
    Tuned,
    plan,
    rules_for,
    timescale,
)
from param_groups.check import stock
from param_groups.stock.rules import stock as build
from tests.param_groups.test_silently_wrong import NanoGPT, nanogpt_rules


def rules_of(model):
    return nanogpt_rules(model) if isinstance(model, NanoGPT) else rules_for(model)


def gpt(width, depth):
    """nanoGPT's tensors, biases included, at a width and depth."""
    model = NanoGPT(width)
    blocks = [NanoGPT(width).transformer.h[0] for _ in range(depth)]
    model.transformer.h = nn.ModuleList(blocks)
    return model


def planned(width, depth, rule=CompleteP, **fields):
    with torch.device("meta"):
        model = gpt(width, depth)
    made = rule(width, 32, depth, 2, qk_exponent=-0.5, **fields)
    keys = {"lr": 0.1, "eps": 1e-8, "weight_decay": 1e-3, "decay_mode": "independent"}
    keys["applied"] = {} if depth == 2 else made.forward().factors()
    return plan(model, rules_of(model), made, absorb_multipliers=True, **keys)


@pytest.mark.parametrize("alpha", [0.5, 0.75, 1.0])
@pytest.mark.parametrize(("width", "depth"), [(96, 2), (32, 8), (96, 8)])
def test_completep_is_that_of_its_authors_code(width, depth, alpha):
    """nanoGPT-mup, branch completep, `configure_optimizers`: groups over those at the base sizes.
    There one epsilon for all is 1/m r^(-alpha); here, as in the paper's later Equation 40, what no
    branch holds has no power of the depth. The readout is tied there, with a factor 1/m."""
    m, r = width / 32, depth / 2
    base, large = planned(32, 2, alpha=alpha), planned(width, depth, alpha=alpha)
    block = "transformer.h.0."
    expected = {  # lr, epsilon, decay per step
        "transformer.wte.weight": (1, 1 / m, 1),
        "transformer.wpe.weight": (1, 1 / m, 1),
        f"{block}ln_1.weight": (r ** (alpha - 1), r**-alpha / m, 0),
        f"{block}ln_1.bias": (r ** (alpha - 1), r**-alpha / m, 0),
        f"{block}attn.c_attn.weight": (r ** (alpha - 1) / m, r**-alpha / m, r ** (alpha - 1)),
        f"{block}attn.c_attn.bias": (r ** (alpha - 1), r**-alpha / m, 0),
        f"{block}mlp.c_proj.weight": (r ** (alpha - 1) / m, r**-alpha / m, r ** (alpha - 1)),
        "transformer.ln_f.weight": (1, 1 / m, 0),
        "transformer.ln_f.bias": (1, 1 / m, 0),
        "lm_head.weight": (1 / m, 1, 1),
    }
    for name, (lr, eps, decay) in expected.items():
        small, wide = base[name], large[name]
        assert wide.lr / small.lr == pytest.approx(lr), name
        assert wide.eps / small.eps == pytest.approx(eps), name
        assert wide.decay_per_step == pytest.approx(1e-3 * decay), name
    factors = {factor.name: factor.value for factor in large.forward}
    assert factors.get("residual_multiplier", 1.0) == pytest.approx(r**-alpha)


def test_another_depth_than_the_models_is_refused_where_the_number_of_blocks_is_certain():
    deep = {"qk_exponent": -0.5}
    make = lambda model, rules, depth: plan(
        model, rules, CompleteP(32, 32, depth, 2, **deep), lr=0.1, absorb_multipliers=True,
        applied={"residual_multiplier": 2 / depth},
    )  # fmt: skip
    model = gpt(32, 3)
    assert make(model, rules_of(model), 3).rows
    said = "'transformer.h.0.attn.* are in 3 blocks.* for depth 8; gi"
    with pytest.raises(PlanError, match=said):
        make(model, rules_of(model), 8)
    layer = lambda: nn.ModuleDict({"fc1": nn.Linear(32, 32), "fc2": nn.Linear(32, 32)})
    mlp = lambda: nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))
    rules = [Rule("*.weight", "mlp_in"), Rule("*.bias", "hidden_bias")]
    for unknown in (  # two lists; layers of an MLP; blocks of two kinds; blocks that hold blocks
        nn.ModuleDict({one: nn.ModuleList([layer(), layer()]) for one in ("encoder", "decoder")}),
        mlp(),
        nn.ModuleList([layer(), mlp(), layer()]),
        nn.ModuleList([nn.ModuleList([layer(), layer()]) for _ in range(2)]),
    ):
        assert make(unknown, rules, 8).rows


def test_completep_is_a_name_for_everetts_rule():
    rule = CompleteP(96, 32, 8, 2)
    deep = Depth(Everett("mup", 96, 32), depth=8, base_depth=2, alpha=1.0, decays=True)
    assert rule == Decay(EpsFollows(deep), spare="vectors")


@pytest.mark.parametrize(
    "name", ["hf:gpt2", "hf:bert", "hf:llama", "hf:whisper", "hf:vit", "timm:vit_small_patch16_224"]
)
def test_stock_models_can_be_planned_in_depth(name):
    """Norms with biases in branches are the branches', the last norm and what stands before the
    blocks is not; traced rules say so."""
    with torch.device("meta"):
        model = stock.build(name, 64)
    options = {"lr": 1.0, "absorb_multipliers": True, "head_dim": stock.HEAD_DIM}
    flat = plan(model, rules_of(model), Everett("mup", 64, 64, qk_exponent=-0.5), **options)
    rule = Depth(Everett("mup", 64, 64, qk_exponent=-0.5), depth=2, base_depth=0.5, alpha=0.5)
    deep = plan(model, rules_of(model), rule, applied={"residual_multiplier": 0.5}, **options)
    for row in flat.rows:
        parts = row.name.split(".")
        inside = any(part.isdigit() for part in parts)
        assert deep[row.name].lr == pytest.approx(row.lr * (0.5 if inside else 1.0)), row.name


@pytest.mark.parametrize("kind", ["granite", "granitemoe", "hyperclovax"])
def test_models_whose_config_multiplies_branches_are_read_and_checked(kind):
    sizes = {"hidden_size": 64, "num_hidden_layers": 8, "num_attention_heads": 4}
    sizes |= {"vocab_size": 64, "intermediate_size": 128, "attention_multiplier": 0.25}
    rule = Depth(Everett("mup", 64, 64, qk_exponent=-0.5), depth=8, base_depth=2)
    keys = {"lr": 1.0, "absorb_multipliers": True}
    for given in (0.25, 0.5):
        with torch.device("meta"):
            model = build(f"hf:{kind}", **sizes, residual_multiplier=given)
        make = lambda model=model: plan(model, rules_of(model), rule, **keys)
        if given == 0.25:
            factors = {factor.name: factor.value for factor in make().forward}
            assert factors == {"attention_scale": 0.25, "residual_multiplier": 0.25}
        else:
            with pytest.raises(PlanError, match="residual_multiplier 0.5 .*the plan has 0.25"):
                make()


def test_the_power_minus_one_is_torchs_coupled_decay_under_mup():
    """AdamW with one weight_decay removes lr times it: matrices' rates fall as 1/n."""
    ends = []
    mup = Everett("mup", 128, 32, qk_exponent=-0.5)
    falls = (Decay(mup, exponent=-1.0), "independent", 1e-3)
    for rule, mode, decay in (falls, (mup, "per_group", 1e-2)):
        model = gpt(128, 2)
        options = {"weight_decay": decay, "decay_mode": mode, "absorb_multipliers": True}
        numbers = plan(model, rules_of(model), rule, lr=0.1, **options)
        rows = [row for row in numbers.rows if row.role in ("qkv", "mlp_out")]
        ends.append([row.decay_per_step for row in rows])
    assert ends[0] == pytest.approx(ends[1])


class Mine(Prescription):
    """A rule of one's own whose rates fall with the width, as its decay does."""

    width, optimizer, decay_depth = 128, "adam", True

    def __call__(self, tensor):
        falls = 8 / tensor.fan_in
        return replace(Everett("mup", 32, 32)(tensor), lr=falls, decay=falls)


def deep(rule, alpha=1.0):
    return Depth(rule, 8, 2, alpha, decays=True)


MUP, SGD = (Everett("mup", 128, 32, o, qk_exponent=-0.5) for o in ("adam", "sgd"))
STILL = Everett("standard", 128, 32, alignment="global", qk_exponent=-0.5)
ADAFACTOR = Everett("mup", 128, 32, "adafactor", "none", qk_exponent=-0.5)
INIT, FALLS = dict.fromkeys(Role, 0.1), Decay(MUP, exponent=-1.0)
TWICE = {  # by the size whose power the rate has already
    "width": [FALLS, Tuned(FALLS, INIT), Decay(Tuned(MUP, INIT), exponent=-1.0), Mine()],
    "depth": [deep(MUP, 0.5), EpsFollows(deep(MUP, 0.5)), deep(SGD)],
    None: [
        *(deep(MUP), deep(SGD, 0.5), Decay(MUP, spare="vectors")),
        *(Decay(STILL, exponent=-1.0), Decay(ADAFACTOR, exponent=-0.5)),
    ],
}


@pytest.mark.parametrize(
    ("rule", "size"), [(rule, size) for size, rules in TWICE.items() for rule in rules]
)
def test_a_decay_per_rate_is_refused_where_it_has_the_rates_power_twice_and_nowhere_else(
    rule, size
):
    """Whatever the rule is called, and at its base size as well."""
    model = gpt(128, 8)
    factors = rule.forward().factors()
    options = {"weight_decay": 1e-2, "decay_mode": "per_group", "absorb_multipliers": True}
    make = lambda: plan(model, rules_of(model), rule, lr=0.1, applied=factors, **options)
    if size is None:
        assert make()
    else:
        with pytest.raises(PlanError, match=f"'per_group' has the rate's power of the {size} alr"):
            make()


def test_a_decay_per_step_is_said_in_per_cent_and_a_time_scale_is_one():
    """Wang & Aitchison 2024: tau = 1 / (lr lambda) steps, held as a share of the run's tokens."""
    model, rules = nn.Sequential(nn.Linear(16, 16, bias=False)), [Rule("*", "mlp_in")]
    decay = {"weight_decay": 0.1, "decay_mode": "per_group"}
    made = plan(model, rules, Everett("mup", 16, 16), lr=6e-4, **decay)
    assert made.rows[0].decay_per_step == 0.1 * 6e-4 and "0.006 % per step" in made.table()
    decay = timescale(tokens_per_step=1000, tokens=1_000_000, tau=0.2)
    assert decay == pytest.approx(1 / 200)  # 1,000 steps, of which a fifth


@pytest.mark.parametrize("depth", [2, 8])
def test_every_vector_is_spared_and_every_matrix_decays(depth):
    """Norms' and hidden biases, and the readout's, which has numbers of its own."""
    model, rule = gpt(32, depth), CompleteP(32, 32, depth, 2, qk_exponent=-0.5)
    model.lm_head = nn.Linear(32, 16)
    rules = [*rules_of(model), Rule("lm_head.bias", "readout_bias")]
    options = {"lr": 0.1, "weight_decay": 1e-3, "decay_mode": "independent"}
    options["applied"] = {} if depth == 2 else {"residual_multiplier": 2 / depth}
    numbers = plan(model, rules, rule, absorb_multipliers=True, **options)
    spared = {row.name for row in numbers.rows if row.decay_per_step == 0}
    assert spared == {row.name for row in numbers.rows if len(row.shape) == 1}
    assert "lm_head.bias" in spared and "lm_head.weight" not in spared


@pytest.mark.parametrize(("optimizer", "eps"), [("adafactor", 1e-30), ("adam", 1e-8)])
def test_the_default_epsilon_is_the_optimisers(optimizer, eps):
    """Adafactor adds it to g^2, where 1e-8 would be a tenth of a gradient of 3e-4's square."""
    model, rule = nn.Sequential(nn.Linear(16, 16, bias=False)), [Rule("*", "mlp_in")]
    numbers = plan(model, rule, Everett("standard", 16, 16, optimizer=optimizer), lr=1.0)
    assert (numbers.eps, numbers.rows[0].eps) == (eps, eps)
    explicit = plan(model, rule, Everett("standard", 16, 16, optimizer=optimizer), lr=1.0, eps=1e-6)
    assert explicit.rows[0].eps == 1e-6
