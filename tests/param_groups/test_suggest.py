"""Suggestions: right where they are certain, marked where they are not, and code that runs."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from measure import stock
from param_groups import Layout, Role, assign, rules_for
from param_groups import models as shipped
from param_groups.suggest import suggest


def read(model, rules):
    return {a.name: (a.role, a.layout) for a in assign(model, rules)}


@pytest.mark.parametrize("name", stock.MODELS)
def test_what_is_certain_agrees_with_the_shipped_rules(name):
    with torch.device("meta"):
        model = shipped.stock(name, **stock.sizes(name, 64))
    found = suggest(model)
    mine, theirs = read(model, found.rules), read(model, rules_for(model))
    doubted = {tensor for rule in found.rules if rule.pattern in found.doubts
               for tensor in mine if rule.matches(tensor)}
    assert {tensor for tensor in theirs if mine[tensor] != theirs[tensor]} <= doubted
    assert len(doubted) < len(theirs) / 4


def test_the_text_is_code_that_gives_the_same_rules():
    model = stock.build("hf:gpt2", 64)
    found = suggest(model)
    scope = {}
    exec(str(found), scope)
    assert scope["RULES"] == found.rules
    assert 'Rule("transformer.h.*.attn.c_attn.weight", Role.QKV, Layout.TRANSPOSED)' in str(found)


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
        Role.TOKEN_EMBEDDING, Layout.TABLE,
    )  # fmt: skip


def test_a_norm_is_judged_by_what_it_does():
    class Norm(nn.Module):
        def __init__(self, offset):
            super().__init__()
            self.weight, self.offset = nn.Parameter(torch.rand(8)), offset

        def forward(self, x):
            return nn.functional.rms_norm(x, (8,)) * (self.offset + self.weight)

    model = nn.ModuleDict({"plain": Norm(0), "added": Norm(1)})
    assert {rule.pattern: rule.role for rule in suggest(model).rules} == {
        "plain.weight": Role.NORM_SCALE, "added.weight": Role.NORM_BIAS,
    }  # fmt: skip


def test_the_command_prints_code():
    command = [sys.executable, "-m", "param_groups", "suggest", "hf:gpt2"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert 'Rule("lm_head.weight", Role.READOUT)' in result.stdout
