"""ERRATA.md: every entry names a test that is there, and the passages that no other test holds."""

import re
from pathlib import Path

import pytest

from param_groups import Everett, Role, Tensor
from plots.catalogue import of_shipped
from plots.findings import Finding

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "effective_theory/ERRATA.md").read_text(encoding="utf-8")
ROWS = [line.strip("| ").split(" | ") for line in PAGE.splitlines() if line.startswith("| ")]
ENTRIES = [row for row in ROWS if row[0] != "where"]


def findings_of(figure):
    return [line for line in of_shipped(figure) if isinstance(line, Finding)]


def test_every_entry_has_its_kind_its_resolution_and_a_test_that_is_there():
    assert len(ENTRIES) > 30
    for where, kind, printed, read, test in ENTRIES:
        assert re.fullmatch(r"[CTOA](?:, [CTOA])?", kind) and printed and read, where
        file, name = re.fullmatch(r"`(\S+)::(\w+)`", test).groups()
        text = (ROOT / file).read_text(encoding="utf-8")
        assert re.search(rf"^def {name}\(", text, re.MULTILINE), (where, test)


@pytest.mark.parametrize("alignment", ["full", "none"])
def test_standard_and_ntk_are_one_model_up_to_constants(alignment):
    """Effective initial values, and effective rates under Adam, have the same powers of the width:
    opposite signs of what an alignment gains cannot be."""
    fans = {Role.TOKEN_EMBEDDING: (1, 1), Role.MLP_IN: (1, 4), Role.READOUT: (1, 0)}
    for role, (grows_in, grows_out) in fans.items():
        ratios = []
        for rule in ("standard", "ntk"):
            numbers = []
            for n in (256, 1024):
                sizes = (n if grows_in else 512, grows_out * n if grows_out else 512)
                one = Everett(rule, n, 256, alignment=alignment)(Tensor(role, *sizes))
                numbers.append((one.init_std * one.multiplier, one.lr * one.multiplier))
            ratios.append([wide / narrow for narrow, wide in zip(*numbers, strict=True)])
        assert ratios[0] == pytest.approx(ratios[1]), role


def test_figure_13_s_powers_are_of_what_queries_and_keys_cause():
    """Of the shipped runs: keys at alpha_A = 1/2 move as N^(-1/2) by W_Q, W_K, as N^0 in all."""
    lines = {line.name: line for line in findings_of("bordelon/head_dimension_desktop")}
    place = "Adam, alpha_A = 1/2, t = 1: change of k"
    for cause, power in (("by W_Q, W_K", -0.5), ("in all", 0.0)):
        assert lines[f"{place} {cause}"].estimate.value == pytest.approx(power, abs=0.05)


def test_the_limit_of_large_n_needs_alpha_one_under_sgd():
    """Of the shipped runs, after 200 steps: at 1/2 A moves with a power of N, at 1 it does not."""
    lines = {line.name: line for line in findings_of("bordelon/head_dimension")}
    for alpha, low, high in (("1", -0.1, 0.1), ("1/2", 0.4, 0.6)):
        power = lines[f"SGD, alpha_A = {alpha}, t = 200: change of A in all"].estimate.value
        assert low < power < high


def test_the_two_captions_of_the_decoder_stand_beside_each_number():
    lines = findings_of("bordelon/decoder")
    both = {line.published for line in lines if "minus that at 1/2, H" in line.name}
    assert both == {"7a: > 0, 12: < 0"}
