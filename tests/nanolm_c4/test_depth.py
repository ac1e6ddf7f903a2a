"""The rule for the depth in NanoDO's decoder: its plan, and what grows with depth."""

import json
import re
from pathlib import Path

import pytest

from nanolm_c4 import train
from nanolm_c4.config import Config
from tests.nanolm_c4.test_infinite_limits_decoder import numbers
from tests.text_files import as_txt
from training import coordinate_check
from training.config import load

LAPTOP = Path(__file__).resolve().parents[2] / "nanolm_c4/configs/laptop.yaml"
RULES = ("standard", "ntk", "mup", "mean_field")


@pytest.mark.parametrize("alpha", [0.5, 1.0])
@pytest.mark.parametrize("rule", RULES)
def test_what_branches_hold_follows_the_depth_and_nothing_else_does(rule, alpha, capsys):
    """Eight blocks beside the base depth of two, under Adam."""
    words = [
        f"prescription.parameterization={rule}",
        f"prescription.alpha_depth={alpha}",
        "prescription.base_depth=2",
        "optimizer.lr=0.5",
    ]
    small, large = (
        train.EXPERIMENT.plan(load(Config, LAPTOP, [*words, f"model.layers={layers}"]))
        for layers in (2, 8)
    )
    plain = train.EXPERIMENT.plan(load(Config, LAPTOP, [words[0], words[3]]))
    assert [(row.name, row.lr, row.init_std, row.multiplier) for row in small.rows] == [
        (row.name, row.lr, row.init_std, row.multiplier) for row in plain.rows
    ]
    assert small.forward == plain.forward
    for row in large.rows:
        power = alpha - 1 if row.name.startswith("blocks.") else 0
        own = small[re.sub(r"\.\d\.", ".0.", row.name)]
        assert row.lr == pytest.approx(4**power * own.lr, rel=1e-12), row.name
        assert (row.init_std, row.multiplier) == (own.init_std, own.multiplier)
    config = load(Config, LAPTOP, [*words, "model.layers=8"])
    decoder = train.build_model(config, 64)
    train.build_plan(config, decoder).initialise(decoder, seed=0)
    assert {block.residual_multiplier for block in decoder.blocks} == {4**-alpha}
    train.EXPERIMENT.main([str(LAPTOP), *words, "model.layers=8", "--plan"])
    assert f"forward pass: residual_multiplier {4**-alpha:g}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "grows"),
    [
        (["prescription.alpha_depth=0.5"], False),
        (["prescription.alpha_depth=1.0"], False),
        ([], True),
    ],
)
def test_the_coordinate_check_over_depth(words, grows, tmp_path, no_picture):
    """muP, whose embeddings have scale 1: with a rule the stream moves alike at every depth; with
    none at least in proportion to it, behind each of the blocks that stand at one relative depth.
    """
    texts = as_txt(tmp_path / "texts", numbers())
    argv = [
        "nanolm_c4",
        str(LAPTOP),
        "data.source=local",
        f"data.path={texts}",
        f"data.cache_dir={tmp_path / 'cache'}",
        "data.tokenizer_vocab_size=90",
        "data.validation_fraction=0.2",
        "model.width=32",
        "model.head_dim=8",
        "model.context=8",
        "prescription.parameterization=mup",
        "prescription.alignment=full",
        "prescription.base_width=32",
        *words,
        *"--scan model.layers --widths 4 8 16 --steps 1 --seeds 2 --out".split(),
        str(tmp_path / "out"),
    ]
    try:
        coordinate_check.main(argv)
    except SystemExit as ended:
        assert ended.code == 1  # noqa: PT017 - it may also end well
    found = json.loads((tmp_path / "out/coordinate_check.json").read_text())
    assert found["set_for_the_check"]["training.batch_size"] == coordinate_check.DEPTH_BATCH
    stream = {
        s["name"]: s["slope"]
        for s in found["slopes"]
        if s["quantity"] == "change" and re.fullmatch(r"blocks\.\d+", s["name"])
    }
    assert list(stream) == [f"blocks.{block}" for block in range(4)]
    assert found["passed"] is not grows
    if grows:
        assert min(stream.values()) > 0.75, stream
    else:
        assert stream == pytest.approx(dict.fromkeys(stream, 0.0), abs=0.25)
    rates = {one["verdict"] for one in found["numbers"] if one["quantity"] == "rate"}
    assert ("grows" in rates) == grows
