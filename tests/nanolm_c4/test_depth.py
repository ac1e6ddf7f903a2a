"""The rule for the depth in NanoDO's decoder: its plan, and what grows with depth."""

import json
import re
from pathlib import Path

import pytest

from nanolm_c4 import train
from nanolm_c4.config import Config
from training import coordinate_check
from training.config import load

LAPTOP = Path(__file__).resolve().parents[2] / "nanolm_c4/configs/laptop.yaml"
RULES = ("standard", "ntk", "mup", "mean_field")


@pytest.mark.parametrize("alpha", [0.5, 1.0])
@pytest.mark.parametrize("rule", RULES)
def test_what_branches_hold_follows_the_depth_and_nothing_else_does(rule, alpha, capsys):
    """Eight blocks beside the base depth of two, under Adam."""
    words = f"prescription.parameterization={rule} optimizer.lr=0.5".split()
    depth = f"prescription.alpha_depth={alpha} prescription.base_depth=2".split()
    small, large, plain = (
        train.EXPERIMENT.plan(load(Config, LAPTOP, [*words, *more]))
        for more in ([*depth, "model.layers=2"], [*depth, "model.layers=8"], [])
    )
    numbers = lambda made: [(row.name, row.lr, row.init_std, row.multiplier) for row in made.rows]
    assert numbers(small) == numbers(plain) and small.forward == plain.forward
    for row in large.rows:
        power = alpha - 1 if row.name.startswith("blocks.") else 0
        own = small[re.sub(r"\.\d\.", ".0.", row.name)]
        assert row.lr == pytest.approx(4**power * own.lr, rel=1e-12), row.name
        assert (row.init_std, row.multiplier) == (own.init_std, own.multiplier)
    config = load(Config, LAPTOP, [*words, *depth, "model.layers=8"])
    decoder = train.build_model(config, 64)
    train.build_plan(config, decoder).initialise(decoder, seed=0)
    assert {block.residual_multiplier for block in decoder.blocks} == {4**-alpha}
    train.EXPERIMENT.main([str(LAPTOP), *words, *depth, "model.layers=8", "--plan"])
    assert f"forward pass: residual_multiplier {4**-alpha:g}" in capsys.readouterr().out


@pytest.mark.thorough
@pytest.mark.parametrize("alpha", [0.5, 1.0, None])
def test_the_coordinate_check_over_depth(alpha, texts, tmp_path, no_picture):
    """muP, whose embeddings have scale 1: with a rule the stream moves alike at every depth; with
    none at least in proportion to it, behind each of the blocks that stand at one relative depth.
    """
    grows, words = alpha is None, [f"prescription.alpha_depth={alpha}"] * (alpha is not None)
    more = (
        "model.width=32 model.head_dim=8 model.context=8 prescription.parameterization=mup "
        "prescription.alignment=full prescription.base_width=32 --scan model.layers --widths 4 8 16"
        f" --steps 1 --seeds 2 --out {tmp_path / 'out'}"
    ).split()
    argv = ["nanolm_c4", str(LAPTOP), *texts, *words, *more]
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
