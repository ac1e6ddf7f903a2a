"""Stock models by name: shipped rules give them the theory's powers, and the check takes them."""

import functools
import math
import sys

import pytest
import torch
from torch import nn

from param_groups import Decay, Everett, PlanError, Role, assign, plan, present, rules_for
from param_groups.__main__ import main
from param_groups.check import judge, stock
from param_groups.stock import rules as shipped
from param_groups.stock.rules import TORCH_DECODER_RULES

pytestmark = pytest.mark.xdist_group("huggingface")  # whose import takes seconds
STAGED = "timm:swin_tiny_patch4_window7_224"  # a width per stage
# Full alignment, Adam, multipliers absorbed (Everett et al., Table 1): powers of the width in the
# initial std and the rate.
POWERS = {
    "mup": {"embedding": (0.0, 0.0), "hidden": (-0.5, -1.0), "readout": (-1.0, -1.0)},
    "standard": {"embedding": (0.0, 0.0), "hidden": (-0.5, -1.0), "readout": (-0.5, -1.0)},
}
HIDDEN = {
    Role.QUERY,
    Role.KEY,
    Role.VALUE,
    Role.QKV,
    Role.ATTENTION_OUTPUT,
    Role.MLP_IN,
    Role.MLP_OUT,
    Role.HIDDEN,
}


@functools.cache
def planned(name, rule, width):
    with torch.device("cpu" if "convnext" in name else "meta"):  # its LayerScale is read
        return stock.planned(name, rule, width)


@pytest.mark.parametrize(
    ("name", "rule"),
    [*((name, "mup") for name in stock.MODELS), ("hf:gpt2", "standard"), (STAGED, "standard")],
)
def test_every_tensor_of_a_stock_model_has_the_powers_of_the_theory(name, rule):
    small, large = (planned(name, rule, width) for width in (64, 256))
    for model, numbers, _ in (small, large):
        tensors = dict(model.named_parameters())
        assert [row.name for row in numbers.rows] == list(tensors)
        assert sum(math.prod(row.shape) for row in numbers.rows) == sum(
            tensor.numel() for tensor in tensors.values()
        )
    for row, wide in zip(small[1].rows, large[1].rows, strict=True):
        layer = "hidden" if row.role in HIDDEN else row.role
        layer = "readout" if row.role == Role.ROUTER else layer  # as few outputs at every width
        std, lr = POWERS[rule][layer if layer in ("hidden", "readout") else "embedding"]
        assert wide.lr / row.lr == pytest.approx(4**lr), row.name
        if row.init_std > 0 and row.role != Role.RELATIVE_POSITION:
            ratio = wide.init_std / row.init_std  # eva02 rounds the width of its MLP
            assert ratio == pytest.approx(4**std, rel=0.02), row.name


@pytest.mark.parametrize("name", ["hf:gpt2", "hf:llama", "hf:gemma2", "hf:bert", "hf:whisper"])
def test_a_tied_model_has_its_rules_and_one_rate_or_is_refused_with_both_numbers(name):
    with torch.device("meta"):
        model = shipped.stock(name, **{**stock.sizes(name, 64), "tie_word_embeddings": True})
    stock.set_attention_scale(model, stock.HEAD_DIM**-0.5)
    rules = rules_for(model)
    with pytest.raises(PlanError, match="tied to .*token_embedding lr .*readout lr .*checkpoint"):
        plan(model, rules, Everett("mup", 64, 64, qk_exponent=-0.5), lr=0.1)
    one = plan(model, rules, Everett("standard", 64, 64, alignment="global"), lr=0.1)
    assert {row.lr for row in one.rows} == {0.1}
    assert any(row.tied_to for row in one.rows if row.role == Role.TOKEN_EMBEDDING)
    falls = Decay(Everett("standard", 64, 16, alignment="global"), exponent=-1)  # matrices' alone
    decay = {"weight_decay": 0.1, "decay_mode": "independent"}
    with pytest.raises(PlanError, match="decay 1, .* decay 0.25, "):
        plan(model, rules, falls, lr=0.1, **decay)


@pytest.mark.parametrize("name", stock.MODELS)
def test_a_small_model_has_the_width_and_its_sample_follows_the_seed(name):
    width, keys = 256, stock.sizes(name, 256)
    with torch.device("cpu" if "convnext" in name else "meta"):  # its LayerScale is read
        model = shipped.stock(name, **keys)
    if name.startswith("hf:"):  # which takes unknown keys in silence
        unknown = {key for key in keys if not hasattr(type(model.config)(), key)}
        assert unknown <= {"decoder_start_token_id", "bos_token_id", "head_dim"}
    readouts = [a for a in assign(model, rules_for(model)) if a.role is Role.READOUT]
    assert {one.fans[0] for one in readouts} == {width}
    if name.startswith("timm:convnext"):
        assert keys["dims"] == [32, 64, 128, 256]
    first, again, other = (stock.batch_of(name, seed) for seed in (0, 0, 1))
    for key, value in first.items():
        assert torch.equal(value, again[key])
    inputs = next(iter(first))
    assert not torch.equal(first[inputs], other[inputs])
    assert (inputs == "pixel_values") == (name == "hf:vit" or name.startswith("timm:"))


