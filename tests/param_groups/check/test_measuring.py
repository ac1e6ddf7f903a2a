"""What the coordinate check measures is what a loop by hand sees; what is no check is refused."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from param_groups import Depth, Everett, PlanError, Role, Rule, plan
from param_groups.check import judging
from param_groups.check.judging import judge_optimizers
from param_groups.check.measuring import ALONG, Check, measure, rms_along, scanned
from param_groups.check.slopes import GROWS, OK, UNKNOWN, VANISHES, fit
from tests.param_groups.check import planted
from tests.param_groups.wrapped import ruled

ALONG = "readout" + ALONG


class Mlp(nn.Module):
    """One hidden matrix, dropout, and a module that is never called."""

    def __init__(self, width):
        super().__init__()
        self.first = nn.Linear(8, width, bias=False)
        self.hidden = nn.Linear(width, width, bias=False)
        self.idle = nn.Linear(width, width, bias=False)
        self.dropout = nn.Dropout(0.5)
        self.readout = nn.Linear(width, 4, bias=False)

    def forward(self, x):
        return self.readout(torch.relu(self.dropout(self.hidden(torch.relu(self.first(x))))))


RULES = ruled("""first.weight patch_embedding, hidden.weight mlp_in, idle.weight mlp_out,
readout.weight readout""")


def _mlp_plan(width, model=None):
    rule = Everett("standard", width, 32)
    return plan(model or Mlp(width), RULES, rule, lr=1e-3)


def own(width, seed=0, **changes):
    model = Mlp(width)
    batch = (torch.randn(4, 8, generator=torch.Generator().manual_seed(seed)), torch.arange(4))
    loss = lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])
    fields = {"model": model, "plan": _mlp_plan(width, model), "batches": [batch], "loss": loss}
    return Check(**{**fields, **changes})


def test_what_is_measured_is_what_a_loop_by_hand_sees():
    """Outputs without dropout on the first batch, two steps with it under torch's own Adam."""
    said: list[str] = []
    measured = measure(own, (16, 32, 64), steps=2, seeds=(3,), progress=said.append)
    assert said[0] == "width 16 seed 3 (1 of 3)" and said[-1] == "width 64 seed 3 (3 of 3)"
    rms = {(p.quantity, p.name, p.width, p.step): p.rms for p in measured.points}
    task = own(16, 3)
    model, (x, y) = task.model, task.batches[0]
    task.plan.initialise(model, 3)
    start = model.eval()(x).detach()
    hidden = model.hidden.weight.detach().clone()
    optimizer = torch.optim.Adam(task.plan.groups(model), betas=(0.9, 0.999))
    torch.manual_seed(3)
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(model.train()(x), y).backward()
        optimizer.step()
    change = model.eval()(x).detach() - start
    gradient = torch.softmax(start, 1) - F.one_hot(y, 4)
    along = (change * F.normalize(gradient)).sum(1)
    expected = {
        ("init", "readout", 16, 0): start,
        ("change", "readout", 16, 2): change,
        ("change", ALONG, 16, 2): along,
        ("update", "hidden.weight", 16, 2): model.hidden.weight.detach() - hidden,
    }
    for key, value in expected.items():
        assert rms[key] == pytest.approx(value.square().mean().sqrt().item(), rel=1e-4), key
    assert measured.silent == ("idle",)
    assert rms["update", "idle.weight", 16, 2] == 0


def test_outputs_are_compared_on_the_first_batch_with_later_steps_on_later_ones():
    seen = []

    def loss(model, batch):
        seen.append((model.training, int(batch[1][0])))
        return F.cross_entropy(model(batch[0]), batch[1])

    batches = [(torch.randn(4, 8), torch.full((4,), i)) for i in range(2)]
    build = lambda w, s: own(w, s, batches=batches, loss=loss)
    measure(build, (16, 32, 64), steps=3, seeds=(0,))
    one = [(False, 0), (True, 0), (False, 0), (True, 1), (False, 0), (True, 0), (False, 0)]
    assert seen == 3 * one


def test_a_tensor_that_is_never_used_gets_no_verdict():
    slopes = fit(measure(own, (16, 32, 64), steps=1, seeds=(0, 1)))
    (idle,) = [found for found in slopes if found.name == "idle.weight"]
    assert (idle.verdict, idle.note) == (UNKNOWN, "zero")


