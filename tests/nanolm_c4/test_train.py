"""What is special to a run of the decoder: the paper's numbers in its plan, its own mistakes."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

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


@pytest.mark.parametrize(
    ("limit", "refused"), [(6_600_000_000, True), (900, True), (768, False), (None, False)]
)
def test_text_of_c4_that_ends_before_the_run_does_is_not_seen_again_unasked(limit, refused):
    words = [
        "data.source=c4",
        "data.path=data/c4",
        "training.steps=10",
        "model.context=64",
        "training.batch_size=4",
        "schedule.warmup_steps=1",
        f"data.max_train_tokens={json.dumps(limit)}",
    ]
    config = load(EXPERIMENT.config, ROOT / LAPTOP, words)  # sees 2,560 tokens
    task = SimpleNamespace(config=config, train_data=range(12))  # 768 tokens
    if refused:
        with pytest.raises(UserError, match="data/c4 has 768 training tokens, and 10 steps see"):
            EXPERIMENT.arithmetic(task)
    else:
        assert EXPERIMENT.arithmetic(task) == [
            "length 10 steps = 3.33 epochs of 12 rows of 64 tokens"
        ]
