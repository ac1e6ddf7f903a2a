"""Suggestions: right where they are certain, marked where they are not, and code that runs."""

import pytest
import torch
from torch import nn

from param_groups import Everett, Layout, PlanError, Role, Rule, assign, plan, rules_for
from param_groups.__main__ import main
from param_groups.check import stock
from param_groups.stock import rules as shipped
from param_groups.stock.suggest import suggest


def read(model, rules):
    """Roles and layouts; which norm is the last matters to a rule for the depth alone."""
    same = {Role.FINAL_NORM_SCALE: Role.NORM_SCALE}
    return {a.name: (same.get(a.role, a.role), a.layout) for a in assign(model, rules)}


@pytest.mark.parametrize("name", stock.MODELS)
def test_what_is_certain_agrees_with_the_shipped_rules(name):
    with torch.device("cpu" if "convnext" in name else "meta"):  # its LayerScale is read
        model = shipped.stock(name, **stock.sizes(name, 64))
    found = suggest(model)
    mine, theirs = read(model, found.rules), read(model, rules_for(model))
    doubted = {
        tensor
        for rule in found.rules
        if rule.pattern in found.doubts
        for tensor in mine
        if rule.matches(tensor)
    }
    assert {tensor for tensor in theirs if mine[tensor] != theirs[tensor]} <= doubted
    assert len(doubted) < len(theirs) / 4


def test_the_text_is_code_that_gives_the_same_rules():
    model = stock.build("hf:gpt2", 64)
    found = suggest(model)
    scope = {}
    exec(str(found), scope)
    assert scope["RULES"] == found.rules
    assert 'Rule("transformer.h.*.attn.c_attn.weight", Role.QKV, Layout.TRANSPOSED)' in str(found)
    assert not found.doubts


def test_what_names_do_not_say_is_marked_in_the_text():
    model = nn.ModuleDict({"mystery": nn.Linear(8, 8), "emb": nn.Embedding(9, 8)})
    text = str(suggest(model)).splitlines()
    assert [line for line in text if "mystery.weight" in line and "# check: " in line]
    assert [line for line in text if "emb.weight" in line and "# check: tokens or pos" in line]


def test_a_tied_readout_is_named_once_and_marked():
    with torch.device("meta"):
        model = shipped.stock("hf:gpt2", **stock.sizes("hf:gpt2", 64), tie_word_embeddings=True)
    found = suggest(model)
    assert "tied to lm_head.weight" in found.doubts["transformer.wte.weight"]
    assert read(model, found.rules)["transformer.wte.weight"] == (
        Role.TOKEN_EMBEDDING,
        Layout.TABLE,
    )


def test_a_norm_is_judged_by_what_it_does():
    class Norm(nn.Module):
        def __init__(self, offset):
            super().__init__()
            self.weight, self.offset = nn.Parameter(torch.rand(8)), offset

        def forward(self, x):
            return nn.functional.rms_norm(x, (8,)) * (self.offset + self.weight)

    model = nn.ModuleDict({"plain": Norm(0), "added": Norm(1)})
    before = torch.get_rng_state()
    assert {rule.pattern: rule.role for rule in suggest(model).rules} == {
        "plain.weight": Role.NORM_SCALE,
        "added.weight": Role.NORM_BIAS,
    }
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_a_batch_norm_is_read_without_counting_what_it_is_shown(mode):
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8))
    getattr(model, mode)()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert {
        rule.role for rule in suggest(model).rules if rule.pattern in ("1.weight", "3.weight")
    } == {Role.NORM_SCALE}
    with pytest.raises(PlanError, match="print.suggest"):
        rules_for(model)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


@pytest.mark.parametrize("read_rules", [suggest, rules_for])
@pytest.mark.parametrize(
    ("model", "message"),
    [
        (None, "a model is an nn.Module, got NoneType"),
        ([nn.Linear(2, 2)], "an nn.Module, got list"),
        (nn.DataParallel(nn.Linear(2, 2)), "inside a DataParallel wrapper; plan the unwrapped"),
    ],
)
def test_what_is_no_model_and_a_wrapped_one_are_one_line(read_rules, model, message):
    with pytest.raises(PlanError, match=message):
        read_rules(model)


class Adapted(nn.Module):
    """A linear layer as peft wraps it."""

    def __init__(self, fan_in, fan_out, rank=4):
        super().__init__()
        self.base_layer = nn.Linear(fan_in, fan_out, bias=False).requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(fan_in, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, fan_out, bias=False)})


