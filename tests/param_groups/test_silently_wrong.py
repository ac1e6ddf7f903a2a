"""What was once accepted and wrong: each of these models or arguments is refused, and says why."""

import json
import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from param_groups import (
    Bordelon,
    Depth,
    Dinan,
    Everett,
    Layout,
    Numbers,
    PlanError,
    Prescription,
    Role,
    Rule,
    Tensor,
    guard,
    plan,
    rules_for,
)
from param_groups.plan import dumps
from param_groups.stock.rules import stock
from tests.param_groups.wrapped import ruled


def linear(*layers, role=Role.MLP_IN, layout=None, **options):
    """The plan of layers of width 16, each a hidden matrix."""
    model = nn.Sequential(*layers)
    rules = [Rule("*.weight", role, layout), Rule("*.bias", Role.HIDDEN_BIAS)]
    used = [rule for rule in rules if any(map(rule.matches, dict(model.named_parameters())))]
    return model, plan(model, used, Everett("mup", 16, 16), lr=0.1, **options)


class NanoGPT(nn.Module):
    """The tensors of Karpathy's nanoGPT: nn.Linear under GPT-2's names."""

    def __init__(self, width=32, vocab=40, bias=True):
        super().__init__()
        block = nn.Module()
        block.ln_1, block.ln_2 = nn.LayerNorm(width, bias=bias), nn.LayerNorm(width, bias=bias)
        block.attn, block.mlp = nn.Module(), nn.Module()
        block.attn.c_attn = nn.Linear(width, 3 * width, bias=bias)
        block.attn.c_proj = nn.Linear(width, width, bias=bias)
        block.mlp.c_fc = nn.Linear(width, 4 * width, bias=bias)
        block.mlp.c_proj = nn.Linear(4 * width, width, bias=bias)
        parts = {"wte": nn.Embedding(vocab, width), "wpe": nn.Embedding(8, width)}
        parts |= {"h": nn.ModuleList([block]), "ln_f": nn.LayerNorm(width, bias=bias)}
        self.transformer = nn.ModuleDict(parts)
        self.lm_head = nn.Linear(width, vocab, bias=False)


NANOGPT = ruled("""
*.wte.weight token_embedding, *.wpe.weight position_embedding, *.c_attn.weight qkv,
transformer.h.*.ln_?.weight norm_scale, transformer.h.*.ln_?.bias norm_bias, *.c_*.bias hidden_bias,
transformer.ln_f.weight final_norm_scale, *.attn.c_proj.weight attention_output,
*.c_fc.weight mlp_in, *.mlp.c_proj.weight mlp_out, lm_head.weight readout""")


def nanogpt_rules(model):
    names = dict(model.named_parameters())
    rules = [*NANOGPT, Rule("transformer.ln_f.bias", "norm_bias", trunk=True)]
    return [rule for rule in rules if any(map(rule.matches, names))]


@pytest.mark.parametrize("bias", [True, False])
def test_nanogpt_is_no_hugging_face_gpt2(bias):
    """Its matrices are (out, in); read transposed, initial values are off by up to a factor 2."""
    model = NanoGPT(bias=bias)
    rule = Everett("mup", 32, 32, qk_exponent=-0.5)
    numbers = plan(model, nanogpt_rules(model), rule, lr=0.1, absorb_multipliers=True)
    stds = {"attn.c_attn": 32**-0.5, "mlp.c_fc": 32**-0.5, "mlp.c_proj": 128**-0.5}
    for name, std in stds.items():
        assert numbers[f"transformer.h.0.{name}.weight"].init_std == pytest.approx(std)
    assert numbers["transformer.h.0.mlp.c_fc.weight"].fan_in == 32


def test_layouts_that_do_not_matter_pass():
    linear(nn.ConvTranspose2d(16, 16, 2), role=Role.HIDDEN)
    linear(transformers.pytorch_utils.Conv1D(16, 16), layout=Layout.TRANSPOSED)


def neo(**options):
    sizes = {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "max_position_embeddings": 8}
    kind = {"attention_types": [[["global"], 2]], "vocab_size": 40, "tie_word_embeddings": False}
    config = transformers.GPTNeoConfig(**sizes, **kind, **options)
    return transformers.GPTNeoForCausalLM(config)


def planned(model, **options):
    rule = Everett("mup", 32, 32, qk_exponent=options.pop("qk_exponent", -0.5))
    return plan(model, rules_for(model), rule, lr=0.1, absorb_multipliers=True, **options)


def test_gpt_neos_attention_multiplies_by_nothing():
    with pytest.raises(PlanError, match=r"GPTNeoSelf.* multiplies by 1 on query-key .*applied"):
        planned(neo())
    assert planned(neo(), qk_exponent=0.0).forward[0].value == 1.0


def test_mpts_softmax_scale_is_read():
    config = {"d_model": 32, "n_heads": 2, "n_layers": 1, "max_seq_len": 8, "vocab_size": 40}
    for scale, right in ((1.0, False), (0.25, True)):
        settings = transformers.MptConfig(
            **config, attn_config={"softmax_scale": scale}, tie_word_embeddings=False
        )
        model = transformers.MptForCausalLM(settings)
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
        if right:
            assert planned(model).forward[0].value == 0.25
        else:
            with pytest.raises(PlanError, match="has softmax_scale 1 on query-key products"):
                planned(model)