def test_a_check_depends_on_its_seeds_alone():
    """Dropout included, whatever the caller's generator has drawn before."""
    runs = []
    for before in (1, 2):
        torch.manual_seed(before)
        runs.append(measure(own, (16, 32, 64), steps=1, seeds=(0,)).points)
    assert runs[0] == runs[1]
    assert measure(own, (16, 32, 64), steps=1, seeds=(1,)).points != runs[0]


def test_the_component_along_the_gradient():
    """Positions without a gradient do not count; the sizes of gradients do not matter."""
    change = torch.tensor([[3.0, 4.0], [1.0, 0.0], [9.0, 9.0]])
    gradient = torch.tensor([[0.0, 2.0], [-5.0, 0.0], [0.0, 0.0]])
    assert rms_along(change, gradient) == pytest.approx(math.sqrt((16 + 1) / 2))


class Deep(nn.Module):
    """Blocks whose matrices stand in a Sequential."""

    def __init__(self, width, depth):
        linear = lambda: nn.Linear(width, width, bias=False)
        super().__init__()
        self.first = nn.Linear(8, width, bias=False)
        blocks = (nn.Sequential(linear(), nn.ReLU(), linear()) for _ in range(depth))
        self.blocks = nn.ModuleList(blocks)
        self.readout = nn.Linear(width, 4, bias=False)
        self.multiplier = 2 / depth

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = x + self.multiplier * block(x)
        return self.readout(x)


def deep(depth, seed, width=32):
    model = Deep(width, depth)
    inner = (Rule("blocks.*.0.weight", Role.MLP_IN), Rule("blocks.*.2.weight", Role.MLP_OUT))
    rules = (RULES[0], *inner, RULES[-1])
    rule = Depth(Everett("standard", width, 32), depth=depth, base_depth=2)
    found = plan(model, rules, rule, lr=1e-3, applied={"residual_multiplier": model.multiplier})
    # By mistake the first matrix of every block has a rate that falls with the depth.
    rows = (
        replace(row, lr=row.lr / depth) if row.name.endswith(".0.weight") else row
        for row in found.rows
    )
    return own(width, seed, model=model, plan=replace(found, rows=tuple(rows)))


def test_blocks_of_several_depths_are_compared_at_equal_relative_depths():
    result = measure(deep, (2, 4, 8), steps=1, seeds=(0,))
    assert scanned(result.plans) == "depth"
    slopes = {s.name: s for s in fit(result) if s.quantity == "update"}
    wrong, right = (slopes[f"blocks.1.{layer}.weight"] for layer in (0, 2))
    assert right.slope == pytest.approx(0, abs=0.1) and right.aim == 0
    assert wrong.slope == pytest.approx(-1, abs=0.1) and wrong.verdict == VANISHES