def test_gemmas_norms_start_at_zero_because_they_add_one():
    model, numbers, _ = stock.planned("hf:gemma2", "mup", 64)
    numbers.initialise(model, 0)
    norm = model.model.norm
    assert norm.weight.abs().max() == 0
    assert norm(torch.randn(8, 64)).square().mean().item() == pytest.approx(1, rel=0.01)
    assert model.model.embed_tokens.embed_scale == 1


@pytest.mark.parametrize("name", ["hf:gpt2", "hf:llama", "hf:bert", "timm:vit_small_patch16_224"])
def test_the_attention_scale_reaches_the_forward_pass(name):
    """Attention logits times almost zero: all positions get the mean, whatever the queries are.

    In float64 and with queries 100 times as large: as initialised, attention is near the mean and
    the loss may round to the same float32.
    """
    width = 64
    model = stock.build(name, width).eval().double()
    batch = {
        key: tensor.double() if tensor.is_floating_point() else tensor
        for key, tensor in stock.batch_of(name, 0).items()
    }
    queries = [  # GPT-2 (of shape in, out) and timm (out, in) hold them beside keys and values
        tensor[..., :width] if "c_attn" in key else tensor[:width]
        for key, tensor in model.named_parameters()
        if any(part in key for part in ("q_proj", "query", "qkv", "c_attn"))
    ]
    assert queries
    with torch.no_grad():
        for tensor in queries:
            tensor.mul_(100)
        before = stock.loss_of(model, batch)
        assert stock.set_attention_scale(model, 1e-9)
        flat = stock.loss_of(model, batch)
        for tensor in queries:
            tensor.mul_(7)
        assert abs(flat - before) > 1e-6
        assert stock.loss_of(model, batch) == pytest.approx(flat.item())


def test_models_without_a_place_for_the_attention_scale_are_named():
    assert "attention scale" in planned("hf:t5", "mup", 64)[2]
    assert planned("hf:gpt2", "mup", 64)[2] == ""
    assert not stock.set_attention_scale(nn.MultiheadAttention(16, 2), 0.1)


@pytest.mark.parametrize(
    "model",
    [
        nn.Transformer(16, 2, 1, 1, 32),
        nn.MultiheadAttention(16, 2),
        nn.MultiheadAttention(16, 2, kdim=8, vdim=12, add_bias_kv=True),
    ],
)
def test_torchs_own_attention_is_covered(model):
    found = assign(model, present(TORCH_DECODER_RULES, model))
    assert [a.name for a in found] == [name for name, _ in model.named_parameters()]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gpt2", "write hf:gpt2"),
        ("jax:gpt2", "write hf:gpt2"),
        ("hf:", "write hf:gpt2"),
        ("hf:gpt7", "hf:gpt7: cannot build"),
        ("timm:vitt", "timm:vitt"),
        ("hf:vits", "hf:vits: .* is neither a language model nor an image or speech"),
        ("timm:swin_tiny_patch4_window7_224", "timm is not installed"),
    ],
)
def test_an_unknown_stock_model_is_one_line(name, message, monkeypatch):
    if "not installed" in message:
        monkeypatch.setitem(sys.modules, "timm", None)
    with torch.device("meta"), pytest.raises(PlanError, match=message) as error:
        shipped.stock(name)
    assert "\n" not in str(error.value)


def test_a_stock_model_is_checked_by_name(tmp_path, capsys, no_picture):
    """Two lines say which rule passed, and each has a folder of its results."""
    small = ["--widths", "64", "128", "256", "--seeds", "1", "--steps", "1", "--tolerance", "9"]
    main(["check", "hf:llama", *small, "--out", str(tmp_path)])
    text = capsys.readouterr().out
    assert "hf:llama under mup" in text and "hf:llama under standard" in text
    for rule in ("mup", "standard"):
        assert (tmp_path / rule / "coordinate_check.csv").exists()


@pytest.mark.parametrize("name", stock.MODELS)
def test_numbers_of_every_stock_model_are_the_papers(name):
    """And one rate for all of its tensors is not what stability demands."""
    plans = {width: planned(name, "mup", width)[1] for width in (64, 128, 256)}
    assert {one.verdict for one in judge(plans)} == {"ok"}
    plans = {width: planned(name, "one_rate", width)[1] for width in (64, 128, 256)}
    assert "grows" in {one.verdict for one in judge(plans)}
