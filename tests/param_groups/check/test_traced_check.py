"""A check and a command without a rule by hand: what a trace reads of a file's models."""

import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch.nn.functional as F

from param_groups import Everett, plan, traced
from param_groups.__main__ import main
from param_groups.check import judging
from param_groups.check.transfer import Run
from param_groups.check.transfer_command import train
from tests.param_groups.traced_blocks import Apart, Mlp, Stack, merged, text

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


# Two matrices that are no layers' weights, whose names say nothing.
BARE = FILE.replace("nn.Linear(width, width, bias=False)", "drawn(width, width)")
BARE = BARE.replace("nn.Linear(width, 128, bias=False)", "drawn(width, 128)")
BARE = BARE.replace("return self.three(x + self.two(x).relu())", "x = x + (x @ self.two).relu()")
BARE = BARE.replace("self.two).relu()", "self.two).relu()\n        return x @ self.three", 1)
BARE = BARE.replace("class Model", "drawn = lambda *n: nn.Parameter(torch.randn(n))\nclass Model")
BARE = BARE.replace("BASE", "width").replace("SMALL", "None")


def test_an_audit_of_a_checks_file_reads_layouts_from_use(path, capsys, tmp_path):
    """By their layers they are tables, of which a right plan's rates deviate."""
    (tmp_path / "bare.py").write_text(BARE)
    main(["audit", "bare.py", "--widths", "64", "128"])
    out = capsys.readouterr().out
    assert "nearest rule: mup, full alignment\nevery tensor follows it" in out
    assert "two         hidden" in out and "three       readout" in out


def test_a_transfer_trains_plans_of_traced_rules(path):
    args = Namespace(
        file=Path(path("width", "None")), widths=[64, 128], steps=40, warmup=0.1, schedule="cosine"
    )
    curve = train(args, Run(64, -7.0, 0), 1)
    assert curve[-1] < curve[0]


def test_heads_that_grow_in_a_trace_are_warned_of():
    """The library's power of the head dimension is muP's at one head dimension alone."""

    class Four(Apart):
        def forward(self, x):
            q, k, v = (
                f(x).unflatten(-1, (4, -1)).transpose(1, 2) for f in (self.a, self.b, self.c)
            )
            return self.d(merged(F.scaled_dot_product_attention(q, k, v)))

    build = lambda n: Stack(n, Four, Mlp)
    rules = traced(build, text, (32, 64)).rules
    rule = lambda n: Everett("mup", n, 32, qk_exponent=-0.5)
    options = {"lr": 0.1, "absorb_multipliers": True}
    plans = {n: plan(build(n), rules, rule(n), **options) for n in (32, 64)}
    (left,) = judging.not_judged(plans, {})
    assert left.startswith("not judged: whether the head") and not judging.heads_note(plans)
    assert not judging.not_judged(plans, {}, rules)
    (note,) = judging.heads_note(plans, rules)
    assert note.startswith("warning: head dimensions 8 to 16")


HIDDEN = FILE.replace("self.three(x +", "self.three(x + self.mixed(x) +")
HIDDEN = HIDDEN.replace(
    "    def forward",
    """        for key in "abc":
            setattr(self, key, nn.Linear(width, width, bias=False))

    def mixed(self, x):
        a, b, c = (getattr(self, key)(x).unflatten(-1, (-1, 16)).transpose(1, 2) for key in "abc")
        return ((a @ b.mT / 16).softmax(-1) @ c).transpose(1, 2).flatten(2)

    def forward""",
)
HIDDEN = HIDDEN.replace("import Everett", "import Everett, Rule").replace("BASE", "width")
HIDDEN = HIDDEN.replace("lambda rules: plan(model, rules", "plan(model, RULES")
HIDDEN = (
    HIDDEN.replace("SMALL", "None")
    + """
RULES = [Rule("one.weight", "token_embedding"), Rule("three.weight", "readout")]
RULES += [Rule(f"{key}.weight", "hidden") for key in ("two", "a", "b", "c")]
"""
)


def test_queries_that_no_rule_names_are_not_judged(capsys, tmp_path, monkeypatch):
    """Their products are read in a pass, whatever modules are called."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hidden.py").write_text(HIDDEN)
    options = "--widths 16 32 64 --seeds 1 --steps 2 --tolerance 9"
    with pytest.raises(SystemExit) as end:
        main(["check", "hidden.py", *options.split()])
    said = capsys.readouterr().out
    makes = (
        "not judged: a.weight (hidden) makes queries, whose products with keys are multiplied by"
    )
    assert end.value.code == 2
    assert f"{makes} 0.0625 at head dimension 16: give it the role query" in said
