"""Factors of the forward pass that stock models hold are those that their plans count on."""

import copy
import re

import numpy as np
import pytest
import timm
import torch
from torch import nn

from param_groups import Depth, Dinan, Everett, Factor, PlanError, Role, Rule, plan, rules_for
from param_groups.layers import Scaled
from param_groups.stock.rules import stock

IDS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
# Heads of 16, for which the libraries' attention scale is 1/4.
SIZES = {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 64}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16}
GPT2 = {"vocab_size": 96, "n_embd": 64, "n_layer": 2, "n_head": 4}
WHISPER = {"vocab_size": 96, "d_model": 64, **IDS}
for end in ("encoder", "decoder"):
    WHISPER |= {f"{end}_layers": 1, f"{end}_attention_heads": 4, f"{end}_ffn_dim": 64}
GRANITE = {**SIZES, "attention_multiplier": 0.25}
# model: (sizes with which the library applies what muP with heads of 16 has, one that differs,
# what the error says of it)
APPLIES = {
    "hf:granite": (
        GRANITE,
        {"attention_multiplier": 1.0},
        "layers.0.self_attn' .GraniteAttention. has scaling 1 on query-key products, "
        "but Everett asks for 0.25 for head dimension 16: set it.*qk_exponent=0 in",
    ),
    "hf:gemma2": (
        {**SIZES, "query_pre_attn_scalar": 16},
        {"query_pre_attn_scalar": 256},
        "Gemma2Attention. has scaling 0.0625 on.*asks for 0.25 .*qk_exponent=-1 in",
    ),
    "hf:gpt2": (GPT2, {"scale_attn_weights": False}, "'transformer.h.0.attn'.*has scaling 1 on"),
    "hf:gpt2 by layer": (
        GPT2,
        {"scale_attn_by_inverse_layer_idx": True},
        "'transformer.h.1.attn'.*has scaling 0.125 on.*asks for 0.25",
    ),
    "hf:cohere": (
        {**SIZES, **IDS, "logit_scale": 1.0},
        {"logit_scale": 0.0625},
        "CohereForCausalLM. has logit_scale 0.0625 in the forward pass, where the plan "
        "has 1: set it to that, by the config",
    ),
    "hf:whisper": (WHISPER, {"scale_embedding": True}, "has embed_scale 8 in the forward pass"),
    "hf:granite embeds": (GRANITE, {"embedding_multiplier": 12.0}, "has embedding_multiplier 12"),
    "hf:granite adds": (GRANITE, {"residual_multiplier": 0.22}, "has residual_multiplier 0.22"),
    "hf:granite divides": (
        GRANITE,
        {"logits_scaling": 8.0},
        "'config' .GraniteConfig. has logits_scaling 8 in",
    ),
}


QUARTER = (Factor("attention_scale", 0.25, 16),)  # the library's own, h^(-1/2)


def of_heads_of_16(model, rule=None, **applied):
    rule = rule or Everett("mup", 64, 64, qk_exponent=-0.5)
    return plan(model, rules_for(model), rule, lr=0.1, absorb_multipliers=True, applied=applied)


def test_the_head_dimension_of_a_stock_model_decides_what_attention_scale_it_may_apply():
    with torch.device("meta"):
        model = stock("hf:gpt2", **{**GPT2, "n_head": 2})
    for block in model.transformer.h:
        block.attn.scaling = 1 / 32
    options = {"lr": 1.0, "absorb_multipliers": True}
    build = lambda value, **more: plan(
        model, rules, Everett("mup", 64, 32), applied={"attention_scale": value}, **options, **more
    )
    rules = rules_for(model)
    assert build(1 / 32).forward[0].head_dim == 32
    with pytest.raises(PlanError, match="is 0.0625, but Everett has 0.03125 for head dimension 32"):
        build(1 / 16)
    with pytest.raises(PlanError, match="the model say 16, 32"):
        build(1 / 16, head_dim=16)


@pytest.mark.parametrize("case", APPLIES)
def test_a_factor_that_the_library_applies_and_the_plan_does_not_have_is_an_error(case):
    sizes, other, message = APPLIES[case]
    build = lambda more: stock(case.partition(" ")[0], **{**sizes, **more})
    with torch.device("meta"):
        assert of_heads_of_16(build({})).forward == QUARTER
        model = build(other)
    with pytest.raises(PlanError, match=message) as error:
        of_heads_of_16(model)
    assert "\n" not in str(error.value)
    way_out = "qk_exponent=(.*) in Everett and applied={'attention_scale': (.*)}"
    found = re.search(way_out, str(error.value))
    assert bool(found) == ("on query-key" in str(error.value))
    if found and "by layer" not in case:  # whose layers differ
        rule = Everett("mup", 64, 64, qk_exponent=float(found[1]))
        assert of_heads_of_16(model, rule, attention_scale=float(found[2])).forward