def test_lora_factors_and_the_layers_they_adapt_are_recognised():
    attention = nn.ModuleDict({"q_proj": Adapted(8, 8), "o_proj": Adapted(8, 8)})
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"self_attn": attention})])})
    found = suggest(model)
    start = "layers.0.self_attn."
    assert not found.doubts
    assert {name: role for name, (role, _) in read(model, found.rules).items()} == {
        f"{start}q_proj.base_layer.weight": Role.QUERY,
        f"{start}q_proj.lora_A.default.weight": Role.LORA_A,
        f"{start}q_proj.lora_B.default.weight": Role.LORA_B,
        f"{start}o_proj.base_layer.weight": Role.ATTENTION_OUTPUT,
        f"{start}o_proj.lora_A.default.weight": Role.LORA_A,
        f"{start}o_proj.lora_B.default.weight": Role.LORA_B,
    }


def test_bare_lora_factors_are_read_by_name_and_marked_where_the_rank_is_not_small():
    model = nn.Module()
    model.lora_A, model.lora_B = nn.Parameter(torch.rand(2, 8)), nn.Parameter(torch.rand(2, 8))
    model.lora_embedding_A = nn.ParameterDict({"default": nn.Parameter(torch.rand(2, 8))})
    found = suggest(model)
    roles = {name: role for name, (role, _) in read(model, found.rules).items()}
    assert (roles["lora_A"], roles["lora_B"]) == (Role.LORA_A, Role.LORA_B)
    assert found.doubts == {
        "lora_B": "which axis is the rank?",
        "lora_embedding_A.default": "an embedding's LoRA factor, for which there is no role",
    }


SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 40, "pad_token_id": 0}
SMALL |= {"num_attention_heads": 2, "head_dim": 16, "num_key_value_heads": 2}


@pytest.mark.parametrize(
    ("name", "router", "layout", "more"),
    [
        ("hf:mixtral", "gate", Layout.EXPERTS, {"num_local_experts": 4, "intermediate_size": 48}),
        ("hf:olmoe", "gate", Layout.EXPERTS, {"num_experts": 4, "intermediate_size": 32}),
        (
            "hf:gpt_oss",
            "router",
            Layout.EXPERTS_TRANSPOSED,
            {"num_local_experts": 4, "intermediate_size": 32},
        ),
    ],
)
def test_routers_and_stacks_of_experts_are_recognised(name, router, layout, more):
    """Of equal width and hidden size a stack is square; it is stored as the one beside it."""
    with torch.device("meta"):
        model = shipped.stock(name, **SMALL, **more)
    found = suggest(model)
    roles = read(model, found.rules)
    mlp = "model.layers.1.mlp"
    assert roles[f"{mlp}.{router}.weight"] == (Role.ROUTER, Layout.LINEAR)
    assert roles[f"{mlp}.experts.gate_up_proj"] == (Role.MLP_IN, layout)
    assert roles[f"{mlp}.experts.down_proj"] == (Role.MLP_OUT, layout)
    doubts = {pattern for pattern in found.doubts if ".mlp." in pattern}
    assert doubts == ({"model.layers.*.mlp.router.bias"} if router == "router" else set())
    if name == "hf:mixtral":
        assert roles == read(model, rules_for(model))


def test_experts_and_gates_that_shapes_do_not_settle_are_marked():
    experts = nn.Module()
    experts.w1, experts.w2 = (nn.Parameter(torch.rand(4, 8, 8)) for _ in range(2))
    experts.odd = nn.Parameter(torch.rand(4, 8, 6))
    mixture = nn.ModuleDict({"gate": nn.Linear(8, 4, bias=False), "experts": experts})
    plain = nn.ModuleDict({"gate": nn.Linear(8, 4, bias=False)})
    found = suggest(nn.ModuleDict({"moe": mixture, "mlp": plain}))
    assert found.doubts == {
        "moe.experts.w1": "(experts, out, in), or EXPERTS_TRANSPOSED?",
        "moe.experts.w2": "(experts, out, in), or EXPERTS_TRANSPOSED?",
        "moe.experts.odd": "a stack whose name says nothing",
        "mlp.gate.weight": "a router, or an MLP's gate?",
    }


