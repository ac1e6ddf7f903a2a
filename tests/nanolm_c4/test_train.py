"""What is special to a run of the decoder: the paper's numbers in its plan, its own mistakes."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from nanolm_c4.config import Config
from nanolm_c4.data import train_tokenizer
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
        changes = (
            "model.width=256 prescription.base_width=64 prescription.parameterization=mup "
            "optimizer.weight_decay=1e-4 optimizer.decay_mode=independent"
        ).split()
        config = load(Config, ROOT / LAPTOP, [*changes, *overrides])
        numbers = {row.name: row.lr * row.weight_decay for row in EXPERIMENT.plan(config).rows}
        return numbers["blocks.0.mlp.up.weight"], numbers["token_embedding.weight"]

    hidden, embedding = per_step()
    assert hidden == pytest.approx(embedding)
    assert per_step("prescription.decay_exponent=-1") == pytest.approx((hidden / 4, embedding))


def test_the_embeddings_rate_goes_with_the_width_as_the_config_says():
    changes = ["model.width=256", "prescription.base_width=64", "prescription.embedding_exponent=1"]
    config = load(Config, ROOT / LAPTOP, changes)
    rates = {row.name: row.lr for row in EXPERIMENT.plan(config).rows}
    embeddings = rates["token_embedding.weight"], rates["position_embedding.weight"]
    assert embeddings == (4 * config.optimizer.lr,) * 2
    assert rates["final_norm.weight"] == rates["blocks.0.mlp.up.weight"] == config.optimizer.lr


@pytest.mark.parametrize(
    ("limit", "refused"), [(6_600_000_000, True), (900, True), (768, False), (None, False)]
)
def test_text_of_c4_that_ends_before_the_run_does_is_not_seen_again_unasked(limit, refused):
    words = (
        "data.source=c4 training.steps=10 model.context=64 training.batch_size=4 "
        f"schedule.warmup_steps=1 data.max_train_tokens={json.dumps(limit)}"
    ).split()
    config = load(EXPERIMENT.config, ROOT / LAPTOP, words)  # sees 2,560 tokens
    task = SimpleNamespace(config=config, train_data=range(12))  # 768 tokens
    if refused:
        with pytest.raises(UserError, match="c4 has 768 training tokens, and 10 steps see"):
            EXPERIMENT.arithmetic(task)
    else:
        said = "length 10 steps = 3.33 epochs of 12 rows of 64 tokens"
        assert EXPERIMENT.arithmetic(task) == [said]


# Costs of the decoders: the paper's numbers; all else is in test_costs


# Everett et al., Table 3: heads -> (embedding, non-embedding, total) parameters.
TABLE_3 = {
    1: (4_108_928, 5_749_504, 9_858_432),
    2: (8_217_856, 14_644_736, 22_862_592),
    4: (16_435_712, 41_872_384, 58_308_096),
    6: (24_653_568, 81_682_944, 106_336_512),
    8: (32_871_424, 134_076_416, 166_947_840),
    12: (49_307_136, 276_612_096, 325_919_232),
    16: (65_742_848, 469_479_424, 535_222_272),
    20: (82_178_560, 712_678_400, 794_856_960),
    24: (98_614_272, 1_006_209_024, 1_104_823_296),
    32: (131_485_696, 1_744_265_216, 1_875_750_912),
    48: (197_228_544, 3_824_357_376, 4_021_585_920),
    64: (262_971_392, 6_709_755_904, 6_972_727_296),
    96: (394_457_088, 14_896_472_064, 15_290_929_152),
    128: (525_942_784, 26_304_413_696, 26_830_356_480),
}


def paper(*overrides):
    return load(Config, ROOT / "nanolm_c4/configs/paper.yaml", overrides)


@pytest.mark.parametrize(("heads", "counts"), TABLE_3.items())
def test_parameters_are_those_of_the_papers_table(heads, counts):
    expected = dict(zip(("embedding", "non_embedding", "total"), counts, strict=True))
    assert EXPERIMENT.parameters(paper(f"model.width={128 * heads}")) == expected


def test_flops_of_the_papers_base_model():
    config = paper()
    assert EXPERIMENT.tokens_per_step(config) == 131_072
    per_token = 6 * (12 * 8 * 1024**2 + 8 * 512 * 1024 + 32_101 * 1024)
    assert EXPERIMENT.flops(config) == 50_000 * 131_072 * per_token


def test_a_tied_decoder_has_one_table_less_and_the_same_products():
    rule = ("prescription.parameterization=mup", "model.width=2048")
    tied, untied = paper(*rule, "model.tied=true"), paper(*rule)
    totals = [EXPERIMENT.parameters(config)["total"] for config in (tied, untied)]
    assert totals[1] - totals[0] == 32_101 * 2048
    assert EXPERIMENT.flops(tied) == EXPERIMENT.flops(untied)
    made = EXPERIMENT.plan(tied)
    assert made["readout.weight"] is made["token_embedding.weight"]
    logits = {"name": "logit_multiplier", "value": 0.5, "head_dim": None}  # the base has 1,024
    assert made.to_dict()["forward"][-1] == logits


def test_without_a_vocabulary_the_tokeniser_in_use_counts(tmp_path):
    def embedding(*words):
        config = load(Config, ROOT / "nanolm_c4/configs/laptop.yaml", words)
        return EXPERIMENT.parameters(config)["embedding"] / config.model.width, config

    assert embedding("data.tokenizer_vocab_size=300")[0] == 300
    own = tmp_path / "own.model"
    train_tokenizer([f"line {n} of {n**3}, a short text" for n in range(300)], 70, own)
    rows, config = embedding(f"data.tokenizer={own}")
    assert rows == 70 == EXPERIMENT.plan(config)["readout.weight"].shape[0]
    with pytest.raises(UserError, match="data.tokenizer: .*absent.model is not a usable"):
        embedding(f"data.tokenizer={tmp_path / 'absent.model'}")
