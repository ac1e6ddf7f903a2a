"""What is special to a run of the decoder: the paper's numbers in its plan, its own mistakes."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from nanolm_c4.config import Config
from nanolm_c4.train import EXPERIMENT
from training.config import load
from training.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
LAPTOP = "nanolm_c4/configs/laptop.yaml"


def test_the_plan_has_the_papers_rates(capsys):
    arguments = [str(ROOT / "nanolm_c4/configs/paper.yaml"), "model.width=2048", "--plan"]
    EXPERIMENT.main(arguments)
    text = capsys.readouterr().out
    assert "blocks.*.mlp.down.weight (8 tensors)" in text and "0.0005" in text
    EXPERIMENT.main([*arguments, "--json"])
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert rows["readout.weight"]["lr"] == pytest.approx(0.001 / 2)
    assert rows["token_embedding.weight"]["lr"] == pytest.approx(0.001)


def test_decay_goes_with_the_width_as_the_config_says():
    def per_step(*overrides):
        changes = ["model.width=256", "prescription.base_width=64", *overrides]
        config = load(
            Config,
            ROOT / LAPTOP,
            [
                "prescription.parameterization=mup",
                "optimizer.weight_decay=1e-4",
                "optimizer.decay_mode=independent",
                *changes,
            ],
        )
        numbers = {row.name: row.lr * row.weight_decay for row in EXPERIMENT.plan(config).rows}
        return numbers["blocks.0.mlp.up.weight"], numbers["token_embedding.weight"]

    hidden, embedding = per_step()
    assert hidden == pytest.approx(embedding)
    assert per_step("prescription.decay_exponent=-1") == pytest.approx((hidden / 4, embedding))


def test_the_embeddings_rate_goes_with_the_width_as_the_config_says():
    changes = ["model.width=256", "prescription.base_width=64", "prescription.embedding_exponent=1"]
    config = load(Config, ROOT / LAPTOP, changes)
    rates = {row.name: row.lr for row in EXPERIMENT.plan(config).rows}
    assert (
        rates["token_embedding.weight"]
        == rates["position_embedding.weight"]
        == 4 * config.optimizer.lr
    )
    assert rates["final_norm.weight"] == rates["blocks.0.mlp.up.weight"] == config.optimizer.lr


@pytest.mark.parametrize(
    ("limit", "refused"), [(6_600_000_000, True), (900, True), (768, False), (None, False)]
)
def test_text_of_c4_that_ends_before_the_run_does_is_not_seen_again_unasked(limit, refused):
    words = [
        "data.source=c4",
        "training.steps=10",
        "model.context=64",
        "training.batch_size=4",
        "schedule.warmup_steps=1",
        f"data.max_train_tokens={json.dumps(limit)}",
    ]
    config = load(EXPERIMENT.config, ROOT / LAPTOP, words)  # sees 2,560 tokens
    task = SimpleNamespace(config=config, train_data=range(12))  # 768 tokens
    if refused:
        with pytest.raises(UserError, match="c4 has 768 training tokens, and 10 steps see"):
            EXPERIMENT.arithmetic(task)
    else:
        assert EXPERIMENT.arithmetic(task) == [
            "length 10 steps = 3.33 epochs of 12 rows of 64 tokens"
        ]