class Bare(nn.Module):
    """Tensors that stand in a module without a layer of their own."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.w1, self.mystery = (nn.Parameter(torch.rand(8, 8)) for _ in range(2))


class MaskedNorm(nn.Module):
    """A norm that cannot be called with one tensor, so that nothing is known of it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x, mask):
        return x * mask * self.weight


def test_what_names_shapes_and_layers_say_besides():
    model = nn.ModuleDict(
        {
            "moe": nn.ModuleDict({"gate": nn.Linear(8, 4), "experts": nn.Linear(8, 8)}),
            "bare": Bare(),
            "masked": MaskedNorm(),
            "qkv": nn.Linear(8, 20),
            "fc1": nn.Conv2d(8, 16, 1),
            "decoder": nn.Linear(8, 20),
            "attention": nn.MultiheadAttention(8, 2, kdim=4, vdim=4),
            "stem": nn.Conv2d(4, 8, 2),
            "conv": nn.Conv2d(5, 8, 2),
            "fc2": nn.Conv1d(8, 8, 1),
            "MLP": nn.ModuleDict({"proj": nn.Linear(8, 8)}),
            "blocks": nn.ModuleList(
                [
                    nn.ModuleDict(
                        {"odd": nn.Linear(8, 20), "fc1": nn.Linear(8, 32), "fc2": nn.Linear(32, 8)}
                    )
                ]
            ),
            "up": nn.Linear(20, 32),
            "input_proj": nn.Linear(7, 8),
            "score": nn.Linear(8, 20),
        }
    )
    model.register_parameter("summary", nn.Parameter(torch.rand(1, 1, 8)))
    first = "PATCH_EMBEDDING if its inputs do not grow with the width"
    uncertain = "the layer's role is uncertain"
    last = "READOUT if its outputs do not grow with the width"
    expected = {
        "moe.gate.bias": (Role.READOUT_BIAS, "a router's bias"),
        "bare.weight": (Role.NORM_SCALE, "a vector called weight"),
        "bare.w1": (Role.MLP_IN, "is it stored as (out, in)?"),
        "bare.mystery": (Role.HIDDEN, "a tensor whose name says nothing"),
        "masked.weight": (Role.NORM_SCALE, "is it the scale of a norm that starts at 1?"),
        "qkv.weight": (Role.QKV, "other than three parts of one size"),
        "decoder.weight": (Role.READOUT, ""),
        "fc1.weight": (Role.MLP_IN, first),
        "fc2.weight": (Role.MLP_OUT, last),
        "attention.q_proj_weight": (Role.QUERY, ""),
        "stem.weight": (Role.PATCH_EMBEDDING, ""),
        "conv.weight": (Role.HIDDEN, first),
        "MLP.proj.weight": (Role.MLP_OUT, last),
        "up.weight": (Role.MLP_IN, first),
        "up.bias": (Role.HIDDEN_BIAS, uncertain),
        "input_proj.weight": (
            Role.PATCH_EMBEDDING,
            "outside the blocks: the first layer, not the readout?",
        ),
        "score.weight": (Role.READOUT, ""),
        "summary": (Role.POSITION_EMBEDDING, "a token of its own, such as a class token?"),
        "blocks.0.fc1.weight": (Role.MLP_IN, ""),
        "blocks.0.fc2.weight": (Role.MLP_OUT, ""),
        "blocks.0.odd.weight": (Role.MLP_IN, "judged by its shape alone"),
    }
    found = suggest(model)
    roles = read(model, found.rules)
    doubts = {
        name: doubt
        for rule, doubt in found.doubts.items()
        for name in expected
        if Rule(rule, Role.HIDDEN).matches(name)
    }
    assert {name: (roles[name][0], doubts.get(name, "")) for name in expected} == expected


