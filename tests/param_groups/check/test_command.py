"""`param-groups check` passes what is right and fails what is wrong, by its exit code."""

import csv
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

import examples.coordinate_check_mlp as example
from param_groups import Everett, PlanError, Prescription
from param_groups.__main__ import main
from param_groups.check import command, failed, fit, judge, measure
from param_groups.check.slopes import BAD, GROWS, VANISHES

EXAMPLE = Path(example.__file__)
BASE = example.BASE_WIDTH


@dataclass(frozen=True)
class Mine(Prescription):
    """muP's numbers under another name, with the rates of one kind of layer times r^power."""

    width: int
    kind: str = "hidden"
    power: float = 0.0
    optimizer: str = "adam"

    def __call__(self, tensor):
        found = Everett("mup", self.width, BASE)(tensor)
        wrong = (self.width / BASE) ** self.power if tensor.role.facts.kind == self.kind else 1.0
        return replace(found, lr=found.lr * wrong)


def scaled(kind, power):
    return lambda n: Everett("mup", n, BASE, **{f"gamma_{kind}": (n / BASE) ** power})


KINDS = {"embedding": "0.weight", "hidden": "2.weight", "readout": "6.weight"}
POWERS = (-1, -0.5, 0.5, 1)
# rule -> tensor that is wrong, and its verdict from numbers and from what is measured.
RULES = {
    "right": (scaled("hidden", 0), None),
    "right, of one's own": (lambda n: Mine(n), None),
    "one rate": (lambda n: Everett("standard", n, BASE, alignment="global"), ("2.weight", GROWS)),
    "base width forgotten": (lambda n: Everett("mup", n, n), ("2.weight", GROWS)),
    "base width turned round": (
        lambda n: Everett("mup", n, BASE**2 / n), ("2.weight", VANISHES)
    ),
    **{
        f"{kind} r^{power}": (scaled(kind, power), (name, GROWS if power > 0 else VANISHES))
        for kind, name in KINDS.items() for power in POWERS
    },
    **{
        f"of one's own, {kind} r^{power}": (
            lambda n, kind=kind, power=power: Mine(n, kind, power),
            (name, GROWS if power > 0 else VANISHES),
        )
        for kind, name in KINDS.items() for power in POWERS
    },
}  # fmt: skip


@pytest.mark.parametrize("rule", RULES)
def test_the_example_passes_under_a_right_rule_and_fails_under_every_wrong_one(rule, monkeypatch):
    """At the default widths, by the numbers alone and by what training shows alone."""
    make, wrong = RULES[rule]
    monkeypatch.setattr(example, "Everett", lambda name, width, base_width: make(width))
    measured = measure(example.task, steps=2, seeds=(0, 1))
    numbers, slopes = judge(measured.plans), fit(measured)
    assert failed(slopes, numbers) == (wrong is not None)
    for found in (numbers, slopes):
        words = {
            (one.name, one.quantity): one.verdict
            for one in found
            if one.verdict in BAD and one.quantity in ("rate", "update")
        }
        if wrong is None:
            assert not words
        else:
            assert words[wrong[0], "rate" if found is numbers else "update"] == wrong[1]


def test_the_example_leaves_its_table_and_its_picture(tmp_path, capsys):
    main(["check", str(EXAMPLE), "--out", str(tmp_path), "--steps", "2"])
    out = capsys.readouterr().out
    assert "numbers, before training: all 7 as expected (Everett et al., Table 1)" in out
    assert "passed: 12 ok" in out
    assert {file.suffix for file in tmp_path.iterdir()} == {".csv", ".json", ".png"}
    result = json.loads((tmp_path / "coordinate_check.json").read_text())
    assert result["passed"] and result["widths"] == [64, 128, 256, 512]
    with open(tmp_path / "coordinate_check.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    # At first 4 modules, 3 inputs, 4 gradients; 4 + 1 changes and 7 tensors per step.
    assert len(rows) == 4 * 3 * (4 + 3 + 4 + 2 * (5 + 7))


def test_a_wrong_rule_is_named_and_ends_with_exit_code_1(tmp_path, capsys):
    text = EXAMPLE.read_text()
    (tmp_path / "wrong.py").write_text(text.replace("base_width=BASE_WIDTH)", "base_width=width)"))
    words = ["--widths", "64", "128", "256", "--steps", "1", "--seeds", "1"]
    with pytest.raises(SystemExit) as ended:
        main(["check", str(tmp_path / "wrong.py"), *words, "--out", str(tmp_path / "out")])
    out = capsys.readouterr().out
    assert ended.value.code == 1 and "FAILED" in out
    assert "base_width constant  64, 128, 256 at 64, 128, 256  one" in out
    assert not json.loads((tmp_path / "out/coordinate_check.json").read_text())["passed"]


FILE = str(EXAMPLE)
# The example with an optimiser of a class of its own, whose steps and numbers are right.
FOREIGN = (
    EXAMPLE.read_text().replace("task(", "right(")
    + """

def task(width, seed):
    check = right(width, seed)
    groups = check.plan.groups(check.model, check=False)
    check.optimizer = type("Mine", (torch.optim.Optimizer,), dict(step=step))(groups, dict(lr=1.0))
    return check


@torch.no_grad()
def step(optimizer):
    for group in optimizer.param_groups:
        for tensor in group["params"]:
            tensor -= group["lr"] * tensor.grad.sign()
"""
)


def test_what_a_rate_depends_on_and_is_not_judged_is_no_pass(tmp_path, capsys):
    (tmp_path / "mine.py").write_text(FOREIGN)
    with pytest.raises(SystemExit) as ended:
        main(["check", str(tmp_path / "mine.py"), "--out", str(tmp_path), "--steps", "1"])
    out = capsys.readouterr().out
    assert ended.value.code == 2 and "\nnot read: mine, an optimiser of no known family" in out
    assert "NOT ALL JUDGED (1 left): 12 ok" in out and "passed" not in out
    result = json.loads((tmp_path / "coordinate_check.json").read_text())
    assert not result["passed"] and result["not_judged"][0].startswith("not read: mine")


NO_SCALAR = EXAMPLE.read_text().replace("batch[1])", "batch[1]).expand(2)")


@pytest.mark.parametrize(
    ("words", "text", "error"),
    [
        (["check"], "import absent\n", "ModuleNotFoundError: No module named 'absent'"),
        (["check"], NO_SCALAR, "RuntimeError: grad can be implicitly created only for scalar"),
        (["audit"], "def build(width):\n    return 1 / 0\n", "ZeroDivisionError"),
        (["audit"], "def build(width, depth):\n    pass\n", "error: mine.py: build is called as"),
        (["audit", "--depths", "2", "4"], "def build(width): pass\n", "as build(width, depth)"),
    ],
)
def test_an_error_in_the_users_file_is_no_verdict_and_keeps_its_traceback(
    words, text, error, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(SystemExit) as ended:
        main([words[0], "mine.py", *words[1:]])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and error in said.splitlines()[-1]
    assert ("Traceback" in said) == ("error: " not in said)


def test_a_file_may_import_a_module_beside_it(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "module_beside.py").write_text("def task(width, seed):\n    return width\n")
    (tmp_path / "mine.py").write_text("from module_beside import task\n")
    with pytest.raises(PlanError, match="returned int"):
        command.file_target(tmp_path / "mine.py").build(3, 0)
