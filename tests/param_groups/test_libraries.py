"""Models of libraries: what is read of them and of their twins, and the plans that follow."""

import math

import pytest
import timm
import torch
import transformers
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from param_groups import Decay, Everett, PlanError, Role, plan, rules_for
from param_groups.__main__ import main
from param_groups.check import stock
from param_groups.roles import assign
from param_groups.stock import rules as shipped
from param_groups.stock import twins
from tests.param_groups.libraries import KEPT, MODELS, TORCHS, build, described, kept, planned, read

pytestmark = pytest.mark.xdist_group("libraries")
STAGED = "timm:swin_tiny_patch4_window7_224"  # a width per stage
FEW = ("hf:gpt2", "hf:gemma2", "hf:mixtral", "timm:vit_small_patch16_224", "nn.Transformer")
LLAMA = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
LLAMA |= {"vocab_size": 96, "intermediate_size": 64, "tie_word_embeddings": False}


def on_meta(make, *args, **kwargs):
    with torch.device("meta"):
        return make(*args, **kwargs)


def llama(width, **more):
    config = transformers.LlamaConfig(hidden_size=width, **LLAMA | more)
    return transformers.LlamaForCausalLM(config)


# What is kept of every model


@pytest.mark.parametrize(
    "name",
    [n if n in FEW else pytest.param(n, marks=pytest.mark.thorough) for n in MODELS + TORCHS],
)
def test_roles_fans_factors_and_verdicts_are_those_that_are_kept(name):
    assert described(name) == kept()[name], f"`python -m tests.param_groups.libraries`: {KEPT}"


@pytest.mark.parametrize("name", MODELS)
def test_rules_for_a_model_are_those_of_its_trace(name):
    """Its twins are of other sizes; what nothing uses has a rule of its own there."""
    with torch.device("cpu" if "convnext" in name else "meta"):  # its LayerScale is read
        model = build(name, 128)
    found = read(name)
    for one in assign(model, rules_for(model)):
        reading = found[one.name]
        if reading.use == "nothing":
            assert not reading.role and one.role in {rule.role for rule in twins._UNUSED}
        else:
            mine = (reading.role, reading.layout, reading.scale, (reading.fan_in, reading.fan_out))
            assert (one.role, one.layout, one.scale, one.fans) == mine, one.name
            assert one.parts == reading.parts and one.measured == ()
            assert not reading.role.facts.branch or one.trunk is not reading.inside


@pytest.mark.parametrize("name", ["hf:gpt2", "hf:llama", "hf:gemma2", "hf:bert", "hf:whisper"])
def test_a_tied_model_has_its_rules_and_one_rate_or_is_refused_with_both_numbers(name):
    model = on_meta(shipped.stock, name, **{**stock.sizes(name, 64), "tie_word_embeddings": True})
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


@pytest.mark.parametrize("name", ["hf:gpt2", "hf:mixtral", "hf:bert", STAGED])
def test_planned_models_train(name):
    model = build(name, 64)
    rule = Everett("standard", 64, 64, qk_exponent=-0.5)
    options = {"head_dim": 16, "base": model if name == STAGED else None}
    stock.set_attention_scale(model, 0.25)
    numbers = plan(model, rules_for(model), rule, lr=1e-3, **options)
    numbers.initialise(model, seed=0, overwrite=True)
    loss = stock.loss_of(model, stock.batch_of(name, 0))
    loss.backward()
    assert loss.isfinite()
    torch.optim.AdamW(numbers.groups(model)).step()


# Options of timm's, and how many tensors the model of two blocks then has: six outside the blocks
# and the final norm's two, and twelve in each block.
PLAIN = lambda n, **more: nn.LayerNorm(n, elementwise_affine=False)
VITS = {
    "as it comes": ({}, 8 + 24),
    "mean pooling, no class token": ({"class_token": False, "global_pool": "avg"}, 7 + 24),
    "no biases in attention and MLP": ({"qkv_bias": False, "proj_bias": False}, 8 + 24 - 2 * 4),
    "norms without parameters": ({"norm_layer": PLAIN}, 6 + 24 - 2 * 4),
    "register tokens": ({"reg_tokens": 2}, 9 + 24),
    "normalised queries and keys": ({"qk_norm": True, "pre_norm": True}, 9 + 24 + 2 * 4),
    "no head": ({"num_classes": 0}, 6 + 24),
    "LayerScale": ({"init_values": 0.1}, 8 + 24 + 2 * 2),
    "pooled by an attention": ({"class_token": False, "global_pool": "map"}, 7 + 24 + 13),
}


@pytest.mark.parametrize("case", VITS)
def test_options_of_timms_are_found_in_the_tensors(case):
    options, count = VITS[case]
    sizes = {"img_size": 8, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2}
    model = VisionTransformer(**{**sizes, "num_classes": 3, **options})
    found = {one.name: one.role for one in assign(model, rules_for(model))}
    assert len(found) == count == len([*model.parameters()])
    assert found["blocks.1.attn.qkv.weight"] is Role.QKV and found["pos_embed"].facts.axis
    assert {role for name, role in found.items() if "reg" in name} <= {Role.POSITION_EMBEDDING}
    if case == "LayerScale":
        numbers = plan(model, rules_for(model), Everett("standard", 16, 16), lr=0.1)
        assert numbers["blocks.0.ls1.gamma"].init_mean == 0.1