def test_width_and_depth_together_are_no_scan_of_the_depth():
    plans = {size: deep(size // 16, 0, width=size).plan for size in (32, 64, 128)}
    assert scanned(plans) == "width"
    alone = "module 'blocks.2' is in the model of width 32 or 64 only"
    with pytest.raises(PlanError, match=alone):
        measure(lambda size, seed: deep(size // 16, seed, size), (32, 64, 128), steps=1, seeds=(0,))


def test_what_is_done_after_init_is_checked():
    """A readout that starts at zero: gradients below it are those after the first step."""
    zero = lambda model: nn.init.zeros_(model.readout.weight)
    measured = measure(lambda w, s: own(w, s, after_init=zero), (16, 32, 64), steps=2, seeds=(0,))
    slopes = {(one.quantity, one.name, one.step): one for one in fit(measured)}
    assert slopes["init", "readout", 0].note == "zero"
    found = slopes["gradient", "hidden", 1]
    assert found.aim == -1 and found.slope == pytest.approx(-1, abs=0.25)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, None),
        ({"lr": 0.5}, None),  # one factor for all is a schedule's
        ({"lr": 0.5, "only": "hidden.weight"}, ("hidden.weight", "optimiser's rate")),
        ({"lr": 0.0, "only": "hidden.weight"}, ("hidden.weight", "optimiser's rate")),
        ({"lr": 0.0}, None),  # a schedule that warms up from 0
        ({"lr_scale": 0.5, "only": "hidden.weight"}, ("hidden.weight", "optimiser's rate")),
        ({"eps": 10.0, "only": "hidden.weight"}, ("hidden.weight", "optimiser's epsilon")),
        ({"weight_decay": 2.0}, ("hidden.weight", "optimiser's weight_decay")),
        ({"kind": torch.optim.SGD}, ("hidden.weight", "optimiser's kind")),
    ],
)
def test_the_optimiser_that_is_given_is_compared_with_the_plan(change, said):
    def build(width, seed):
        model = Mlp(width)
        decay = {"weight_decay": 0.1, "decay_mode": "independent"}
        made = plan(model, RULES, Everett("standard", width, 32), lr=1e-3, **decay)
        groups = []
        for group in made.groups(model, check=False):
            for name, tensor in zip(group["param_names"], group["params"], strict=True):
                own_group = {**group, "params": [tensor], "param_names": [name]}
                if change.get("only", name) == name:
                    for key in change.keys() - {"only", "kind"}:
                        own_group[key] = own_group.get(key, 1.0) * change[key]
                groups.append(own_group)
        optimizer = change.get("kind", torch.optim.AdamW)(groups)
        return own(width, seed, model=model, plan=made, optimizer=optimizer)

    measured = measure(build, (16, 32, 64), steps=1, seeds=(0,))
    found = {(one.name, one.quantity) for one in judge_optimizers(measured.plans, measured.held)}
    assert said in found if said else not found
    if "only" in change:
        assert found == {said}


class Unnamed(torch.optim.Optimizer):
    """Steps of one size by sign, as many rules have at first."""

    def __init__(self, groups):
        super().__init__(groups, {"lr": 1e-3, "eps": 1e-8, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for tensor in group["params"]:
                if tensor.grad is not None:
                    tensor -= group["lr"] * tensor.grad.sign()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, ""),
        ({"class": "Lion"}, "not read: lion, an optimiser of no known family: its rate and decay"),
        ({"class": "Mine"}, "not read: mine, an optimiser of no known family: which power of the"),
        ({"class": "SignSGD"}, "not read: signsgd, an optimiser of no known family"),
        ({"class": "Mine", "algorithm": "adam"}, ""),  # its groups say it
        ({"trust_ratio": 0.1}, "not read: 'trust_ratio' of its group ("),
        ({"class": "Adam", "weight_decay": 0.1}, "not read: weight_decay of Adam, which is added"),
    ],
)
def test_what_of_an_optimiser_is_not_read_is_not_judged_however_right_its_numbers_are(change, said):
    def build(width, seed):
        check = own(width, seed)
        groups = check.plan.groups(check.model, check=False)
        groups = [{**g, **{k: v for k, v in change.items() if k != "class"}} for g in groups]
        name = change.get("class", "AdamW")
        kind = getattr(torch.optim, name, None) or type(name, (Unnamed,), {})
        return replace(check, optimizer=kind(groups))

    measured = measure(build, (16, 32, 64), steps=1, seeds=(0,))
    lines = judging.not_judged(measured.plans, measured.held)
    assert [line[: len(said)] for line in lines] == ([said] if said else [])


def test_a_router_may_start_small_and_may_not_grow():
    subject = planted.Subject(
        "mup", lambda n: Everett("mup", n, 32), model=(("experts", True),), sizes=(32, 64, 128)
    )

    def words(number, power):
        case = planted.Case(subject, "router", number, power)

        def build(width, seed):
            model = planted.built(subject)[width][0]
            return Check(model, case.plan(width), [planted.batch(model, seed)], planted.loss)

        measured = measure(build, subject.sizes, steps=1, seeds=range(6))
        slopes = [one for one in fit(measured) if "router" in one.name]
        start = next(one for one in slopes if (one.quantity, one.part) == ("init", "router"))
        assert number == "start" or start.slope == pytest.approx(-0.5, abs=0.25)
        outputs = {one.verdict for one in slopes if one.quantity in ("init", "change")}
        return outputs, {one.verdict for one in slopes if one.quantity == "update"}

    outputs, updates = words("rate", 0.0)
    assert outputs <= {OK, UNKNOWN} and updates == {OK}
    assert words("rate", 1.0)[1] == {GROWS} and words("rate", -1.0)[1] == {VANISHES}
    assert GROWS in words("start", 1.0)[0]
