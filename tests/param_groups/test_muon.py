"""Muon in a plan: updates against an SVD and torch, rates against formulas, and refusals."""

import copy
import functools
import math
import pickle

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import param_groups
from param_groups import Decay, Depth, Everett, Muon, guard, optim, plan
from param_groups.optim import MuonAdamW, orthogonalised
from param_groups.plan import Plan
from tests.param_groups.wrapped import ruled
from training.optim import optimizers
from training.optim.optimizers import build


class Block(nn.Module):
    def __init__(self, n=32):
        super().__init__()
        self.embedding = nn.Embedding(50, n)
        self.up, self.down = nn.Linear(n, 4 * n, bias=False), nn.Linear(4 * n, n, bias=False)
        self.norm = nn.LayerNorm(n, bias=False)
        self.readout = nn.Linear(n, 50, bias=False)

    def forward(self, ids):
        x = self.embedding(ids)
        return self.readout(x + self.down(torch.relu(self.up(self.norm(x)))))


RULES = ruled("""embedding.weight token_embedding, up.weight mlp_in, down.weight mlp_out,
norm.weight norm_scale, readout.weight readout""")


def spectral(n, base, **fields):
    """Muon beside muP's AdamW."""
    return Muon(Everett("mup", n, base), **fields)


def planned(n=32, base=32, **fields):
    model = Block(n)
    numbers = {"absorb_multipliers": True, "eps": 1e-8, "lr": 0.02}
    made = plan(model, RULES, spectral(n, base, **fields), **numbers)
    made.initialise(model, seed=0)
    return model, made


def train(model, optimizer, steps=range(4)):
    for step in steps:
        ids = torch.randint(50, (8, 9), generator=torch.Generator().manual_seed(step))
        loss = nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def matrix(rows, columns, seed=0):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(24, 24), (16, 64), (64, 16)])
def test_an_update_has_the_directions_of_the_svd_and_singular_values_near_one(shape):
    g = matrix(*shape)
    u, _, v = torch.linalg.svd(g.double(), full_matrices=False)
    inside = u.T @ orthogonalised(g).double() @ v.T  # diagonal: the iteration turns no direction
    values = inside.diagonal()
    assert (inside - values.diag()).abs().max() < 1e-4
    assert values.min() > 0.6 and values.max() < 1.2


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e30])
def test_an_update_does_not_see_the_gradients_scale(scale):
    g = matrix(12, 20)
    torch.testing.assert_close(orthogonalised(g * scale), orthogonalised(g), rtol=0, atol=1e-5)
    assert not orthogonalised(torch.zeros(3, 4)).any()


def test_steps_are_torchs_muon_within_the_error_of_its_bfloat16():
    w, other = (nn.Parameter(matrix(24, 24)) for _ in range(2))
    ours = MuonAdamW([{"params": [w], "lr": 0.1, "weight_decay": 0.3, "optimizer": "muon"}])
    theirs = torch.optim.Muon([other], lr=0.1, weight_decay=0.3, momentum=0.95)
    for step in range(3):
        w.grad, other.grad = (matrix(24, 24, 10 + step) for _ in range(2))
        before = w.detach().clone()
        ours.step()
        theirs.step()
        assert (w - other).norm() < 0.05 * (w - before).norm()
        with torch.no_grad():
            other.copy_(w)


def test_float32_and_bfloat16_agree_within_the_error_of_the_latter():
    g = matrix(16, 48)
    low = orthogonalised(g, dtype=torch.bfloat16)
    assert (low - orthogonalised(g)).norm() < 0.03 * low.norm()


def test_other_tensors_take_torchs_adamw_bit_for_bit():
    model, made = planned()
    pair = made.optimizers(model, betas=(0.9, 0.95))
    twin = copy.deepcopy(model)
    names = {row.name for row in made.rows if row.optimizer == "adam"}
    groups = [
        {**group, "params": [dict(twin.named_parameters())[n] for n in group["param_names"]]}
        for group in made.groups(model, several=True)
        if group["optimizer"] == "adam"
    ]
    adamw = torch.optim.AdamW(groups, betas=(0.9, 0.95), foreach=True)
    for step in range(3):
        train(model, pair, [step])
        for (name, mine), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
            theirs.grad = mine.grad.clone() if name in names else None
        adamw.step()
    state = twin.state_dict()
    assert names and all(torch.equal(model.state_dict()[name], state[name]) for name in names)


def test_a_checkpoint_goes_on_with_the_same_bits():
    model, made = planned()
    optimizer = made.optimizers(model)
    train(model, optimizer, range(3))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(model, optimizer, range(3, 5))
    again = Block()
    again.load_state_dict(saved[0])
    made.apply_multipliers(again)
    other = made.optimizers(again)
    other.load_state_dict(saved[1])
    train(again, other, range(3, 5))
    assert all(map(torch.equal, model.parameters(), again.parameters()))


