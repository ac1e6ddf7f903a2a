"""What the plan gives every tensor of BART-large and R2C2 (Dinan et al., Part II, section 2)."""

import pytest
import torch

from bart_span_denoise.model import RULES, Bart
from param_groups import Dinan, plan
from param_groups.roles import Role

SHAPES = {"bart_large": (1024, 16, 12), "r2c2": (2048, 32, 22)}
TABLES = {Role.TOKEN_EMBEDDING, Role.POSITION_EMBEDDING}


def on_meta(shape, prescription):
    width, heads, layers = SHAPES[shape]
    with torch.device("meta"):
        return Bart(
            vocab_size=50_265, width=width, heads=heads, layers=layers,
            attention_scale=prescription.attention_scale(width // heads),
            logit_multiplier=prescription.logit_multiplier(),
        )  # fmt: skip


def planned(shape, strategy, lr, weight_decay, s=None):
    prescription = Dinan(SHAPES[shape][0], strategy=strategy, s=s, init="bart")
    model = on_meta(shape, prescription)
    numbers = {"lr": lr, "eps": 1e-6, "weight_decay": weight_decay, "decay_mode": "global"}
    return model, plan(model, RULES, prescription, **numbers)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_tensor_has_its_role(shape):
    _, result = planned(shape, "standard", 1e-3, 0.01)
    layers = SHAPES[shape][2]
    counts = {}
    for row in result.rows:
        counts[row.role] = counts.get(row.role, 0) + 1
    attention = dict.fromkeys(("query", "key", "value", "attention_output"), 3 * layers)
    mlp = dict.fromkeys(("mlp_in", "mlp_out"), 2 * layers)
    assert counts == {"token_embedding": 1, "position_embedding": 2, **attention, **mlp}
    assert result["decoder_blocks.3.cross_attention.key.weight"].role == "key"
    assert result["word_embedding.weight"].shape == (50_265, SHAPES[shape][0])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("strategy", ["standard", "neural_tangent"])
def test_initial_values_are_those_of_the_table(shape, strategy):
    model, result = planned(shape, strategy, 1e-3, 0.01)
    words = result["word_embedding.weight"].init_std
    assert words == {"standard": 0.02, "neural_tangent": 1.0}[strategy]
    others = {row.init_std for row in result.rows if row.role != Role.TOKEN_EMBEDDING}
    assert others == {0.02}
    assert {row.init_distribution for row in result.rows} == {"normal"}
    assert {row.multiplier for row in result.rows} == {1.0}
    width = SHAPES[shape][0]
    rescale = {"standard": 1.0, "neural_tangent": width**-0.5}[strategy]
    assert model.logit_multiplier == pytest.approx(rescale, rel=1e-15)
    assert model.encoder_blocks[0].attention.attention_scale == pytest.approx(64**-0.5, rel=1e-15)


# shape, strategy, lr, wd -> lr of the blocks' matrices, lr of words and positions, lr * wd
RUNS = [
    ("bart_large", "standard", 1e-3, 0.01, 1e-3, 1e-3, 1e-5),
    ("bart_large", "neural_tangent", 32.768, 0.01 * 1024**-1.5, 1e-3, 1.024, 1e-5),
    ("r2c2", "standard", 7e-4, 0.01, 7e-4, 7e-4, 7e-6),
    ("r2c2", "neural_tangent", 64.8772, 0.01 * 2048**-1.5, 7e-4, 1.43360, 7e-6),
]


@pytest.mark.parametrize(("shape", "strategy", "lr", "wd", "bulk", "tables", "decay"), RUNS)
def test_rates_and_decay_at_the_papers_optima(shape, strategy, lr, wd, bulk, tables, decay):
    _, result = planned(shape, strategy, lr, wd)
    for row in result.rows:
        expected = tables if row.role in TABLES else bulk
        assert row.lr == pytest.approx(expected, rel=1e-5), row.name
        assert row.eps == 1e-6
        assert row.decay_per_step == pytest.approx(decay, rel=1e-5)  # (1.94): the same for all


def test_the_table_shows_the_rates_of_the_optimum():
    _, result = planned("bart_large", "neural_tangent", 32.768, 0.01 * 1024**-1.5)
    lines = {line.split()[0]: line for line in result.table().splitlines()}
    words = lines["word_embedding.weight"].split()
    assert words[1:] == ["token_embedding", "50265x1024", "1", "normal", "1", "1", "1.024",
                         "1e-06", "1e-05"]  # fmt: skip
    assert "normal 0.02  1           0.001  1e-06  1e-05" in lines["encoder_blocks.*.mlp.up.weight"]


@pytest.mark.parametrize("s", [0.25, 1.0])
def test_the_family_moves_rates_and_rescale_with_s(s):
    model, result = planned("bart_large", "meta_principled", 1.0, 0.0, s=s)
    assert model.logit_multiplier == pytest.approx(1024 ** (-(1 + s) / 2), rel=1e-12)
    assert result["word_embedding.weight"].lr == pytest.approx(1024 ** (-0.5 + s / 2), rel=1e-12)
    bulk = result["decoder_blocks.0.mlp.down.weight"].lr
    assert bulk == pytest.approx(1024 ** (-1.5 + s / 2), rel=1e-12)


def test_a_step_without_gradient_decays_every_tensor_by_the_global_rate():
    """Equation (1.94): theta is multiplied by 1 - f lr wd, whatever lambda_G is."""
    prescription = Dinan(16, init="bart")
    model = Bart(
        vocab_size=30, width=16, heads=2, layers=1, position_rows=8,
        attention_scale=1.0, logit_multiplier=1.0,
    ).double()  # fmt: skip
    numbers = {"lr": 3.0, "weight_decay": 0.02, "eps": 1e-6, "decay_mode": "global"}
    result = plan(model, RULES, prescription, **numbers)
    result.initialise(model, seed=0)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    groups = result.groups(model)
    assert len({group["lr"] for group in groups}) == 2
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.998))
    factor = 0.25  # of the schedule
    for group in optimizer.param_groups:
        group["lr"] = factor * group["initial_lr"]
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, value in model.named_parameters():
        expected = before[name] * (1 - factor * 3.0 * 0.02)
        torch.testing.assert_close(value.detach(), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize(("strategy", "std"), [("standard", 0.02), ("neural_tangent", 1.0)])
def test_drawn_values_have_the_planned_spread(strategy, std):
    prescription = Dinan(64, strategy=strategy, init="bart")
    model = Bart(
        vocab_size=800, width=64, heads=2, layers=1, attention_scale=1.0, logit_multiplier=1.0
    )
    assert all(parameter.isnan().all() for parameter in model.parameters())
    plan(model, RULES, prescription, lr=1.0).initialise(model, seed=3)
    model.zero_padding()
    words = model.word_embedding.weight
    assert (words[1] == 0).all()
    kept = torch.cat([words[:1], words[2:]])
    assert kept.std().item() == pytest.approx(std, rel=0.02)
    assert model.decoder_positions.weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert model.encoder_blocks[0].mlp.up.weight.std().item() == pytest.approx(0.02, rel=0.03)
