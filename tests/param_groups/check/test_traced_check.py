"""A check and a command without a rule by hand: what a trace reads of a file's models."""

import sys

import pytest

from param_groups.__main__ import main

FILE = """
import torch
import torch.nn.functional as F
from torch import nn

from param_groups import Everett, plan
from param_groups.check import Check


class Model(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.one, self.two = nn.Embedding(128, width), nn.Linear(width, width, bias=False)
        self.three = nn.Linear(width, 128, bias=False)

    def forward(self, ids):
        x = self.one(ids)
        return self.three(x + self.two(x).relu())


def task(width, seed):
    model = Model(width)
    rule = Everett("mup", BASE, 64)
    ids = torch.randint(128, (1, 17), generator=torch.Generator().manual_seed(seed))
    loss = lambda m, x: F.cross_entropy(m(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
    planned = lambda rules: plan(model, rules, rule, lr=2e-3, absorb_multipliers=True, base=SMALL)
    return Check(model, planned, [ids], loss)
"""


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)

    def write(base, small):
        text = FILE.replace("BASE", base).replace("SMALL", small)
        (tmp_path / "mine.py").write_text(text)
        return "mine.py"

    return write


def test_a_check_needs_no_rules_at_a_width_that_is_the_vocabularys(path, capsys):
    """128 is a width and the vocabulary: by its shape the readout would be hidden there."""
    assert not main(["check", path("width", "None"), "--widths", "64", "128", "256"])
    assert "passed" in capsys.readouterr().out


def test_a_wrong_plan_of_traced_rules_fails(path, capsys):
    with pytest.raises(SystemExit) as error:
        main(["check", path("64", "model"), "--widths", "64", "128", "256"])
    assert error.value.code == 1 and "FAILED" in capsys.readouterr().out


def test_the_command_prints_a_trace_of_a_file_and_of_a_stock_model(path, capsys):
    main(["trace", path("width", "None")])
    out = capsys.readouterr().out
    assert "three.weight  128 x n" in out and "reaches the output" in out
    main(["trace", "timm:vit_small_patch16_224"])
    out = capsys.readouterr().out
    assert "2 x blocks.*.attn.qkv.weight" in out and "attention: 0.25, head dimension 16" in out
