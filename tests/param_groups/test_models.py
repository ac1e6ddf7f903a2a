"""Plans of models that people have at a base model's sizes, with LoRA, and tied."""

import pytest
import torch
import transformers
from torch import nn

from param_groups import EpsFollows, Everett, PlanError, Rule, plan, rules_for
from param_groups.roles import assign
from param_groups.stock.rules import LORA_RULES

LLAMA = {"vocab_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 16}
LLAMA |= {"intermediate_size": 64, "num_key_value_heads": 1, "tie_word_embeddings": False}
GPT2 = {"vocab_size": 96, "n_layer": 2, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}


def hf(kind, **settings):
    model = getattr(transformers, kind)
    return model(model.config_class(**settings))


def gpt2(width, tied=False):
    return hf("GPT2LMHeadModel", n_embd=width, tie_word_embeddings=tied, **GPT2)


def on_meta(build, width):
    with torch.device("meta"):
        return build(width)


def test_a_model_of_one_width_gets_the_same_plan_from_a_base_model():
    small, wide = on_meta(gpt2, 32), on_meta(gpt2, 64)
    rules = rules_for(wide)
    settings = {"qk_exponent": -0.5}
    by_fans = plan(wide, rules, Everett("mup", 32, 32, **settings), lr=0.1, base=small)
    by_width = plan(wide, rules, Everett("mup", 64, 32, **settings), lr=0.1)
    assert by_fans.rows == by_width.rows


def test_widths_that_scale_apart_are_refused_where_gradients_count():
    build = lambda n: nn.Sequential(nn.Linear(n, 64, bias=False), nn.Linear(64, n, bias=False))
    rules = [Rule("0.weight", "hidden"), Rule("1.weight", "hidden")]
    base, wide = on_meta(build, 32), on_meta(build, 64)
    rule = lambda name: Everett("standard", 32, 32, optimizer=name)
    assert plan(wide, rules, rule("adam"), lr=0.1, base=base)["1.weight"].lr == 0.1
    with pytest.raises(PlanError, match="2 times as wide.*'1.weight' 1 times.*use adam"):
        plan(wide, rules, rule("sgd"), lr=0.1, base=base)


@pytest.mark.parametrize("shape", [(), (1,), (2,)])
def test_a_gain_that_all_channels_share_has_one_rate_where_gradients_do_not_count(shape):
    """Its gradient adds up over them, so that under SGD there is no power."""
    model = nn.ParameterDict({"gain": nn.Parameter(torch.ones(shape))})
    gain = [Rule("gain", "layer_scale")]
    planned = lambda kind, n: plan(model, gain, Everett("standard", n, 32, kind), lr=0.1)
    assert len({planned("adam", n)["gain"].lr for n in (32, 64)}) == 1
    planned("adam", 64).initialise(model, seed=0)
    with pytest.raises(PlanError, match="'gain' .*fewer than the width 64.*use adam"):
        planned("sgd", 64)


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
    model = hf("LlamaForCausalLM", hidden_size=64, **LLAMA)
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
        said = rf"\] 8 in the .* plan has {has}: .* as 8 times the rate"
        with pytest.raises(PlanError, match=said):
            trained(8.0, words)


# Tied embeddings, and models without rules


def test_a_tied_model_is_refused_with_the_way_out_at_its_own_width():
    tied = lambda n: gpt2(n, tied=True)
    model, base = on_meta(tied, 64), on_meta(tied, 16)
    rules = rules_for(model)
    both = [Rule("transformer.wte.weight", "token_embedding"), Rule("lm_head.weight", "readout")]
    with pytest.raises(PlanError, match="tied to lm_head.weight; name it once.*tie_word_emb"):
        assign(model, [*rules[1:], *both])
    assert assign(model, rules)[0].tied_to == ("lm_head.weight",)
    with pytest.raises(PlanError, match="tie_word_embeddings=False"):
        plan(model, rules, Everett("mup", 64, 16, qk_exponent=-0.5), lr=0.1)
    with pytest.raises(PlanError, match="token_embedding lr 1, .*readout lr 0.25, .*Tied"):
        plan(model, rules, Everett("standard", 16, 16), lr=1.0, base=base)