def test_what_is_said_to_be_applied_is_what_the_attentions_hold():
    with torch.device("meta"):
        model = stock("hf:llama", **SIZES)
    mup, same = Everett("mup", 64, 64), Everett("mup", 64, 64, qk_exponent=-0.5)
    with pytest.raises(PlanError, match="scaling 0.25 .*applied says 0.0625 .*qk_exponent=-0.5"):
        of_heads_of_16(model, mup, attention_scale=1 / 16)
    for scaling in (1 / 16, 16):  # a module may as well divide by its number
        for layer in model.model.layers:
            layer.self_attn.scaling = scaling
        assert of_heads_of_16(model, mup, attention_scale=1 / 16).forward[0].value == 1 / 16
    model.model.layers[1].self_attn.scaling = 0.25
    with pytest.raises(PlanError, match="'model.layers.1.self_attn'.*has scaling 0.25.*0.0625"):
        of_heads_of_16(model, mup, attention_scale=1 / 16)
    with pytest.raises(PlanError, match="'model.layers.0.self_attn'.*scaling 16 .*asks for 0.25"):
        of_heads_of_16(model, same)


def test_factors_under_the_librarys_own_names_are_compared_with_what_is_applied():
    """Granite multiplies its branches by one number and divides its logits by another."""
    with torch.device("meta"):
        model = stock("hf:granite", **GRANITE, residual_multiplier=0.5)
    depth = Depth(Everett("mup", 64, 64, qk_exponent=-0.5), depth=2, base_depth=0.5, alpha=0.5)
    rules = [rule for rule in rules_for(model) if rule.role is not Role.NORM_SCALE]
    rules += [Rule("model.norm.weight", Role.FINAL_NORM_SCALE)]
    rules += [Rule("*layernorm.weight", Role.NORM_SCALE)]
    options = {"lr": 0.1, "absorb_multipliers": True, "applied": {"residual_multiplier": 0.5}}
    found = plan(model, rules, depth, **options).forward
    assert {factor.name: factor.value for factor in found}["residual_multiplier"] == 0.5
    model.model.layers[1].residual_multiplier = 1.0
    with pytest.raises(PlanError, match="layers.1' .*residual_multiplier 1 .*the plan has 0.5"):
        plan(model, rules, depth, **options)
    tied = nn.ModuleDict({"query": nn.Linear(64, 64, False), "key": nn.Linear(64, 64, False)})
    tied.logits_scaling = 8.0
    rules = [Rule("query.weight", Role.QUERY), Rule("key.weight", Role.KEY)]
    with pytest.raises(PlanError, match="has logits_scaling 8"):
        plan(tied, rules, Dinan(64), lr=1.0)
    applied = {"logit_multiplier": 1 / 8}
    assert plan(tied, rules, Dinan(64, init="bart"), lr=1.0, applied=applied).forward


def test_gemmas_factor_on_embeddings_is_an_error_until_it_is_1():
    model = stock("hf:gemma2", **SIZES, query_pre_attn_scalar=16)
    with pytest.raises(PlanError, match="'model.embed_tokens' .*has embed_scale 8 in the forward"):
        of_heads_of_16(model)
    model.model.embed_tokens.embed_scale.fill_(1.0)
    assert of_heads_of_16(model).forward == QUARTER


def test_a_fused_attention_that_does_not_read_its_scale_is_an_error():
    with torch.device("meta"):
        model = timm.create_model("vit_small_patch16_224", embed_dim=64, depth=2, num_heads=4)
    for block in model.blocks:
        block.attn.scale, block.attn.fused_attn = 1 / 16, True
    rule = Everett("mup", 64, 64)
    with pytest.raises(PlanError, match="multiplies by 0.25 on query-key.*fused_attn to False"):
        of_heads_of_16(model, rule, attention_scale=1 / 16)
    for block in model.blocks:
        block.attn.fused_attn = False
    assert of_heads_of_16(model, rule, attention_scale=1 / 16).forward


def test_what_is_no_number_may_have_the_name_of_a_factor():
    with torch.device("meta"):
        model = stock("hf:llama", **SIZES)
    model.model.layers[0].self_attn.scale, model.model.residual_scale = True, "post"
    model.model.register_buffer("embed_scale", torch.ones(8))
    assert of_heads_of_16(model).forward == QUARTER


class Branch(Scaled):
    """A residual branch that is given its multiplier."""

    factors, residual_multiplier = ("residual_multiplier",), 1.0

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 8, bias=False)