def test_an_attention_of_a_library_that_does_not_say_its_scale(monkeypatch):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    model = stock("hf:llama", vocab_size=40, **sizes, **heads)
    del model.model.layers[0].self_attn.scaling
    with pytest.raises(PlanError, match="does not say what it multiplies query-key .*applied="):
        planned(model)
    assert planned(model, applied={"attention_scale": 0.25}).forward[0].head_dim == 16


def test_tensors_that_are_beside_a_weight_pass():
    layer = nn.Linear(16, 16, bias=False)
    layer.register_buffer("mask", torch.ones(16, 16))
    layer.weights_seen, layer.scale = torch.ones(16, 16), torch.ones(())
    linear(layer)


def empty(model):
    with torch.no_grad():
        model[0].weight.copy_(model[0].to_empty(device="cpu").weight.fill_(1 / 4))
        model[1].to_empty(device="cpu").weight.fill_(math.nan)  # whatever was in memory


def assign_data(model):
    model[1].weight.data = torch.randn(16, 16)


CHANGES = {
    "another layer": lambda model: setattr(model, "1", nn.Linear(16, 16, bias=False)),
    "redrawn": lambda model: nn.init.kaiming_uniform_(model[1].weight, a=math.sqrt(5)),
    "empty": empty,
    "data written": lambda model: model[1].weight.data.normal_(0, 3.0),  # torch counts no version
    "data scaled": lambda model: model[1].weight.data.mul_(2),
    "data assigned": assign_data,
}


@pytest.mark.parametrize("change", CHANGES)
def test_values_that_are_not_the_plans_any_more(change):
    model, numbers = linear(nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False))
    numbers.initialise(model, seed=0)
    numbers.groups(model)
    CHANGES[change](model)
    with pytest.raises(PlanError, match="'1.weight' .*changed since .*initialise.*apply_multip"):
        numbers.groups(model)
    numbers.apply_multipliers(model)
    numbers.groups(model)


def test_what_a_model_may_do_after_initialise():
    """Move, change its precision, set one row to zero, be trained a little."""
    model, numbers = linear(nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False))
    numbers.initialise(model, seed=0)
    with torch.no_grad():
        model[0].weight[3] = 0
    numbers.groups(model.double())
    optimizer = torch.optim.AdamW(numbers.groups(model))
    model(torch.ones(2, 16, dtype=torch.float64)).sum().backward()
    optimizer.param_groups[0]["lr"] = 1e-3
    optimizer.step()
    numbers.groups(model)


def test_a_bias_that_starts_at_zero_may_be_trained_a_little():
    model = nn.Linear(8, 8)
    rules = [Rule("weight", Role.HIDDEN, trunk=False), Rule("bias", Role.HIDDEN_BIAS)]
    numbers = plan(model, rules, Everett("standard", 8, 4), lr=0.01)
    numbers.initialise(model, seed=0)
    optimizer = torch.optim.AdamW(numbers.groups(model))
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    assert numbers.groups(model)


RULES = [Rule("weight", Role.HIDDEN, trunk=False)]
RULE = Everett("standard", 8, 4)


def made(model=None, rules=RULES, prescription=RULE, **options):
    model = nn.Linear(8, 8, bias=False) if model is None else model
    return plan(model, rules, prescription, **{"lr": 0.1, **options})


@pytest.mark.parametrize("half", [np.float32(0.5), np.float64(0.5), Fraction(1, 2), 0.5])
def test_numbers_of_other_libraries_are_as_good_as_pythons(half):
    """And none of them is left in what is saved as JSON."""
    eight = np.int64(8)
    depth = lambda width, deep, alpha: Depth(Everett("mup", width, 4), deep, alpha=alpha)
    applied = {"residual_multiplier": 0.5}
    own = made(prescription=depth(eight, np.int32(4), half), lr=half, applied=applied)
    other = made(prescription=depth(8, 4, 0.5), lr=0.5, applied=applied)
    assert json.loads(json.dumps(own.prescription))["width"] == 8
    assert own.rows == other.rows
    if not isinstance(half, Fraction):
        assert dumps(own) == dumps(other)
    query = Tensor("query", 16, 16)
    assert Bordelon(eight, np.int64(2), 4)(query) == Bordelon(8, 2, 4)(query)
    assert Dinan(eight).describe() == Dinan(8).describe()


class Bare(Prescription):
    """The least that a prescription of one's own can be; no dataclass."""

    width, optimizer = 8, "adamw"

    def __call__(self, tensor):
        return Numbers(0.5, multiplier=2.0)


@dataclass
class Kept(Bare):
    width: float = 8
    optimizer: str = "adamw"


def test_a_prescription_of_ones_own_may_name_adamw_and_need_not_be_a_dataclass():
    for rule in (Bare(), Kept()):
        numbers = made(prescription=rule, absorb_multipliers=True)
        assert (numbers["weight"].init_std, numbers["weight"].lr) == (1.0, 0.2)
        name = type(rule).__name__.lower()
        assert numbers.prescription == {"name": name, "width": 8, "optimizer": "adamw"}
        model = torch.nn.Linear(8, 8, bias=False)
        numbers.initialise(model, seed=0)
        with pytest.raises(PlanError, match="is of the family 'sgd'"):
            guard(torch.optim.SGD(numbers.groups(model)), numbers)