@pytest.mark.parametrize(
    ("name", "sizes", "start"),
    [
        ("deit3_small_patch16_224", {"embed_dim": 32, "depth": 2, "num_heads": 2}, 1e-6),
        ("cait_xxs24_224", {"embed_dim": 32, "depth": 2, "num_heads": 2}, 1e-5),
        *(("convnext_atto", {"ls_init_value": start}, start) for start in (1.0, 1e-6, 0.1)),
    ],
)
def test_a_layer_scale_starts_where_the_model_starts_it(name, sizes, start):
    """As its module says, or as the number that fills it."""
    if "ls_init_value" in sizes:
        sizes |= {"depths": (1, 1, 1, 1), "dims": (8, 16, 32, 64)}
    model = timm.create_model(name, **sizes)
    own = {name: p.clone() for name, p in model.named_parameters() if "gamma" in name}
    rules = rules_for(model)
    assert {r.scale for r in rules if r.role is Role.LAYER_SCALE} == {start} and own
    rule = Everett("standard", 32, 32)
    numbers = plan(model, rules, rule, lr=0.1, base=model, head_dim=16)
    numbers.initialise(model, seed=0)
    for name, value in own.items():
        assert torch.equal(model.get_parameter(name), value)


def test_a_model_whose_name_has_its_sizes_is_built_by_its_class():
    """timm's mixers refuse a width beside their name's."""
    model, numbers, _ = planned("timm:mixer_s16_224", "mup", 64)
    whole = on_meta(timm.create_model, "mixer_s16_224")
    assert numbers.rows and [r.role for r in rules_for(whole)] == [r.role for r in rules_for(model)]
    with pytest.raises(PlanError, match="multiple values for keyword argument 'embed_dim'"):
        shipped.stock("timm:gmixer_12_224", embed_dim=64)  # its class alone is another model's


def test_a_small_models_sizes_say_nothing_of_the_model_and_options_do(monkeypatch):
    """Bias, gates and shared keys are the config's; one trace serves every width and depth."""
    monkeypatch.setattr(twins, "_TRACED", {})
    sizes = {"num_hidden_layers": 3, "intermediate_size": 96, "attention_bias": True}
    model = on_meta(llama, 48, **sizes)
    roles = {one.name: str(one.role) for one in assign(model, rules_for(model))}
    assert roles["model.layers.2.self_attn.q_proj.bias"] == "hidden_bias"
    assert roles["model.layers.2.mlp.gate_proj.weight"] == "mlp_in"
    rules_for(on_meta(llama, 96, **sizes))
    assert len(twins._TRACED) == 1
    rules_for(on_meta(llama, 48))
    assert len(twins._TRACED) == 2


def test_gemma_is_known_by_its_norms_in_a_class_of_another_module():
    class Wrapped(transformers.Gemma2ForCausalLM):
        pass

    model = on_meta(Wrapped, transformers.Gemma2Config(hidden_size=32, **LLAMA))
    norms = {(rule.role, rule.scale) for rule in rules_for(model) if "norm" in rule.pattern}
    assert norms == {(Role.NORM_SCALE, 0.0), (Role.FINAL_NORM_SCALE, 0.0)}


@pytest.mark.parametrize("kind", ["BertForMaskedLM", "RobertaForMaskedLM"])
def test_rules_of_two_small_blocks_hold_for_many(kind):
    """Here one name of a block is the end of another's, which a * would take, too."""
    made = getattr(transformers, kind)
    sizes = {"num_hidden_layers": 12, "num_attention_heads": 2, "tie_word_embeddings": False}
    model = on_meta(made, made.config_class(hidden_size=48, intermediate_size=64, **sizes))
    rules = rules_for(model)
    assert len(assign(model, rules)) == len([*model.parameters()]) > 4 * len(rules)
    assert "#" in "".join(rule.pattern for rule in rules)


@pytest.mark.parametrize("name", stock.MODELS)
def test_a_small_model_has_the_width_and_its_sample_follows_the_seed(name):
    model, keys = planned(name, "mup", 256)[0], stock.sizes(name, 256)
    if name.startswith("hf:"):  # which takes unknown keys in silence
        unknown = {key for key in keys if not hasattr(type(model.config)(), key)}
        assert unknown <= {"decoder_start_token_id", "bos_token_id", "head_dim"}
    rows = planned(name, "mup", 256)[1].rows
    assert {row.fan_in for row in rows if row.role == "readout"} == {256}
    first, again, other = (stock.batch_of(name, seed) for seed in (0, 0, 1))
    inputs = next(iter(first))
    assert torch.equal(first[inputs], again[inputs]) and math.isfinite(first[inputs].sum())
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
    items = stock.batch_of(name, 0).items()
    batch = {key: x.double() if x.is_floating_point() else x for key, x in items}
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


def test_a_stock_model_is_checked_by_name(tmp_path, capsys, no_picture):
    """Two lines say which rule passed, and each has a folder of its results."""
    small = ["--widths", "64", "128", "256", "--seeds", "1", "--steps", "1", "--tolerance", "9"]
    main(["check", "hf:llama", *small, "--out", str(tmp_path)])
    text = capsys.readouterr().out
    assert "hf:llama under mup" in text and "hf:llama under standard" in text
    for rule in ("mup", "standard"):
        assert (tmp_path / rule / "coordinate_check.csv").exists()