def test_a_factor_of_ones_own_layers_may_stand_beside_them_or_under_another_name():
    """In the parent, and as the residual scale of blocks that say they apply it."""
    rule, rules = Depth(Everett("mup", 8, 8), depth=4, alpha=0.5), [Rule("*", Role.MLP_IN)]
    scaled = nn.Sequential(Branch())
    scaled.residual_multiplier = 0.5
    assert plan(scaled, rules, rule, lr=1.0).forward == (Factor("residual_multiplier", 0.5),)
    stock_like = nn.Sequential(nn.Linear(8, 8, bias=False))
    stock_like[0].residual_scale = 0.5
    applied = {"residual_multiplier": 0.5}
    assert plan(stock_like, rules, rule, lr=1.0, applied=applied).forward
    for model, more in ((scaled, {}), (stock_like, {"applied": applied})):
        model[0].residual_scale = 0.25
        with pytest.raises(PlanError, match="'0' .* has residual_scale 0.25 .*the plan has 0.5"):
            plan(model, rules, rule, lr=1.0, **more)


def test_an_attention_of_ones_own_may_be_fused_and_read_its_scale():
    class Attention(nn.Module):
        head_dim, scale, fused_attn = 16, 1 / 16, True

        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(64, 192, bias=False)

    model, rules = nn.Sequential(Attention()), [Rule("0.qkv.weight", Role.QKV)]
    options = {"lr": 0.1, "absorb_multipliers": True, "applied": {"attention_scale": 1 / 16}}
    assert plan(model, rules, Everett("mup", 64, 64), **options).forward
    model[0].scale = 0.1
    with pytest.raises(PlanError, match="has scale 0.1 .*another name if it is no such factor"):
        plan(model, rules, Everett("mup", 64, 64), **options)


def attention(kind, matrices, **numbers):
    """A module of any class name that holds numbers and makes queries."""
    module = type(kind, (nn.Module,), {})()
    for path in matrices.split():  # those with a dot stand in a module of their own
        *inner, key = path.split(".")
        owner = module
        for part in inner:
            if part not in owner._modules:
                owner.add_module(part, nn.Module())
            owner = owner._modules[part]
        setattr(owner, key, nn.Linear(64, 192 if key.endswith("qkv") else 64, bias=False))
    for key, value in numbers.items():
        setattr(module, key, value)
    return module


APART, LATENT = "q_proj k_proj v_proj o_proj", "wq_a wq_b wkv_b wo"
PLACES = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "to_qkv": "qkv"}
PLACES |= {"o_proj": "attention_output", "wo": "attention_output", "wq_b": "query"}
PLACES |= {"wq_a": "hidden", "wkv_b": "key_value", "mix": "hidden", "up": "mlp_in"}
IN_LISTS = " ".join(f"head.{i}.{key}" for i in "01" for key in APART.split()[:3])
IN_ONE = " ".join(f"in.{key}" for key in APART.split())
AS_32 = "has scale 1 .*asks for 0.176777"
NOT_KNOWN = "has scale 1 on query-key products, and its head dimension is not known: give plan"


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (attention("MHA", APART, scale=1.0, head_dim=32), AS_32),
        (attention("MLA", LATENT, softmax_scale=1.0, qk_head_dim=32), "softmax_scale 1 .*0.176777"),
        (attention("MHA", APART, scale=torch.tensor(1.0), head_dim=32), "scale 1 .*0.176777"),
        (attention("MHA", APART, scale=np.float32(1), head_dim=32), "scale 1 .*0.176777"),
        (attention("MHA", APART, scale=torch.ones(2), head_dim=32), "does not say what it mult"),
        (nn.ModuleDict({"mix": attention("Mix", APART, scale=0.5, head_dim=32)}), "0.5 .*0.176777"),
        (attention("MHA", "in.q_proj in.k_proj in.mix o_proj", scale=1.0, head_dim=32), AS_32),
        (attention("MLA", "in.wq_a in.wq_b in.wkv_b wo", scale=1.0, head_dim=32), AS_32),
        (attention("MHA", IN_ONE, scale=1.0, head_dim=32), AS_32),
        (attention("MHA", f"{IN_LISTS} mix", scale=1.0, head_dim=32), AS_32),
        (attention("MSA", "to_qkv", scale=1.0, head_dim=32), AS_32),
        (attention("MHA", APART, core=attention("Dot", "", scale=1.0, head_dim=32)), AS_32),
        (attention("Attention", APART, scale=1.0), NOT_KNOWN),
        (attention("WindowAttention", "to_qkv o_proj", scale=1.0, num_heads=2), NOT_KNOWN),
        (attention("MSA", "to_qkv o_proj", scale=1.0, num_heads=2), NOT_KNOWN),
    ],
)
def test_an_attention_is_known_by_what_makes_queries_and_its_number_is_never_passed_over(
    module, message
):
    names = [name for name, _ in module.named_parameters("0", True)]
    rules = [Rule(name, PLACES[name.split(".")[-2]]) for name in names]
    options = {"lr": 0.1, "absorb_multipliers": True}
    rule, model = Everett("mup", 64, 64, qk_exponent=-0.5), nn.Sequential(module)
    with pytest.raises(PlanError, match=message):
        plan(model, rules, rule, **options)
    (own,) = {m for m in module.modules() if {"scale", "softmax_scale"} & {*vars(m)}}
    setattr(own, "scale" if hasattr(own, "scale") else "softmax_scale", 32**-0.5)
    assert plan(model, rules, rule, head_dim=32, **options).forward[0].value == 32**-0.5
    with pytest.raises(PlanError, match="asks for 1 for head dimension 32"):
        plan(model, rules, Everett("mup", 64, 64, qk_exponent=0.0), head_dim=32, **options)