# As torch's own optimisers


@pytest.mark.parametrize(("rows", "columns"), [(32, 32), (16, 64), (64, 16)])
def test_a_matrix_in_a_stack_becomes_what_it_becomes_alone_to_the_bit(rows, columns):
    stack = torch.stack([matrix(rows, columns, seed) * 10.0**-seed for seed in range(5)])
    for one, other in zip(orthogonalised(stack), stack, strict=True):
        assert torch.equal(one, orthogonalised(other))


@pytest.mark.parametrize("size", [32, 256])
def test_an_optimiser_of_stacks_is_one_per_matrix_to_the_bit(size, monkeypatch):
    """A CPU takes matrices of 256 one by one; both are the rule of the docstring."""
    shapes = [(size, size)] * 3 + [(size, 2 * size)] * 2 + [(2 * size, size)]
    group = {"lr": 0.1, "weight_decay": 0.3, "optimizer": "muon"}
    ends = []
    for entries in (optim.SMALL, 0):
        monkeypatch.setattr(optim, "SMALL", entries)
        matrices = [nn.Parameter(matrix(*shape, seed)) for seed, shape in enumerate(shapes)]
        optimizer = MuonAdamW([{"params": matrices, **group}])
        for step in range(3):
            for number, parameter in enumerate(matrices):
                parameter.grad = matrix(*parameter.shape, 10 * step + number)
            optimizer.step()
        ends.append(matrices)
    assert all(map(torch.equal, *ends))


def test_a_step_whose_gradients_overflow_leaves_all_as_it_is():
    model, made = planned()
    optimizer = MuonAdamW(made.groups(model, several=True), fused=True)
    train(model, optimizer, range(2))
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"]))
    for parameter in model.parameters():
        parameter.grad.fill_(math.inf)
    optimizer.found_inf = torch.tensor(1.0)
    optimizer.step()
    after = (model.state_dict(), optimizer.state_dict()["state"])
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    optimizer.found_inf = torch.tensor(0.0)
    train(model, optimizer, [2])
    assert not torch.equal(model.up.weight, before[0]["up.weight"])


def pair(cls):
    """Matrices and vectors under torch's AdamW, or those of `up` and `down` under Muon."""
    model, made = planned()
    groups = made.groups(model, several=True)
    return model, cls(groups)


deep_copied = lambda *both: copy.deepcopy(both)
pickled = lambda *both: pickle.loads(pickle.dumps(both))


def with_the_state_of_sgd(model, optimizer):
    sgd = torch.optim.SGD([{"params": group["params"]} for group in optimizer.param_groups], 0.1)
    optimizer.load_state_dict(sgd.state_dict())
    return model, optimizer


def with_a_group_added(model, made, entries=(3,), **more):
    model.extra = nn.Parameter(torch.ones(entries))
    group = {"params": [model.extra], "param_names": ["extra"], **NUMBERS, **more}
    made.add_param_group(group)
    return model, made


def with_an_empty_group(model, optimizer):
    optimizer.add_param_group({"params": [], "param_names": [], **NUMBERS})
    return model, optimizer


def with_a_group_without_entries(model, made):
    return with_a_group_added(model, made, (0, 3), optimizer="muon")


def with_a_rate_that_is_a_tensor(model, optimizer):
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(group["lr"], dtype=torch.float64)
        group["fused"] = group["foreach"] = None
    return model, optimizer


NUMBERS = {"lr": 0.1, "eps": 1e-8, "weight_decay": 0.1}
CHANGES = [deep_copied, pickled, with_the_state_of_sgd, with_a_group_added, with_an_empty_group]
CHANGES += [with_a_group_without_entries, with_a_rate_that_is_a_tensor]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("cls", [torch.optim.AdamW, MuonAdamW, optimizers.Muon])
def test_it_is_handled_as_torchs_adamw_is(cls, change):
    """A table of what torch.optim.AdamW does, and ours alike; all go on to the same values."""
    make = functools.partial(cls, fused=True, betas=(0.9, 0.95))
    make = functools.partial(make, momentum=0.95) if cls is optimizers.Muon else make
    model, optimizer = pair(make)
    train(model, optimizer, range(2))
    if change is with_the_state_of_sgd:
        with pytest.raises((KeyError, ValueError)):  # torch's at the step, ours at once
            train(*change(model, optimizer), [2])
        return
    other, same = pair(make)
    train(other, same, range(2))
    model, optimizer = change(model, optimizer)
    train(model, optimizer, [2])
    train(other, same, [2])
    rounding = 1e-6 * (change is with_a_rate_that_is_a_tensor)  # another of torch's kernels
    torch.testing.assert_close(model.up.weight, other.up.weight, rtol=0, atol=rounding)
    if hasattr(model, "extra"):
        model.extra.grad = torch.ones_like(model.extra)
        optimizer.step()
        assert (model.extra < 1).all()


