"""`audit --step`: the size of one step on random gradients beside what the numbers say."""

import json
import math
import re

import pytest
import timm.optim
import torch

import param_groups
from param_groups import Everett
from tests.param_groups.check.test_audit import GPT, MATRICES, named, nanochat, of_plan, run
from tests.param_groups.check.test_audit_reading import with_kernel, with_muon
from tests.param_groups.test_muon import Block as Small


class ClippedMuon(torch.optim.Muon):
    """Clips the norm of all its updates together to 1, after they were orthogonalised."""

    @torch.no_grad()
    def step(self):
        before = [p.clone() for g in self.param_groups for p in g["params"]]
        super().step()
        now = [p for g in self.param_groups for p in g["params"]]
        moved = [(p - old) / self.param_groups[0]["lr"] for p, old in zip(now, before, strict=True)]
        share = 1 / max(1.0, float(sum(one.square().sum() for one in moved).sqrt()))
        for p, old, one in zip(now, before, moved, strict=True):
            p.copy_(old + self.param_groups[0]["lr"] * share * one)


def clipped(n):
    model, (adamw, _) = nanochat(n)
    return model, [adamw, ClippedMuon(named(model, *MATRICES), lr=0.02)]


def adam_of_own(factor, above=0.0):
    class Adam(torch.optim.AdamW):
        @torch.no_grad()
        def step(self):
            before = [p.clone() for p in self.param_groups[0]["params"]]
            super().step()
            for p, old in zip(self.param_groups[0]["params"], before, strict=True):
                if p.grad.abs().max() >= above:
                    p.copy_(old + factor * (p - old))

    return lambda n: (m := GPT(n), Adam(m.parameters(), lr=1e-3))


SMALL = r"a step is 0.0\d+ to 0.0\d+ times .*"


@pytest.mark.parametrize(
    ("build", "line"),
    [
        (clipped, rf"h.*.up.weight: {SMALL} a clip after"),
        (lambda n: with_muon(n, clip=1.0), rf"h.*.out.weight: {SMALL} a clip after"),
        (lambda n: with_kernel(n, flat=False), rf"conv.weight: {SMALL} that of the kernel, 3x3,"),
        (adam_of_own(0.1), r"h.*.up.weight: a step is 0.1 times what rate, shape and adam say"),
        (adam_of_own(3.0), r"lm_head.weight: a step is 3 times what rate, shape and adam say"),
        (adam_of_own(math.nan, above=100), r"lm_head.weight: a step is not finite"),
    ],
)
def test_a_step_of_another_size_is_named(capsys, build, line):
    code, text = run(capsys, build, "--step")
    assert code in (1, 2) and re.search("deviates: " + line.replace("*.", r"\*\."), text), text


@pytest.mark.parametrize(
    ("build", "power"),
    [
        (with_muon, 0),
        (lambda n: with_muon(n, adjust=lambda out, ins: 1.0), 0),
        (lambda n: with_muon(n, adjust=lambda out, ins: 0.2 * max(out, ins) ** 0.5), 0.5),
        (with_kernel, 0.5),
    ],
)
def test_a_step_tells_the_factor_of_somebodys_own_muon(capsys, tmp_path, build, power):
    _, text = run(capsys, build, "--step", "--save", saved := tmp_path / "numbers.json")
    assert "a step is" not in text and "not read" not in text
    saved = json.loads(saved.read_text())["64"]
    rates = {name: saved[name]["lr"] for name in ("first.weight", "wte.weight") if name in saved}
    assert rates in ({"first.weight": 0.001}, {"wte.weight": 0.002})  # of AdamW, as they were
    assert (f"lr goes as size^{power}, expected size^0" in text) == bool(power)


FIELDS = {"weight_decay": 0.1, "lr": 0.01}
OPTIMISERS = {
    "adamw": lambda params: torch.optim.AdamW(params, **FIELDS),
    "nadam": torch.optim.NAdam,
    "sgd": lambda params: torch.optim.SGD(params, momentum=0.9, nesterov=True, **FIELDS),
    "adafactor": lambda params: torch.optim.Adafactor(params, **FIELDS),
    "timm": lambda params: timm.optim.Muon(params, **FIELDS),
    "adamuon": lambda params: timm.optim.Muon(params, algo="adamuon", **FIELDS),
}


@pytest.mark.parametrize("kind", [*OPTIMISERS, "plan"])
def test_right_steps_have_the_size_that_is_said(capsys, kind):
    planned = of_plan(lambda n: param_groups.Muon(Everett("mup", n, 64)))
    stepped = lambda n: (m := Small(n), OPTIMISERS[kind](m.parameters()))
    assert "a step is" not in run(capsys, planned if kind == "plan" else stepped, "--step")[1]
