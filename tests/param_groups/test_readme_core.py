"""The README's core is the package's plan, and the examples of docstrings print what they say."""

import doctest
import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import pytest
import torch

import param_groups
from param_groups import Everett, Role, Rule, plan

README = (Path(__file__).parents[2] / "param_groups/README.md").read_text()


def test_the_core_in_the_readme_is_the_plan():
    code = re.findall(r"```python\n(.*?)```", README, re.S)[0]
    assert len(code.splitlines()) <= 60 and len(README.split()) <= 3000
    names: dict = {}
    torch.manual_seed(0)
    exec(code, names)
    model = names["model"]
    rules = [
        Rule("tokens.weight", Role.TOKEN_EMBEDDING),
        Rule("blocks.*.weight", Role.HIDDEN),
        Rule("readout.weight", Role.READOUT),
    ]
    rule = Everett("mup", 256, 64, embedding_std=1.0)
    numbers = plan(model, rules, rule, lr=3e-3, absorb_multipliers=True)
    groups = {group["params"][0]: group for group in names["optimizer"].param_groups}
    for name, tensor in model.named_parameters():
        row, group = numbers[name], groups[tensor]
        assert group["lr"] == pytest.approx(row.lr), name
        assert group["eps"] == pytest.approx(row.eps), name
        assert tensor.std().item() == pytest.approx(row.init_std, rel=0.02), name


def test_the_plan_of_ones_own_model_in_the_readme_needs_no_rules_by_hand():
    core, _, _, mine = re.findall(r"```python\n(.*?)```", README, re.S)[:4]
    names: dict = {}
    exec(core, names)
    names |= {"build": names["Model"], "run": lambda model: model(torch.arange(50)[None])}
    exec(mine, names)
    rates = {row.role: row.lr for row in names["numbers"].rows}
    # m (n / b)^-c times the global rate, with m = sqrt(n), 1, 1 / sqrt(n): the table of the core.
    assert rates == pytest.approx(
        {"token_embedding": 3e-3 * 32 / 2, "hidden": 3e-3 / 4, "readout": 3e-3 / 32 / 2}
    )


def test_the_prescriptions_in_the_readme_go_around_each_other_and_around_ones_own():
    algebra, mine = re.findall(r"```python\n(.*?)```", README, re.S)[1:3]
    names = {**vars(param_groups), "small": None, "roles": []}
    names["initial_stds"] = lambda *_: dict.fromkeys(map(str, Role), 0.02)
    exec(algebra, names)
    assert names["rule"].form == "Tied(Muon(Tuned(Decay(EpsFollows(Depth(Everett))))))"
    exec(mine, names)
    tensor = param_groups.Tensor("query", 1024, 1024)
    assert names["Mine"]()(tensor).lr == 0.25
    assert param_groups.Depth(names["Mine"](), 32, 2, alpha=0.5)(tensor).lr == 0.25 / 4


def test_examples_of_docstrings_print_what_they_say():
    modules = pkgutil.walk_packages(param_groups.__path__, "param_groups.")
    results = [doctest.testmod(importlib.import_module(one.name)) for one in modules]
    assert sum(one.attempted for one in results) > 5 and not any(one.failed for one in results)


RECORDS = {"Layout", "Plan", "PlanError", "Prescription", "Role"}  # nobody calls them with numbers


@pytest.mark.parametrize("name", param_groups.__all__)
def test_every_exported_name_says_what_it_takes_and_raises_and_has_an_example(name):
    exported = getattr(param_groups, name)
    text = inspect.getdoc(exported)
    wanted = ["Args:", "Returns:"] if inspect.isfunction(exported) else ["Args:"]
    wanted = [] if name in RECORDS else wanted
    wanted += [] if name == "Row" else [">>>"]
    assert not [part for part in wanted if part not in text]
    assert "Raises PlanError" not in text  # the section says it