def test_of_a_module_known_by_its_queries_alone_nothing_is_assumed():
    """No convention stands in a plan as if it had been read; nor is what makes no queries one."""
    mix = attention("Mix", APART, head_dim=32)
    rules = [Rule(f"0.{key}.weight", role) for key, role in PLACES.items() if hasattr(mix, key)]
    options = {"lr": 0.1, "absorb_multipliers": True}
    rule = Everett("mup", 64, 64, qk_exponent=-0.5)
    assert plan(nn.Sequential(mix), rules, rule, **options).forward == ()
    beside = attention("Block", "attn.q_proj attn.k_proj attn.o_proj mlp.up mlp.mix", scale=0.5)
    rules = [Rule(f"*.{key}.weight", PLACES[key]) for key in "q_proj k_proj o_proj up mix".split()]
    twice = nn.ModuleDict({"blocks": nn.Sequential(beside, copy.deepcopy(beside))})
    twice.scale = 0.5
    assert plan(twice, rules, rule, **options).forward == ()
    gate = attention("ChannelAttention", "fc", scale=1.0)
    assert plan(nn.Sequential(gate), [Rule("0.fc.weight", "hidden")], rule, **options).forward == ()


T5_SIZES = {"vocab_size": 96, "d_model": 64, "d_kv": 16, "d_ff": 64, "num_heads": 2}
T5_SIZES |= {"num_layers": 2, "num_decoder_layers": 2, "decoder_start_token_id": 0}
T5_SIZES |= {"pad_token_id": 0}


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["t5", "mt5", "longt5", "switch_transformers"])
def test_t5s_and_its_likes_queries_start_as_the_librarys_do_since_attention_has_no_scale(kind):
    model = stock(f"hf:{kind}", **T5_SIZES)
    numbers = of_heads_of_16(model)
    stds = {row.role: [] for row in numbers.rows}
    for row in numbers.rows:
        stds[row.role].append(row.init_std)
    library = {name: p.std().item() for name, p in model.named_parameters()}
    assert stds["query"] == pytest.approx([1 / 32] * len(stds["query"]))
    assert stds["key"] == pytest.approx([1 / 8] * len(stds["key"]))
    for row in numbers.rows:
        if row.role in ("query", "key"):
            assert library[row.name] == pytest.approx(row.init_std, rel=0.1)


def test_a_t5_that_was_given_a_scale_has_queries_like_others():
    model = stock("hf:t5", **T5_SIZES)
    mup = Everett("mup", 64, 64)
    with pytest.raises(PlanError, match="T5Attention. has scaling 1 .*applied says 0.0625"):
        of_heads_of_16(model, mup, attention_scale=1 / 16)
    for scale, rule, applied in ((1 / 16, mup, {"attention_scale": 1 / 16}), (1 / 4, None, {})):
        for module in model.modules():
            if type(module).__name__ == "T5Attention":
                module.scaling = scale
        rows = of_heads_of_16(model, rule, **applied).rows
        assert {row.init_std for row in rows if row.role == "query"} == {1 / 8}


@pytest.mark.parametrize("kind", ["t5", "longt5"])
def test_a_t5_that_scales_its_logits_as_a_tied_one_is_an_error_until_it_does_not(kind):
    with torch.device("meta"):
        model = stock(f"hf:{kind}", **T5_SIZES)
    assert of_heads_of_16(model).rows
    model.config.scale_decoder_outputs = True
    with pytest.raises(PlanError, match="has scale_decoder_outputs 0.125 in the forward pass"):
        of_heads_of_16(model)
