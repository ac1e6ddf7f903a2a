"""The papers' prescriptions against each other, and each against exponents written by hand."""

from __future__ import annotations

from fractions import Fraction

import pytest

from effective_theory import cross_paper
from effective_theory.cross_paper import Scaling, dinan, everett, facts, scaling
from param_groups import Dinan
from param_groups.roles import Role

S = [Fraction(0), Fraction(1, 3), Fraction(1, 2), Fraction(7, 8), Fraction(1)]


@pytest.mark.parametrize("s", S)
def test_dinans_exponents_are_those_of_his_footnotes(s):
    # (1.25)-(1.34), (1.108)-(1.116) and footnote 26: Adam's rates times n^(s/2) but the head's
    assert dinan(s, "adam") == {
        "embedding": Scaling(Fraction(0), Fraction(0), (1 - s) / 2),
        "hidden": Scaling(Fraction(0), Fraction(1, 2), (3 - s) / 2),
        "readout": Scaling(Fraction(0), (1 + s) / 2, Fraction(1)),
    }
    # (1.99)-(1.107): SGD's rates times n^s but the head's
    powers = {layer: found.c for layer, found in dinan(s, "sgd").items()}
    assert powers == {"embedding": -s, "hidden": 1 - s, "readout": 1}


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("role", [Role.QUERY, Role.KEY, Role.VALUE, Role.MLP_IN, Role.MLP_OUT])
def test_all_matrices_of_a_block_scale_alike(role, optimizer):
    def rule(width, init="vit"):
        return Dinan(width, "meta_principled", 0.25, optimizer, mlp_factor="keep", init=init)

    # M = 1 here, so that fan-in and fan-out grow with the width
    expected = dinan(Fraction(1, 4), optimizer)
    assert scaling(rule, role) == expected["hidden"]
    assert scaling(rule, Role.POSITION_EMBEDDING) == expected["embedding"]
    words = scaling(lambda width: rule(width, "bart"), Role.TOKEN_EMBEDDING)
    assert words == expected["embedding"]


def test_every_fact_holds():
    found = facts()
    assert [fact.statement for fact in found if not fact.holds] == []
    assert len(found) == 5 and all(fact.lines for fact in found)


def test_neural_tangent_differs_from_ntk_in_embedding_and_blocks():
    ntk = everett("ntk", "adam")
    moved = {
        layer: found.with_multiplier(ntk[layer].a, "adam")
        for layer, found in dinan(Fraction(0), "adam").items()
    }
    assert moved["readout"] == ntk["readout"]
    assert moved["hidden"].c - ntk["hidden"].c == Fraction(1, 2)
    assert moved["embedding"].c - ntk["embedding"].c == Fraction(1, 2)


@pytest.mark.parametrize(
    ("role", "fact"), [(Role.ATTENTION_OUTPUT, 0), (Role.READOUT, 1), (Role.PATCH_EMBEDDING, 1)]
)
def test_a_wrong_rate_of_one_role_breaks_a_fact(monkeypatch, role, fact):
    right = Dinan.lr_factor

    def wrong(self, asked, fan_in, fan_out):
        factor = right(self, asked, fan_in, fan_out)
        return factor * self.width**0.5 if asked is role else factor

    monkeypatch.setattr(Dinan, "lr_factor", wrong)
    assert not facts()[fact].holds


def test_command_prints_facts_and_fails_when_one_does_not_hold(monkeypatch, capsys):
    with pytest.raises(SystemExit) as done:
        cross_paper.main([])
    assert done.value.code == 0
    assert capsys.readouterr().out.count("holds: ") == 5
    monkeypatch.setattr(Dinan, "lr_factor", lambda *_: 1.0)
    with pytest.raises(SystemExit) as done:
        cross_paper.main([])
    assert done.value.code == 1
    assert "FAILS: Dinan" in capsys.readouterr().out


def test_a_small_deviation_of_an_exponent_is_no_fact(monkeypatch):
    right = Dinan.lr_factor
    monkeypatch.setattr(
        Dinan, "lr_factor", lambda self, *case: right(self, *case) * self.width**0.0001
    )
    assert not facts()[1].holds
