"""What people read: a plan as text, the README's code, and the examples of docstrings."""

import doctest
import importlib
import inspect
import io
import pkgutil
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import param_groups
from param_groups import Depth, Everett, Plan, Role, Rule, plan, schedule, traced
from param_groups.check import judging

README = (Path(__file__).parents[2] / "param_groups" / "README.md").read_text(encoding="utf-8")


def made():
    model = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 9, bias=False))
    rules = [Rule("0.weight", "token_embedding"), Rule("1.weight", "readout")]
    return model, plan(model, rules, Everett("mup", 8, 4), lr=0.1, absorb_multipliers=True)


def test_a_plan_and_a_trace_show_their_table_and_do_not_wrap_in_a_notebook():
    build = lambda n: nn.Sequential(nn.Embedding(9, n), nn.Linear(n, 9, bias=False))
    _, numbers = made()
    assert str(numbers) == numbers.table()
    for value in (numbers, traced(build, lambda model: model(torch.tensor([1, 2])))):
        assert repr(value) == str(value) == f"{value}" and ".weight" in repr(value)
        shown = value._repr_html_()
        assert shown.startswith('<pre style="white-space: pre;') and ".weight" in shown
        assert "<" not in shown[1:].replace("</pre>", "")  # a tensor's name is text


@pytest.mark.parametrize(
    ("rule", "options", "asks"),
    [
        *((Everett(name, 8, 4, qk_exponent=-0.5), {}, True) for name in ("mup", "mean_field")),
        (Depth(Everett("mup", 8, 4, qk_exponent=-0.5), depth=1), {}, True),
        (Everett("mup", 8, 4, qk_exponent=-0.5), {"head_dim": 4}, False),
        (Everett("mup", 8, 4), {"head_dim": 4, "applied": {"attention_scale": 1 / 4}}, False),
        (Everett("standard", 8, 4), {}, False),
    ],
)
def test_a_plan_asks_for_the_head_dimension_where_its_rates_rest_on_it(rule, options, asks):
    """Heads that grow with the width are the commonest way to grow a model of one's own."""
    model = nn.ModuleDict({name: nn.Linear(8, 8, bias=False) for name in ("query", "key")})
    rules = [Rule(f"{name}.weight", name, trunk=False) for name in model]
    numbers = plan(model, rules, rule, lr=0.1, absorb_multipliers=True, **options)
    assert ("plan with head_dim=" in str(numbers)) == numbers.head_dim_is_missing() == asks
    again = Plan.from_dict(numbers.to_dict())
    words = judging.not_judged({8: again, 16: again}, {})
    assert any("head dimension" in one for one in words) == asks


def test_resuming_as_the_readme_says_trains_on_bit_for_bit():
    """Five lines, after which the next steps are those of a run that was not interrupted."""
    code = re.search(r"## Resume\n\n```python\n(.*?)```", README, re.S)[1]
    assert len(code.splitlines()) == 5

    def steps(model, optimizer, scheduler, count):
        for step in range(count):
            model(torch.tensor([step])).square().sum().backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

    model, numbers = made()
    numbers.initialise(model, seed=0)
    optimizer = torch.optim.AdamW(numbers.groups(model))
    scheduler = schedule(optimizer, total_steps=1000, warmup_steps=100)
    steps(model, optimizer, scheduler, 3)
    saved = {"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    torch.save(saved, file := io.BytesIO())
    file.seek(0)
    saved = torch.load(file, weights_only=False)
    other, numbers = made()
    other.load_state_dict(model.state_dict())
    scope = {"numbers": numbers, "model": other, "saved": saved, "torch": torch}
    exec(code, scope | {"schedule": schedule}, scope)
    steps(model, optimizer, scheduler, 3)
    steps(other, scope["optimizer"], scope["scheduler"], 3)
    assert scope["optimizer"].param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] > 0
    assert all(map(torch.equal, model.parameters(), other.parameters()))


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
