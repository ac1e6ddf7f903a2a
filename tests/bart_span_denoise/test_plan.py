"""What the plan gives every tensor of BART-large and R2C2 (Dinan et al., Part II, section 2)."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bart_span_denoise import train
from bart_span_denoise.config import Config
from bart_span_denoise.model import RULES, Bart
from param_groups import Dinan, plan
from param_groups.roles import Role
from training.config import load
from training.runs import run_id

SHAPES = {"bart_large": (1024, 16, 12), "r2c2": (2048, 32, 22)}
LAPTOP = Path(__file__).resolve().parents[2] / "bart_span_denoise/configs/laptop.yaml"
TABLES = {Role.TOKEN_EMBEDDING, Role.POSITION_EMBEDDING}


def planned(shape, strategy, lr, weight_decay, s=None):
    """The plan of a model on the meta device."""
    width, heads, layers = SHAPES[shape]
    prescription = Dinan(width, strategy=strategy, s=s, init="bart")
    with torch.device("meta"):
        model = Bart(vocab_size=50_265, width=width, heads=heads, layers=layers)
    numbers = {"lr": lr, "eps": 1e-6, "weight_decay": weight_decay, "decay_mode": "global"}
    return plan(model, RULES, prescription, **numbers)


def factors(result):
    return {factor.name: factor.value for factor in result.forward}


@pytest.mark.parametrize("shape", SHAPES)
def test_every_tensor_has_its_role(shape):
    result = planned(shape, "standard", 1e-3, 0.01)
    layers = SHAPES[shape][2]
    counts = {}
    for row in result.rows:
        counts[row.role] = counts.get(row.role, 0) + 1
    attention = dict.fromkeys(("query", "key", "value", "attention_output"), 3 * layers)
    mlp = dict.fromkeys(("mlp_in", "mlp_out"), 2 * layers)
    assert counts == {"token_embedding": 1, "position_embedding": 2, **attention, **mlp}
    assert result["decoder_blocks.3.cross_attention.key.weight"].role == "key"
    assert result["word_embedding.weight"].shape == (50_265, SHAPES[shape][0])


# shape, strategy, lr, wd -> lr of the blocks' matrices, lr of words and positions, lr * wd
RUNS = [
    ("bart_large", "standard", 1e-3, 0.01, 1e-3, 1e-3, 1e-5),
    ("bart_large", "neural_tangent", 32.768, 0.01 * 1024**-1.5, 1e-3, 1.024, 1e-5),
    ("r2c2", "standard", 7e-4, 0.01, 7e-4, 7e-4, 7e-6),
    ("r2c2", "neural_tangent", 64.8772, 0.01 * 2048**-1.5, 7e-4, 1.43360, 7e-6),
]


@pytest.mark.parametrize(("shape", "strategy", "lr", "wd", "bulk", "tables", "decay"), RUNS)
def test_rates_and_decay_at_the_papers_optima(shape, strategy, lr, wd, bulk, tables, decay):
    result = planned(shape, strategy, lr, wd)
    for row in result.rows:
        expected = tables if row.role in TABLES else bulk
        assert row.lr == pytest.approx(expected, rel=1e-5), row.name
        assert row.eps == 1e-6
        assert row.decay_per_step == pytest.approx(decay, rel=1e-5)  # (1.94): the same for all
    neural_tangent, width = strategy == "neural_tangent", SHAPES[shape][0]
    assert result["word_embedding.weight"].init_std == (1.0 if neural_tangent else 0.02)
    assert {row.init_std for row in result.rows if row.role != Role.TOKEN_EMBEDDING} == {0.02}
    assert factors(result) == pytest.approx(
        {"attention_scale": 64**-0.5, "logit_multiplier": width**-0.5 if neural_tangent else 1.0}
    )


# What is exchanged -> the word embedding's initial deviation and the factor on logits, n = 64.
ABLATIONS = [
    ("standard", ["c_we=0.25"], 0.5, 1.0),
    ("standard", ["rescale=true"], 0.02, 1 / 8),
    ("neural_tangent", ["c_we=0.0004"], 0.02, 1 / 8),
    ("neural_tangent", ["rescale=false"], 1.0, 1.0),
    ("maximal_update", ["c_we=0.25", "rescale=true"], 0.5, 1 / 64),
]


@pytest.mark.parametrize(("strategy", "exchanged", "std", "rescale"), ABLATIONS)
def test_what_is_exchanged_changes_and_nothing_else(strategy, exchanged, std, rescale):
    own = [f"prescription.strategy={strategy}"]
    configs = [
        load(Config, LAPTOP, [*own, *(f"prescription.{word}" for word in words)])
        for words in ([], exchanged)
    ]
    assert run_id(configs[0]) != run_id(configs[1])
    before, after = map(train.EXPERIMENT.plan, configs)
    found = factors(after)
    assert found["logit_multiplier"] == pytest.approx(rescale)
    assert found["attention_scale"] == factors(before)["attention_scale"]
    for row, other in zip(before.rows, after.rows, strict=True):
        expected = std if row.role == Role.TOKEN_EMBEDDING else row.init_std
        assert other == replace(row, init_std=pytest.approx(expected))
