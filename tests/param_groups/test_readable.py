"""What people read: a plan in a shell and in a notebook, and the README's five lines to resume."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from param_groups import Depth, Everett, Plan, Rule, plan, schedule, traced
from param_groups.check import judging

README = Path(__file__).parents[2] / "param_groups" / "README.md"


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
        (Everett("mup", 8, 4, qk_exponent=-0.5), {}, True),
        (Everett("mean_field", 8, 4, qk_exponent=-0.5), {}, True),
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
    assert (
        any("head dimension" in one for one in judging.not_judged({8: again, 16: again}, {}))
        == asks
    )


def test_resuming_as_the_readme_says_trains_on_bit_for_bit():
    """Five lines, after which the next steps are those of a run that was not interrupted."""
    code = re.search(r"## Resume\n\n```python\n(.*?)```", README.read_text(encoding="utf-8"), re.S)[
        1
    ]
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
    saved = torch.load(_saved(saved), weights_only=False)
    other, numbers = made()
    other.load_state_dict(model.state_dict())
    scope = {"numbers": numbers, "model": other, "saved": saved, "torch": torch}
    exec(code, scope | {"schedule": schedule}, scope)
    steps(model, optimizer, scheduler, 3)
    steps(other, scope["optimizer"], scope["scheduler"], 3)
    assert scope["optimizer"].param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] > 0
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)


def _saved(value):
    import io

    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file