def test_what_stands_before_and_after_the_blocks():
    block = lambda: nn.ModuleDict({"norm": nn.LayerNorm(8, bias=False), "mix": nn.Linear(8, 8)})
    parts = {"signal": nn.Linear(7, 8), "blocks": nn.ModuleList([block(), block()])}
    model = nn.ModuleDict({**parts, "last": nn.RMSNorm(8), "to_words": nn.Linear(8, 20)})
    model.row, model.scale = nn.Parameter(torch.zeros(1, 8)), nn.Parameter(torch.zeros(()))
    found, plain = suggest(model), suggest(nn.Sequential(nn.Linear(9, 8), nn.Linear(8, 20)))
    roles = [f"{rule.pattern} {rule.role}" for rule in (*found.rules, *plain.rules)]
    expected = """row position_embedding, scale hidden, signal.weight patch_embedding,
        signal.bias hidden_bias, blocks.*.norm.weight norm_scale, blocks.*.mix.weight hidden,
        blocks.*.mix.bias hidden_bias, last.weight final_norm_scale, to_words.weight readout,
        to_words.bias readout_bias, 0.weight patch_embedding, 0.bias hidden_bias,
        1.weight readout, 1.bias readout_bias"""
    assert roles == [" ".join(line.split()) for line in expected.split(",")]
    assert found.doubts["signal.weight"] == "outside the blocks: the first layer, not the readout?"
    assert "row" in found.doubts and "last.weight" not in found.doubts


class OwnNorm(nn.Module):
    """A norm whose tensors have names and starts of their own: y (offset + gain) + shift."""

    def __init__(self, gain, shift, offset):
        super().__init__()
        self.names, self.offset = (gain, shift), offset
        self.register_parameter(gain, nn.Parameter(torch.full((8,), 1.0 - offset)))
        self.register_parameter(shift, nn.Parameter(torch.zeros(8)))

    def forward(self, x):
        gain, shift = (getattr(self, name) for name in self.names)
        return nn.functional.layer_norm(x, (8,)) * (self.offset + gain) + shift


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("names", ["scale shift", "g b", "gamma beta", "alpha w", "gain weight"])
def test_a_norm_by_any_name_is_a_norm(names, offset):
    """Called `g` or `scale`, it was a bias, and all logits were 0 after `initialise`."""
    gain, shift = names.split()
    model = nn.ModuleDict({"norm": OwnNorm(gain, shift, offset)})
    found = suggest(model)
    roles = [Role.NORM_BIAS if offset else Role.NORM_SCALE, Role.NORM_BIAS]
    assert [rule.role for rule in found.rules] == roles and not found.doubts
    numbers = plan(model, found.rules, Everett("mup", 8, 8), lr=0.1, absorb_multipliers=True)
    numbers.initialise(model, seed=0)
    assert model["norm"](torch.randn(500, 8)).std().item() == pytest.approx(1, rel=0.05)


class Starts(nn.Module):
    """Tensors whose start no name says."""

    def __init__(self, **tensors):
        super().__init__()
        for name, value in tensors.items():
            self.register_parameter(name, nn.Parameter(value))


@pytest.mark.parametrize(
    ("name", "value", "role", "doubt"),
    [
        ("mystery", torch.ones(8), Role.NORM_SCALE, "a vector of ones: the scale of a norm?"),
        ("lambdas", torch.full((4,), 1.1), Role.HIDDEN_BIAS, "is 1.1 in your model, and would st"),
        ("gamma", torch.zeros(8), Role.LAYER_SCALE, "is 0 in your model, and would start at 1"),
        ("gamma", torch.full((8,), 1e-6), Role.LAYER_SCALE, "is 1e-06 in your model, and would"),
        ("dt_bias", torch.linspace(-6.6, -2, 8), Role.HIDDEN_BIAS, "is 4.6 away from 0 in your m"),
        ("mix_out", torch.zeros(8, 8), Role.HIDDEN, "is 0 in all entries of your model, and would"),
        ("bias_stack", torch.zeros(8, 8), Role.HIDDEN, "is 0 in all entries of your model, and wo"),
    ],
)
def test_a_start_that_a_plan_would_change_is_a_doubt(name, value, role, doubt):
    found = suggest(Starts(**{name: value}))
    assert [rule.role for rule in found.rules] == [role] and doubt in found.doubts[name]


def test_starts_that_stay_bear_no_doubt():
    tensors = {"in_bias": torch.zeros(8), "q_bias": torch.empty(8).uniform_(-0.3, 0.3)}
    assert not suggest(Starts(**tensors)).doubts
    factors = {"q.lora_B": nn.Linear(2, 8, bias=False)}
    nn.init.zeros_(factors["q.lora_B"].weight)
    assert not suggest(nn.ModuleDict({"q": nn.ModuleDict({"lora_B": factors["q.lora_B"]})})).doubts


def test_the_command_prints_code(capsys):
    main(["suggest", "hf:gpt2"])
    assert 'Rule("lm_head.weight", Role.READOUT)' in capsys.readouterr().out
