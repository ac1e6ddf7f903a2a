"""The coordinate check of experiments: what it sets, and what it finds of the decoder."""

import argparse
import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from nanolm_c4 import train
from nanolm_c4.config import Config
from param_groups.check import Check, measure, measuring
from param_groups.check.measuring import ALONG
from param_groups.check.slopes import (
    EXCEPTION,
    OK,
    UNKNOWN,
    failed,
    fit,
    table,
    worst,
)
from training import coordinate_check as cc
from training.config import load
from training.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
LAPTOP = ROOT / "nanolm_c4/configs/laptop.yaml"
VOCABULARY, CONTEXT, STEPS = 48, 16, 2
WIDTHS = (64, 128, 256, 512)
ALONG = "readout" + ALONG
MLP, KEY = "blocks.0.mlp.up.weight", "blocks.0.attention.key.weight"


def config(width, seed=0, **keys):
    changes = {"seed": seed, "model.width": width, "model.layers": 1, "model.context": CONTEXT}
    changes |= {"prescription.alignment": "full", "prescription.embedding_std": 1.0}
    changes["optimizer.lr"] = 2**-10
    changes |= {key.replace("__", "."): value for key, value in keys.items()}
    return load(Config, LAPTOP, [f"{key}={value}" for key, value in changes.items()])


def logits_loss(model, batch):
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def decoder(**keys):
    """Build of a small decoder on random tokens."""

    def build(width, seed):
        settings = config(width, seed, **keys)
        model = train.build_model(settings, VOCABULARY)
        numbers = train.build_plan(settings, model)
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(VOCABULARY, (STEPS, 1, CONTEXT + 1), generator=generator)
        return Check(model, numbers, [(row[:, :-1], row[:, 1:]) for row in ids], logits_loss)

    return build


def check(seeds=(0, 1), widths=WIDTHS, steps=STEPS, **keys):
    return fit(measure(decoder(**keys), widths, steps=steps, seeds=seeds))


def words(slopes, *quantities):
    """Name -> worst verdict."""
    result = {}
    for slope in slopes:
        if not quantities or slope.quantity in quantities:
            result[slope.name] = worst([slope.verdict, result.get(slope.name, UNKNOWN)])
    return result


def slope(slopes, quantity, name, step=1):
    (found,) = [s for s in slopes if (s.quantity, s.name, s.step) == (quantity, name, step)]
    return found


# The decoder under the four parameterisations


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["standard", "ntk", "mup", "mean_field"])
def test_full_alignment_passes_but_for_the_expected_growth_of_the_logits(name):
    slopes = check(seeds=(0, 1, 2), prescription__parameterization=name)
    grows = name in ("standard", "ntk")
    exceptions = {n for n, word in words(slopes).items() if word == EXCEPTION}
    assert exceptions == ({ALONG, "readout"} if grows else set())
    assert not failed(slopes), words(slopes)
    assert set(words(slopes).values()) <= {OK, EXCEPTION}
    along = slope(slopes, "change", ALONG)
    assert along.slope == pytest.approx(0.5 if grows else 0.0, abs=0.1)
    assert (along.aim, along.predicted) == (0.0, 0.5 if grows else 0.0)
    start = slope(slopes, "init", "readout", 0)
    assert start.slope == pytest.approx(0.0 if grows else -0.5, abs=0.1)
    assert ("omega 1/2" in table(slopes)) == grows
    if name == "mup":
        every_part_is_measured_and_updates_are_exact(slopes)


def every_part_is_measured_and_updates_are_exact(slopes):
    block = "blocks.0"
    parts = "attention_norm attention.query attention.key attention.value attention.output mlp_norm"
    names = {f"{block}.{part}" for part in (*parts.split(), "mlp.up", "mlp.down")}
    names |= {"token_embedding", "position_embedding", block, "final_norm", "readout", ALONG}
    assert set(words(slopes, "change")) == names
    for name, expected in {  # Table 1: -c of muP under Adam with full alignment
        "token_embedding.weight": -0.5,
        f"{block}.mlp.down.weight": -1.0,
        "readout.weight": -0.5,
        "final_norm.weight": -0.5,
    }.items():
        found = slope(slopes, "update", name)
        assert found.aim == expected
        assert found.slope == pytest.approx(expected, abs=0.01)


