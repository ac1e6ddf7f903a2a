"""Traces of libraries' models against their lists: roles, layouts, fans, places, factors."""

import pytest
import torch
from torch import nn

from param_groups import PlanError, Role, rules_for, traced
from param_groups.check import stock
from param_groups.roles import assign, present
from param_groups.stock.rules import stock as made
from tests.param_groups.stock_lists import LISTS

pytestmark = pytest.mark.xdist_group("libraries")
# Built as the model beside it, with more keys.
MORE = {
    "hf:mixtral": ("hf:mistral", {"num_local_experts": 4}),
    "hf:t5": ("hf:t5", {"feed_forward_proj": "gated-gelu"}),
    "timm:convnextv2_atto": ("timm:convnext_tiny", {}),
}
CASES = [*stock.MODELS, *(name for name in MORE if name != "hf:t5"), "hf:t5, gated"]
CASES += ["nn.Transformer", "nn.MultiheadAttention"]
# Where a list and a trace differ, and why the trace is right.
UNUSED = {"hf:bert": "cls.predictions.bias", "hf:roberta": "lm_head.bias", "hf:t5": "shared.weight"}
FACTOR = {"hf:granitemoe": 1.0, "hf:gemma2": 1 / 16, "hf:gemma3_text": 1 / 16, "hf:t5": 1.0}


def builder(name):
    name, _, option = name.partition(", ")

    def build(width, depth=2):
        if name == "nn.Transformer":
            return nn.Transformer(width, width // 16, depth, depth, 4 * width)
        if name == "nn.MultiheadAttention":
            return nn.MultiheadAttention(width, width // 16)
        like, more = MORE[name] if name in MORE and (option or name != "hf:t5") else (name, {})
        sizes = stock.sizes(like, width) | more
        if "dims" in sizes or "depths" in sizes:
            sizes["depths"] = (1, 1, 1, depth)
        else:
            keys = ("depth", "encoder_layers", "decoder_layers", "num_layers", "num_hidden_layers")
            sizes |= {key: depth for key in keys if key in sizes}
            sizes |= {"num_decoder_layers": depth} if name == "hf:t5" else {}
        return made(name, **sizes)

    return build


def runner(name):
    name = name.partition(", ")[0]
    if name.startswith("nn."):
        size = lambda model: getattr(model, "d_model", None) or model.embed_dim
        count = 2 if name == "nn.Transformer" else 3
        return lambda model: model(*[torch.randn(5, 2, size(model)) for _ in range(count)])
    batch = stock.batch_of(name, 0)
    if name.startswith("timm"):
        return lambda model: model(batch["pixel_values"])
    if name == "hf:mixtral":  # tokens enough for every expert
        batch = {"input_ids": torch.arange(64)[None]}
    return lambda model: model(**batch)


KINDS = {"gpt2": "GPT2", "gpt_neox": "GPT_NEOX", "t5": "T5", "vit": "HF_VIT", "whisper": "WHISPER"}
KINDS |= {"bert": "BERT", "roberta": "BERT"}


def by_hand(name, model):
    """The rules that were written for a model, tensor by tensor."""
    kind = name.removeprefix("hf:")
    if not name.startswith("hf:"):
        return rules_for(model)
    return present(LISTS[KINDS.get(kind, "GEMMA" if "gemma" in kind else "LLAMA")], model)


def in_a_branch(assignment, lists):
    """What `plan` takes a list's rule to say: its own word, or a numbered block."""
    if not assignment.role.facts.branch or assignment.trunk is not None:
        return assignment.role.facts.branch and not assignment.trunk
    return path_of(assignment) in lists


def path_of(assignment):
    before, number, _ = assignment.name.partition(
        next((f".{part}." for part in assignment.name.split(".") if part.isdigit()), "\0")
    )
    return before if number else None


def is_known_exception(name, tensor, mine, theirs):
    """A list is wrong, or says the same numbers in another word."""
    if "downsample" in tensor:  # between stages, on the stream itself: in no branch
        return mine[:3] == theirs[:3]
    renamed = {("norm_scale", "norm_bias"), ("layer_scale", "norm_bias")}  # Gemma's, ConvNeXt's:
    renamed |= {("hidden_bias", "norm_bias"), ("key_value", "hidden")}  # numbers that start at 0
    return (mine[0], theirs[0]) in renamed and mine[1:] == theirs[1:]


@pytest.mark.parametrize("name", CASES)
def test_a_trace_is_the_list_or_better(name):
    build, short = builder(name), name.partition(", ")[0]
    found = traced(build, runner(name), (64, 128), depths=(2, 3))
    model = build(128)
    theirs = assign(model, by_hand(short, model))
    lists = {path_of(one) for one in theirs if one.role.facts.block} - {None}
    assert [reading.name for reading in found.readings] == [one.name for one in theirs]
    same = {Role.FINAL_NORM_SCALE: Role.NORM_SCALE}
    for one in theirs:
        mine = found[one.name]
        if one.name == UNUSED.get(short):
            assert mine.use == "nothing" and any(one.name in doubt for doubt in found.doubts)
            continue
        ours = (
            str(same.get(mine.role, mine.role)),
            str(mine.layout),
            (mine.fan_in, mine.fan_out),
            mine.inside and mine.role.facts.branch,
        )
        role = str(same.get(one.role, one.role))
        listed = (role, str(one.layout), one.fans, in_a_branch(one, lists))
        assert ours == listed or is_known_exception(name, one.name, ours, listed), one.name
        thirds = (1, 1, 1) if role == "qkv" and one.parts is None else one.parts
        if mine.role is one.role and mine.role.facts.kind == "hidden":  # what Muon cuts
            assert mine.parts == thirds, one.name
    if short in UNUSED:
        with pytest.raises(PlanError, match=f"'{UNUSED[short]}' is taken by nothing; .*known="):
            _ = found.rules
    else:
        deep = build(64, depth=4)  # the rules hold at any depth and width
        assert len(assign(deep, found.rules)) == len([*deep.parameters()])
    factors = [m for rule in found.made for m in rule.measured if m.factor == "attention_scale"]
    assert bool(factors) == ("convnext" not in name)
    for factor in factors:  # Swin's first head grows
        assert factor.value == pytest.approx(FACTOR.get(short, factor.head_dim**-0.5))
