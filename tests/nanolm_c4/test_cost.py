"""Costs of the decoders: the paper's numbers; all else is in test_costs."""

from pathlib import Path

import pytest
import torch

from nanolm_c4 import cost, train
from nanolm_c4.config import Config
from nanolm_c4.data import train_tokenizer
from training.config import load
from training.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
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
BORDELON = "infinite_limits_laptop"  # Bordelon et al.'s decoder, with biases and without scales
SHAPE = (64, 1, 16, 4, 64, 100, 4)  # width, layers, head_dim, mlp_ratio, context, words, rows


def paper(*overrides):
    return load(Config, ROOT / "nanolm_c4/configs/paper.yaml", overrides)


def small(shape, *overrides, file="laptop"):
    """A laptop config of another size."""
    keys = ("width", "layers", "head_dim", "mlp_ratio", "context", "vocab_size")
    model = [f"model.{key}={value}" for key, value in zip(keys, shape[:-1], strict=True)]
    size = ["model.heads=null", f"training.batch_size={shape[-1]}"]
    return load(Config, ROOT / f"nanolm_c4/configs/{file}.yaml", [*model, *size, *overrides])


def on_meta(config):
    """The config's model without values, and its plan."""
    with torch.device("meta"):
        model = train.build_model(config, cost.vocabulary(config))
    return model, train.build_plan(config, model)


@pytest.mark.parametrize(("heads", "counts"), TABLE_3.items())
def test_parameters_are_those_of_the_papers_table(heads, counts):
    expected = dict(zip(("embedding", "non_embedding", "total"), counts, strict=True))
    assert cost.parameters(paper(f"model.width={128 * heads}")) == expected


def test_without_norms_their_scales_are_not_counted():
    config = small(SHAPE, "model.norms=false")
    model, _ = on_meta(config)
    assert cost.parameters(config)["total"] == sum(each.numel() for each in model.parameters())


def test_flops_of_the_papers_base_model():
    config = paper()
    assert cost.tokens_per_step(config) == 131_072
    per_token = 6 * (12 * 8 * 1024**2 + 8 * 512 * 1024 + 32_101 * 1024)
    assert cost.flops(config) == 50_000 * 131_072 * per_token
    assert train.flops(config) == cost.flops(config)


def test_without_a_vocabulary_the_tokeniser_in_use_counts(tmp_path):
    shape = (*SHAPE[:5], "null", 4)
    with_default = small(shape, "data.tokenizer_vocab_size=300")
    assert cost.vocabulary(with_default) == 300
    assert cost.parameters(with_default)["embedding"] == 300 * 64

    own = tmp_path / "own.model"
    train_tokenizer([f"line {n} of {n**3}, a short text" for n in range(300)], 70, own)
    with_own = small(shape, f"data.tokenizer={own}")
    assert cost.parameters(with_own)["embedding"] == 70 * 64
    assert train.build_plan(with_own)["readout.weight"].shape == (70, 64)

    with pytest.raises(UserError, match="data.tokenizer: .*absent.model is not a usable"):
        cost.parameters(small(shape, f"data.tokenizer={tmp_path / 'absent.model'}"))