def test_rates_without_alignment_grow_by_the_half_power_that_theory_predicts():
    slopes = check(
        seeds=(0, 1, 2), prescription__parameterization="mean_field", prescription__alignment="none"
    )
    down = slope(slopes, "change", "blocks.0.mlp.down")
    assert (down.aim, down.predicted, down.verdict) == (0.0, 0.5, EXCEPTION)
    assert down.slope == pytest.approx(0.5, abs=0.1)
    assert "alpha 1/2" in down.note
    assert not failed(slopes)


# The command


@pytest.fixture
def data(texts):
    """Overrides for a tiny decoder on a folder of little documents."""
    return [*texts, "model.layers=1", "model.head_dim=8", "model.context=16"]


def options(**changes):
    fields = {"scan": "model.width", "steps": 1, "widths": WIDTHS, "as_configured": False}
    return argparse.Namespace(**{**fields, **changes})


def command(*words_):
    return cc.main(["nanolm_c4", str(LAPTOP), *words_])


def test_an_experiment_is_checked_from_its_config(data, tmp_path, capsys, no_picture):
    sizes = ["--widths", "32", "64", "128", "--out", str(tmp_path)]
    mup = ["prescription.parameterization=mup", "prescription.alignment=full", "--steps", "2"]
    command(*data, *mup, *sizes)
    out = capsys.readouterr().out
    assert "set for the check: training.batch_size=1" in out and "passed:" in out
    assert "set for the check: optimizer.weight_decay=0" in out
    assert "readout along the loss gradient" in out
    result = json.loads((tmp_path / "coordinate_check.json").read_text())
    assert result["prescription"]["parameterization"] == "mup"
    assert result["set_for_the_check"]["optimizer.lr"] == 2**-10
    with pytest.raises(SystemExit) as ended:
        command(*data, "prescription.alignment=global", "--steps", "1", *sizes)
    assert ended.value.code == 1 and "FAILED" in capsys.readouterr().out
    assert not json.loads((tmp_path / "coordinate_check.json").read_text())["passed"]


@pytest.mark.parametrize(
    "words",
    [
        ["optimizer.lr=0.5", "training.batch_size=3"],
        ["optimizer={lr: 0.5}", "training={batch_size: 3}"],
    ],
)
def test_the_command_line_wins_over_what_the_check_would_set(words):
    def chosen(**more):
        target = cc.experiment_target("nanolm_c4", LAPTOP, words, options(**more))
        return target.settings["set_for_the_check"]

    assert chosen() == {"prescription.embedding_std": 1.0, "optimizer.weight_decay": 0.0}
    assert chosen(as_configured=True) == {}


def test_a_task_that_fuses_its_loss_is_measured_through_its_logits(data):
    settings = load(Config, LAPTOP, [*data, "model.width=32", "training.batch_size=1"])
    task = train.build_task(settings)

    class Fused(type(task.model)):
        def forward(self, ids, targets=None):
            logits = F.linear(self.body(ids), self.readout.weight * self.readout.multiplier)
            if targets is None:
                return self.readout(self.body(ids))
            return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")

        def body(self, ids):
            x = self.token_embedding(ids)
            for block in self.blocks:
                x = block(x)
            return self.final_norm(x)

    task.model.__class__ = Fused
    found = cc._from_task(task, 1)
    points, _ = measuring._measure_one(found, 32, 0, 1, torch.device("cpu"))
    assert ALONG in {point.name for point in points}
    task.loss = lambda model, batch: 2 * model(*batch)
    with pytest.raises(UserError, match=r"'readout' is not called for the loss .* another number"):
        cc._from_task(task, 1)


def test_a_readouts_bias_is_expected_to_move_by_its_own_rate():
    """lambda = n_out^(-1/2) in every strategy: the width has no part in it."""
    widths = (32, 64, 128)
    words = ["prescription.strategy=neural_tangent", "optimizer.lr=4.0", "model.layers=1"]
    file = ROOT / "vit_imagenet/configs/laptop.yaml"
    target = cc.experiment_target("vit_imagenet", file, words, options(widths=widths))
    rows = fit(measure(target.build, widths, steps=1, seeds=(0, 1)))
    bias = next(row for row in rows if (row.quantity, row.name) == ("update", "head.bias"))
    assert bias.predicted == pytest.approx(0, abs=1e-9) and bias.verdict == OK
