"""Shipped rules on models that people have, built small from configs, without a download."""

import pytest
import timm
import torch
import transformers
from torch import nn

from param_groups import Dinan, EpsFollows, Everett, PlanError, Role, Rule, fans_of, plan, rules_for
from param_groups.roles import assign, present
from param_groups.stock import hugging_face
from param_groups.stock.rules import CATALOGUE, LORA_RULES, fitting
from tests.param_groups.stock_lists import LISTS

BERT = {"vocab_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
UNTIED = {"tie_word_embeddings": False}
LLAMA = {**BERT, **UNTIED, "num_key_value_heads": 1, "head_dim": 16}
GPT2 = {**UNTIED, "vocab_size": 96, "n_layer": 2, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
T5 = {**UNTIED, "vocab_size": 96, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2}
VIT = {**BERT, "image_size": 32, "patch_size": 8, "num_labels": 5}
WHISPER = {**UNTIED, "vocab_size": 96, "num_mel_bins": 8, "bos_token_id": 0, "eos_token_id": 1}
WHISPER |= {"max_source_positions": 16, "max_target_positions": 16, "pad_token_id": 0}
for end in ("encoder", "decoder"):
    WHISPER |= {f"{end}_layers": 2, f"{end}_attention_heads": 2, f"{end}_ffn_dim": 64}
TEXT, IMAGE = torch.arange(8)[None], torch.randn(1, 3, 32, 32)


def hf(kind, **settings):
    model = getattr(transformers, kind)
    return model(model.config_class(**settings))


def t5(width, **more):
    """With an lm_head of its own, which the config does not give it."""
    more |= {"d_model": width, "decoder_start_token_id": 0}
    model = hf("T5ForConditionalGeneration", **T5, **more)
    model.lm_head.weight = nn.Parameter(torch.empty(96, width))
    return model


def whisper(width):
    more = {"d_model": width, "decoder_start_token_id": 0}
    return hf("WhisperForConditionalGeneration", **WHISPER, **more)


def vit(name, width, **more):
    return timm.create_model(name, embed_dim=width, depth=2, num_heads=2, num_classes=5, **more)


def stages(name, n):
    sizes = {"depths": (1, 1, 1, 1), "dims": (n // 4, n // 2, n, 2 * n), "num_classes": 5}
    return timm.create_model(name, **sizes)


def swin(n):
    sizes = {"img_size": 56, "embed_dim": n // 2, "depths": (1, 1), "num_heads": (1, 2)}
    return timm.create_model("swin_tiny_patch4_window7_224", num_classes=5, **sizes)


def llama(name, width, **more):
    return hf(f"{name}ForCausalLM", hidden_size=width, **LLAMA, **more)


def bert(kind, width, **more):
    return hf(kind, hidden_size=width, **BERT, **more)


# name: (rules, model at a width)
MODELS = {
    "gpt2": ("GPT2", lambda n: hf("GPT2LMHeadModel", n_embd=n, **GPT2)),
    "llama": ("LLAMA", lambda n: llama("Llama", n)),
    "mistral": ("LLAMA", lambda n: llama("Mistral", n)),
    "qwen2": ("LLAMA", lambda n: llama("Qwen2", n)),
    "qwen3": ("LLAMA", lambda n: llama("Qwen3", n)),
    "gemma2": ("GEMMA", lambda n: llama("Gemma2", n, query_pre_attn_scalar=16)),
    "mixtral": ("LLAMA", lambda n: llama("Mixtral", n, num_local_experts=2)),
    "gpt_neox": ("GPT_NEOX", lambda n: bert("GPTNeoXForCausalLM", n)),
    "bert": ("BERT", lambda n: bert("BertForMaskedLM", n, **UNTIED)),
    "bert, classes": ("BERT", lambda n: bert("BertForSequenceClassification", n)),
    "roberta": ("BERT", lambda n: bert("RobertaForMaskedLM", n, **UNTIED)),
    "t5": ("T5", t5),
    "t5, gated": ("T5", lambda n: t5(n, feed_forward_proj="gated-gelu")),
    "vit": ("HF_VIT", lambda n: hf("ViTForImageClassification", hidden_size=n, **VIT)),
    "whisper": ("WHISPER", whisper),
    "timm vit": ("TIMM_VIT", lambda n: vit("vit_small_patch16_224", n, img_size=32)),
    "timm deit3": ("TIMM_VIT", lambda n: vit("deit3_small_patch16_224", n, img_size=32)),
    "timm dinov2": ("TIMM_VIT", lambda n: vit("vit_small_patch14_reg4_dinov2", n, img_size=28)),
    "timm eva02": ("TIMM_VIT", lambda n: vit("eva02_tiny_patch14_224", n, img_size=28)),
    "timm siglip": ("TIMM_VIT", lambda n: vit("vit_base_patch16_siglip_224", n, img_size=32)),
    "timm convnext": ("CONVNEXT", lambda n: stages("convnext_atto", n)),
    "timm convnextv2": ("CONVNEXT", lambda n: stages("convnextv2_atto", n)),
    "timm swin": ("SWIN", swin),
    "nn.Transformer": ("TORCH_DECODER", lambda n: nn.Transformer(n, 2, 1, 1, 64)),
    "nn.MultiheadAttention": ("TORCH_DECODER", lambda n: nn.MultiheadAttention(n, 2)),
}


def on_meta(build, width):
    with torch.device("meta"):
        return build(width)


@pytest.mark.parametrize("case", MODELS)
def test_its_own_rules_fit_and_twice_the_base_models_width_halves_what_sums_over_it(case):
    """Adam: matrices learn half as fast; at the base itself every rate is the global one."""
    name, build = MODELS[case]
    small, wide = on_meta(build, 32), on_meta(build, 64)
    if "timm" in case or "nn." in case:
        assert [*fitting(small)] == [f"{name}_RULES"]
    rules = rules_for(build(32) if case == "timm convnext" else small)  # it reads the LayerScale
    for parameterization in ("standard", "mup"):
        rule = Everett(parameterization, 32, 32, optimizer="adamw", qk_exponent=-0.5)
        at_base = plan(small, rules, rule, lr=1.0, base=small)
        assert {row.lr for row in at_base.rows} == {1.0}
        numbers = plan(wide, rules, rule, lr=1.0, base=fans_of(small, rules))
        absorbed = plan(wide, rules, rule, lr=1.0, base=small, absorb_multipliers=True)
        for row in numbers.rows:
            before, effective = at_base[row.name], absorbed[row.name].lr
            at_small = before.lr * before.multiplier
            grew = row.fan_in / before.fan_in
            falls = row.role in ("router", "readout") or grew != 1
            assert effective / at_small == pytest.approx(1 / grew if falls else 1), row.name


def test_a_model_of_one_width_gets_the_same_plan_from_a_base_model():
    build = MODELS["gpt2"][1]
    small, wide = on_meta(build, 32), on_meta(build, 64)
    rules = rules_for(wide)
    settings = {"qk_exponent": -0.5}
    by_fans = plan(wide, rules, Everett("mup", 32, 32, **settings), lr=0.1, base=small)
    by_width = plan(wide, rules, Everett("mup", 64, 32, **settings), lr=0.1)
    assert by_fans.rows == by_width.rows


def test_widths_that_scale_apart_are_refused_where_gradients_count():
    build = lambda mlp: lambda n: nn.TransformerEncoderLayer(n, 2, mlp)
    rules = rules_for(on_meta(build(64), 32))
    base, wide = on_meta(build(64), 32), on_meta(build(64), 64)
    rule = lambda name: Everett("standard", 32, 32, optimizer=name)
    assert plan(wide, rules, rule("adam"), lr=0.1, base=base)["linear2.weight"].lr == 0.1
    with pytest.raises(PlanError, match="2 times as wide.*'linear2.weight' 1 times.*use adam"):
        plan(wide, rules, rule("sgd"), lr=0.1, base=base)


@pytest.mark.parametrize("settings", [{"optimizer": "sgd"}, {"around": EpsFollows}])
def test_tensors_that_more_heads_come_to_share_are_refused_where_gradients_count(settings):
    """Under SGD the first steps of keys and norms of one head were measured to go as n^(1/2)."""

    def model(kind, heads, key_heads, head_dim=16):
        n = heads * head_dim
        own = {"num_attention_heads": heads, "num_key_value_heads": key_heads}
        own |= {"intermediate_size": 2 * n, "head_dim": head_dim}
        build = lambda n: hf(f"{kind}ForCausalLM", hidden_size=n, **LLAMA | own)
        return on_meta(build, n)

    def planned(wide, base=None, around=lambda rule: rule, **more):
        rule = around(Everett("mup", 32 if base else 64, 32, qk_exponent=-0.5, **more))
        return plan(wide, rules_for(wide), rule, lr=0.1, base=base).rows

    with pytest.raises(PlanError, match="q_norm.weight' .*has 16 outputs, fewer than the width 64"):
        planned(model("Qwen3", 4, 4), **settings)
    assert planned(model("Llama", 4, 1), **settings)  # as many heads share a key at every width
    assert planned(model("Llama", 4, 1)) and planned(model("Llama", 4, 4), **settings)
    for wide, base, tensor in (
        (model("Qwen3", 4, 4), model("Qwen3", 2, 2), "k_norm.weight"),
        (model("Qwen2", 4, 1), model("Qwen2", 2, 1), "v_proj.bias"),
        (model("Llama", 4, 1), model("Llama", 2, 1), "v_proj.weight"),
    ):
        first = tensor if "norm" in tensor else "k_proj.weight"
        with pytest.raises(PlanError, match=f"where .*{first}'( is| .key. has)? 1 times"):
            planned(wide, base, **settings)
        assert planned(wide, base)  # Adam without an epsilon per layer sees no gradient's size
    assert planned(model("Qwen3", 2, 2, 32), model("Qwen3", 2, 2), **settings)
    assert planned(model("Llama", 4, 2), model("Llama", 2, 1), **settings)


def test_a_base_needs_the_same_tensors_and_the_base_width():
    build = MODELS["gpt2"][1]
    model = on_meta(build, 64)
    rules = rules_for(model)
    with pytest.raises(PlanError, match="its base width as width, too"):
        plan(model, rules, Everett("standard", 64, 32), lr=0.1, base=model)
    with pytest.raises(PlanError, match="Dinan is for models of one width"):
        plan(model, rules, Dinan(32), lr=0.1, base=model)
    with pytest.raises(PlanError, match="base model is another: 'lm_head.weight'"):
        fans = {k: v for k, v in fans_of(model, rules).items() if k != "lm_head.weight"}
        plan(model, rules, Everett("standard", 32, 32), lr=0.1, base=fans)


@pytest.mark.parametrize(
    ("case", "batch"),
    [
        ("gpt2", TEXT),
        ("mixtral", TEXT),
        ("bert", TEXT),
        ("timm deit3", IMAGE),
        ("timm convnext", IMAGE),
        ("timm swin", torch.randn(1, 3, 56, 56)),
    ],
)
def test_planned_models_train(case, batch):
    model = MODELS[case][1](32)
    rules = rules_for(model)
    numbers = plan(model, rules, Everett("standard", 32, 32), lr=1e-3, base=model)
    numbers.initialise(model, seed=0)
    output = model(batch)
    output = output if isinstance(output, torch.Tensor) else output.logits
    assert output.isfinite().all()
    output.square().mean().backward()
    torch.optim.AdamW(numbers.groups(model)).step()


def test_gemma_is_known_by_its_norms_in_a_class_of_another_module():
    class Wrapped(transformers.Gemma2ForCausalLM):
        pass

    with torch.device("meta"):
        model = Wrapped(transformers.Gemma2Config(hidden_size=32, **LLAMA))
    norms = {(rule.role, rule.scale) for rule in rules_for(model) if "norm" in rule.pattern}
    assert norms == {(Role.NORM_SCALE, 0.0), (Role.FINAL_NORM_SCALE, 0.0)}


@pytest.mark.parametrize(
    ("case", "start"), [("timm deit3", 1e-6), ("timm dinov2", 1e-5), ("timm convnext", 1e-6)]
)
def test_a_layer_scale_starts_where_the_library_starts_it(case, start):
    model = MODELS[case][1](32)
    own = {name: p.clone() for name, p in model.named_parameters() if name.endswith("gamma")}
    numbers = plan(model, rules_for(model), Everett("standard", 32, 32), lr=0.1, base=model)
    numbers.initialise(model, seed=0)
    assert own
    for name, value in own.items():
        assert model.get_parameter(name).tolist() == pytest.approx(value.tolist())
        assert numbers[name].init_mean == pytest.approx(start)


def convnext(**more):
    return timm.create_model("convnext_atto", depths=(1, 1, 1, 1), dims=(8, 16, 32, 64), **more)


@pytest.mark.parametrize("start", [1.0, 1e-6, 0.1])
def test_a_layer_scale_whose_module_does_not_say_starts_at_what_fills_it(start):
    model = convnext(ls_init_value=start)
    (rule,) = (rule for rule in rules_for(model) if rule.role is Role.LAYER_SCALE)
    assert rule.scale == start
    rules = rules_for(model)
    plan(model, rules, Everett("standard", 8, 8), lr=0.1, base=model).initialise(model, seed=0)
    assert torch.equal(model.stages[3].blocks[0].gamma, torch.full((64,), start))


def test_a_layer_scale_whose_start_cannot_be_read_is_an_error_with_ways_out():
    trained, values = convnext(), convnext(ls_init_value=1.0)
    with torch.no_grad():
        trained.stages[2].blocks[0].gamma[3] *= 2
        values.stages[1].blocks[0].gamma.fill_(0.5)  # each holds one number
    with torch.device("meta"):
        meta = convnext()
    for model, why in (
        (trained, "its likes hold several"),
        (values, "its likes hold several"),
        (meta, "is on the meta device"),
    ):
        message = f"'stages.0.blocks.0.gamma' .*{why}.*present.CONVNEXT_RULES"
        with pytest.raises(PlanError, match=message) as error:
            rules_for(model)
        assert "\n" not in str(error.value)
        bare = present(CATALOGUE["CONVNEXT_RULES"], model)
        assert plan(model, bare, Everett("standard", 8, 8), lr=0.1, base=model).rows


def test_a_rules_scale_is_where_a_layer_scale_starts():
    model = MODELS["timm deit3"][1](32)
    rules = [rule for rule in rules_for(model) if rule.role is not Role.LAYER_SCALE]
    rules.append(Rule("blocks.*.gamma", Role.LAYER_SCALE, scale=1e-6))
    numbers = plan(model, rules, Everett("standard", 32, 32), lr=0.1)
    numbers.initialise(model, seed=0)
    assert model.blocks[0].ls1.gamma.unique().item() == pytest.approx(1e-6)


# LoRA


class WithLora(nn.Linear):
    """A frozen matrix and its two factors, as peft has them."""

    def __init__(self, layer, scaling=1.0):
        super().__init__(layer.in_features, layer.out_features, bias=False)
        self.weight = layer.weight.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(layer.in_features, 4, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(4, layer.out_features, bias=False)})
        self.scaling = {"default": scaling}

    def forward(self, x):
        low = self.lora_A["default"](x)
        return super().forward(x) + self.scaling["default"] * self.lora_B["default"](low)


def test_lora_trains_its_factors_and_keeps_the_frozen_weights():
    model = MODELS["llama"][1](64)
    rules = [*rules_for(model), *LORA_RULES]
    model.requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj = WithLora(layer.self_attn.q_proj)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    numbers = plan(model, rules, Everett("standard", 64, 32), lr=1.0)
    numbers.initialise(model, seed=0)
    for name, value in model.state_dict().items():
        if "lora" not in name:
            assert torch.equal(value, before[name]), name
    factors = model.model.layers[0].self_attn.q_proj
    assert not factors.lora_B["default"].weight.any() and factors.lora_A["default"].weight.all()
    assert {group["lr"] for group in numbers.groups(model)} == {0.5, 1.0}  # A 1/n, B constant
    with pytest.raises(PlanError, match="no power of the width"):
        plan(model, rules, Everett("standard", 64, 32, optimizer="sgd"), lr=1.0)


def test_the_scaling_of_lora_is_a_factor_that_multiplies_the_rate_of_b():
    """Under Adam a factor s trains as s times B's rate and epsilon over s without it."""
    rules = [*LORA_RULES, Rule("layer.weight", "hidden"), Rule("readout.weight", "readout")]

    def trained(scaling, said=None):
        torch.manual_seed(0)
        model = nn.Sequential()
        model.layer = WithLora(nn.Linear(16, 16, bias=False), scaling)
        model.readout = nn.Linear(16, 3, bias=False)
        mup = Everett("mup", 16, 16)
        numbers = plan(model, rules, mup, lr=0.01, applied=said, absorb_multipliers=True)
        numbers.initialise(model, seed=0)
        groups = numbers.groups(model)
        for group in groups:
            if said is None and "layer.lora_B.default.weight" in group["param_names"]:
                group["lr"], group["eps"] = 8 * group["lr"], group["eps"] / 8
        optimizer, x = torch.optim.AdamW(groups), torch.randn(5, 16)
        for _ in range(5):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        return model(x), numbers

    outputs, numbers = trained(8.0, {"lora_scaling": 8.0})
    torch.testing.assert_close(outputs, trained(1.0)[0])
    assert [(factor.name, factor.value) for factor in numbers.forward] == [("lora_scaling", 8.0)]
    for words, has in ((None, 1), ({"lora_scaling": 2.0}, 2)):
        with pytest.raises(
            PlanError, match=rf"\] 8 in the .* plan has {has}: .* as 8 times the rate"
        ):
            trained(8.0, words)


# Tied embeddings, and models without rules


def test_a_tied_model_is_refused_with_the_way_out_at_its_own_width():
    tied = lambda n: hf("GPT2LMHeadModel", **GPT2 | {"n_embd": n, "tie_word_embeddings": True})
    model, base = on_meta(tied, 64), on_meta(tied, 16)
    with pytest.raises(PlanError, match="tied to lm_head.weight; name it once.*tie_word_emb"):
        assign(model, LISTS["GPT2"])
    rules = rules_for(model)
    assert assign(model, rules)[0].tied_to == ("lm_head.weight",)
    with pytest.raises(PlanError, match="tie_word_embeddings=False"):
        plan(model, rules, Everett("mup", 64, 16, qk_exponent=-0.5), lr=0.1)
    with pytest.raises(PlanError, match="token_embedding lr 1, .*readout lr 0.25, .*untie"):
        plan(model, rules, Everett("standard", 16, 16), lr=1.0, base=base)


@pytest.mark.parametrize(
    ("name", "fit"), [("odd", "none"), ("norm", "TORCH_DECODER_RULES and TIMM_VIT_RULES and .*")]
)
def test_a_model_that_no_list_fits_or_several_do_is_sent_to_a_trace(name, fit):
    with pytest.raises(PlanError, match=f"rules {fit} fit ModuleDict; traced.build, run..rules"):
        rules_for(nn.ModuleDict({name: nn.LayerNorm(8, bias=False)}))


# Hugging Face's models by trace


def test_a_small_models_sizes_say_nothing_of_the_model_and_options_do():
    """Bias, gates and shared keys are the config's; one trace serves every width and depth."""
    hugging_face._TRACED.clear()
    sizes = {"num_hidden_layers": 3, "intermediate_size": 96, "attention_bias": True}
    model = on_meta(lambda n: hf("LlamaForCausalLM", hidden_size=n, **LLAMA | sizes), 48)
    roles = {one.name: str(one.role) for one in assign(model, rules_for(model))}
    assert roles["model.layers.2.self_attn.q_proj.bias"] == "hidden_bias"
    assert roles["model.layers.2.mlp.gate_proj.weight"] == "mlp_in"
    rules_for(on_meta(lambda n: hf("LlamaForCausalLM", hidden_size=n, **LLAMA | sizes), 96))
    assert len(hugging_face._TRACED) == 1
    rules_for(on_meta(lambda n: llama("Llama", n), 48))
    assert len(hugging_face._TRACED) == 2


def test_a_model_with_other_tensors_than_its_config_says_is_an_error_that_names_one():
    model = llama("Llama", 32)
    model.model.layers[0].extra = nn.Linear(32, 32, bias=False)
    with pytest.raises(PlanError, match="no rule names 'model.layers.0.extra.weight'"):
        rules_for(model)


def test_a_model_that_cannot_be_built_small_is_sent_to_a_trace():
    class Odd(transformers.LlamaForCausalLM):
        def __init__(self, config):
            if config.hidden_size != 32:
                raise ValueError("this class has one width")
            super().__init__(config)

    model = Odd(transformers.LlamaConfig(hidden_size=32, **LLAMA))
    with pytest.raises(PlanError, match="small Odd cannot be traced: this class.*traced.build"):
        rules_for(model)


@pytest.mark.parametrize("kind", ["BertForMaskedLM", "RobertaForMaskedLM"])
def test_rules_of_two_small_blocks_hold_for_many(kind):
    """Here one name of a block is the end of another's, which a * would take, too."""
    model = on_meta(
        lambda n: hf(kind, hidden_size=n, **BERT | UNTIED | {"num_hidden_layers": 12}), 48
    )
    rules = rules_for(model)
    assert len(assign(model, rules)) == len([*model.parameters()]) > 4 * len(rules)
    assert "#" in "".join(rule.pattern for rule in rules)