@pytest.mark.parametrize(
    "numbers",
    [
        *({"lr": math.nan}, {"lr": "0.1"}, {"weight_decay": None}, {"momentum": "a"}, {"parts": 3}),
        *({"betas": (0.9,)}, {"betas": 0.9}, {"betas": ("a", 0.9)}, {"betas": (0.9, 0.95, 1.0)}),
    ],
)
def test_a_group_out_of_range_is_not_added(numbers):
    """What is out of range is in refused.txt."""
    _, optimizer = pair(MuonAdamW)
    group = {"params": [nn.Parameter(torch.ones(3, 3))], "param_names": ["extra"], **NUMBERS}
    count = len(optimizer.param_groups)
    refused = TypeError if "parts" in numbers else ValueError
    with pytest.raises(refused, match=f"group's {next(iter(numbers))} is|not iterable"):
        optimizer.add_param_group({**group, "optimizer": "muon", **numbers})
    assert len(optimizer.param_groups) == count


FACTORS = {  # by hand, of up (out 4n, in n) and down (n, 4n)
    "spectral": lambda n: (2.0, 0.5),
    "original": lambda n: (2.0, 1.0),
    "match_rms": lambda n: (0.2 * math.sqrt(4 * n),) * 2,
}


@pytest.mark.parametrize("convention", FACTORS)
def test_rates_of_hidden_matrices_follow_the_convention_and_all_others_mup(convention):
    for n in (32, 128):
        _, made = planned(n, convention=convention, adam_factor=0.5)
        power = (n / 32) ** (-0.5 if convention == "match_rms" else 0)
        for name, factor in zip(("up.weight", "down.weight"), FACTORS[convention](n), strict=True):
            assert made[name].optimizer == "muon"
            assert made[name].lr == pytest.approx(0.02 * factor * power)
        mup = plan(Block(n), RULES, Everett("mup", n, 32), lr=0.01, absorb_multipliers=True)
        for name in ("embedding.weight", "norm.weight", "readout.weight"):
            assert made[name].lr == pytest.approx(mup[name].lr)
            assert made[name].optimizer == "adam" and made[name].init_std == mup[name].init_std


def test_the_powers_of_width_depth_and_decay_are_those_that_are_given():
    _, made = planned(128, convention="match_rms", rate_exponent=0.0)
    assert made["up.weight"].lr == pytest.approx(0.02 * 0.2 * math.sqrt(512))
    assert Depth(spectral(128, 32), depth=8, base_depth=2).forward().residual_multiplier == 0.25
    decay = {"weight_decay": 0.01, "decay_mode": "independent", "absorb_multipliers": True}
    made = plan(Block(128), RULES, Decay(spectral(128, 32), exponent=-1.0), lr=0.02, **decay)
    assert made["up.weight"].decay_per_step == pytest.approx(0.0025)
    assert made["embedding.weight"].decay_per_step == pytest.approx(0.01)


def test_a_table_names_muon_and_a_saved_plan_keeps_it():
    _, made = planned()
    assert "0.04 by Muon" in made.table()
    assert Plan.from_dict(made.to_dict()) == made


def test_it_trains():
    model, made = planned()
    optimizer = made.optimizers(model)
    handle = guard(optimizer, made)
    scheduler = param_groups.schedule(optimizer, "linear", total_steps=20)
    first = train(model, optimizer, [0])
    for _ in range(15):
        last = train(model, optimizer, [0])
        scheduler.step()
    handle.remove()
    assert last < first - 0.3


class Kernel(nn.Module):
    def __init__(self, kind=nn.Conv2d, n=8, out=8, **more):
        super().__init__()
        self.conv = kind(n, out, 3, bias=False, **more)


@pytest.mark.parametrize("name", ["adam", "adam_param_scaling", "muon"])
def test_fused_kernels_of_a_gpu_have_their_step_counts_there(name):
    """They read them by their address, which the CPU's memory does not answer."""
    with FakeTensorMode():
        param = torch.nn.Parameter(torch.empty(4, 8, device="cuda"))
        param.grad = torch.empty_like(param)
        group = {"params": [param], "lr": 0.1, "eps": 1e-8, "weight_decay": 0.0}
        optimizer = build(name, [{**group, "optimizer": "adam", "initial_lr": 0.1, "name": "a"}])
        optimizer.step()
    fused = getattr(optimizer, "_fused", False) or optimizer.param_groups[0].get("fused")
    assert not fused or optimizer.state[param]["step"].device.type == "cuda"
