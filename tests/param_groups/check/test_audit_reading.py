"""What the audit reads beside rates (factors, schedules, a Muon, one step), and what it cannot."""

import math
import re

import pytest
import timm.optim
import torch
from timm.scheduler import CosineLRScheduler
from torch import nn

from param_groups import Everett, Role, Rule, plan
from param_groups.check.reading import read
from param_groups.optim import orthogonalised
from tests.param_groups.check.test_audit import GPT, MATRICES, named, nanogpt, run, torchtitan

# What stands in groups beside their rates.


def scaled(n, key="lr_scale", decay_key="wd_mult", times=lambda n: 64 / n, applied=False):
    """muP's rates as a factor that the loop multiplies in: timm, MAE, nanoGPT-mup, Megatron."""
    model = GPT(n, std=1.0)
    for name, param in model.named_parameters():
        if param.dim() > 1 and name != "wte.weight":
            nn.init.normal_(param, std=param.shape[1] ** (-1.0 if name[0] == "l" else -0.5))
    matrices = named(model, *MATRICES, "lm_head.weight")
    rest = [p for p in model.parameters() if all(p is not one for one in matrices)]
    groups = [
        {"params": matrices, key: times(n), decay_key: 1 / times(n)},
        {"params": rest, key: 1.0, decay_key: 1.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1)
    for group in optimizer.param_groups if applied else ():
        group["lr"], group["weight_decay"] = 0.01 * group[key], 0.1 * group[decay_key]
    return model, optimizer


def warmed_by_timm(n):
    model, optimizer = scaled(n)
    CosineLRScheduler(optimizer, t_initial=10, warmup_t=5, warmup_lr_init=1e-6)
    return model, optimizer


def warmed_from_zero(n):
    model, optimizer = scaled(n, applied=True)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 100))
    return model, optimizer


FACTORED = [scaled, lambda n: scaled(n, applied=True), warmed_by_timm, warmed_from_zero]
FACTORED.append(lambda n: scaled(n, "lr_mult", "wd_scale"))
FACTORED.append(lambda n: scaled(n, "lr_factor", "decay_mult"))


@pytest.mark.parametrize("build", FACTORED)
def test_factors_and_schedules_are_read(capsys, build):
    code, text = run(capsys, build)
    assert code == 0 and "nearest rule: mup, full alignment\n" in text, text


@pytest.mark.parametrize("other", [1.0, 0.5])
def test_a_factor_of_0_switches_nothing_else_off(other):
    """timm, MAE: one group with its factor, and one that does not train or decay."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    factors = {"lr_scale": other, "wd_mult": other}, {"lr_scale": 1.0, "wd_mult": 0.0}
    groups = [{"params": [one.weight], **two} for one, two in zip(model, factors, strict=True)]
    first, second = read(model, [torch.optim.AdamW(groups, lr=0.1, weight_decay=0.5)]).values()
    assert first.lr == pytest.approx(0.1 * other) and second.lr == pytest.approx(0.1)
    assert first.decay == pytest.approx(0.05 * other**2) and second.decay == 0


def test_a_rate_of_0_before_the_first_step_is_no_missing_initial_lr():
    model = nn.Linear(4, 4, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
    assert read(model, [optimizer])["weight"].unread == ()
    now = read(model, [optimizer], now=True)["weight"]
    assert now.unread == ("lr is 0 before the first step",)


class Lion(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"lr": 1e-4, "betas": (0.9, 0.99)})


class Muon(torch.optim.Optimizer):
    """As people paste it into their own file; `adjust` is a factor that no group names."""

    def __init__(self, params, adjust=lambda out, ins: max(1, out / ins) ** 0.5, clip=None):
        super().__init__(params, {"lr": 0.02, "momentum": 0.95, "scaling": "own"})
        self.adjust, self.clip = adjust, clip

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            updates = [orthogonalised(p.grad.flatten(1)).view_as(p) for p in group["params"]]
            norm = sum(u.square().sum() for u in updates).sqrt()
            for p, update in zip(group["params"], updates, strict=True):
                share = min(1.0, self.clip / norm) if self.clip else 1.0
                p.sub_(update, alpha=group["lr"] * float(self.adjust(*p.shape[:2])) * share)


def with_muon(n, **options):
    """nanoGPT's tensors with somebody's own Muon for the matrices."""
    model = GPT(n)
    rest = [p for k, p in model.named_parameters() if "h." not in k or p.dim() < 2]
    return model, [Muon(named(model, *MATRICES), **options), torch.optim.AdamW(rest, lr=0.002)]


def changed(build, change):
    def other(n):
        model, optimizer = build(n)
        change(optimizer)
        return model, optimizer

    return other


def several_factors(optimizer):
    factors = [lambda step: 1.0, lambda step: 0.5]
    torch.optim.lr_scheduler.LambdaLR(optimizer, factors)


def group(**values):
    return lambda optimizer: optimizer.param_groups[0].update(values)


def all_groups(**values):
    return lambda optimizer: [one.update(values) for one in optimizer.param_groups]


def of_no_number(n):
    model, optimizer = nanogpt(n)
    model.ln_f.weight.data[0] = math.nan
    return model, optimizer


def of_two_families(n):
    model, optimizer = nanogpt(n)
    vectors = optimizer.param_groups.pop()["params"]
    return model, [optimizer, torch.optim.SGD(vectors, lr=0.1)]


coupled = lambda n: (m := GPT(n), torch.optim.Adam(m.parameters(), weight_decay=0.1))


@pytest.mark.parametrize(
    ("build", "line"),
    [
        (changed(nanogpt, group(layer_rank=3)), "'layer_rank' of its group (10 tensors, such as"),
        (changed(nanogpt, group(is_last_layer=True)), "'is_last_layer' of its group"),
        (changed(nanogpt, group(lr_scale="half")), "lr_scale is 'half'"),
        (changed(nanogpt, all_groups(lr=0.0)), "lr is 0, and no initial_lr says"),
        (changed(nanogpt, all_groups(lr=None)), "lr is None"),
        (changed(nanogpt, group(weight_decay="0.1")), "weight_decay is '0.1' (10 tensors"),
        (changed(nanogpt, group(eps=())), "eps is ()"),
        (changed(nanogpt, group(lr=torch.ones(2))), "lr is tensor([1., 1.])"),
        (changed(nanogpt, group(fallback_lr_scale=None)), "fallback_lr_scale is None"),
        (changed(nanogpt, all_groups(lr=math.nan)), "lr is nan"),
        (changed(nanogpt, group(weight_decay=-0.1)), "decay is -"),
        (changed(nanogpt, group(eps=math.inf)), "eps is inf"),
        (of_no_number, "init is nan (1 tensors, such as ln_f.weight)"),
        (changed(nanogpt, several_factors), "lr is 1, 0.5 times initial_lr: a schedule"),
        (lambda n: (m := GPT(n), Lion(m.parameters())), "lion, an optimiser of no known family"),
        (coupled, "weight_decay of Adam, which is added to the gradient"),
        (with_muon, "what its Muon multiplies the rate of a matrix by; --step tells (8 tensors"),
        (with_muon, "'scaling' of its optimiser; --step tells"),
        (of_two_families, "adam beside sgd: rules are for one family"),
    ],
)
def test_what_is_not_read_is_no_agreement(capsys, tmp_path, build, line):
    code, text = run(capsys, build)
    assert code == 2 and f"not read: {line}" in text and "every tensor follows" not in text
    code, text = run(capsys, build, "--save", tmp_path / "a", "--against", tmp_path / "a")
    assert code == 2 and f"not read: {line}" in text


class DecayOfItsOwn(torch.optim.AdamW):
    def __init__(self, params, **options):
        super().__init__(params, **options)
        self.defaults["wd_power"] = 1.0
        for one in self.param_groups:
            one["wd_power"] = 1.0  # the decay times the inputs


def test_no_step_tells_what_only_the_decay_uses(capsys):
    """A step is taken without decay."""
    build = lambda n: (m := GPT(n), DecayOfItsOwn(m.parameters(), weight_decay=0.1))
    code, text = run(capsys, build, "--step")
    assert code == 2
    assert "not read: 'wd_power' of its optimiser, on which its decay may depend" in text


def test_a_key_that_says_nothing_of_rates_can_be_ignored(capsys):
    build = changed(nanogpt, all_groups(tag="mine"))
    assert run(capsys, build)[0] == 2
    assert run(capsys, build, "--ignore", "tag")[0] == 0


def layered(n, factors=(0.25, 0.5, 1.0)):
    model = GPT(n, layers=3)
    groups = [
        {"params": list(block.parameters()), "lr_scale": factor}
        for block, factor in zip(model.h, factors, strict=True)
    ]
    groups.append({"params": [p for k, p in model.named_parameters() if "h." not in k]})
    return model, torch.optim.AdamW(groups, lr=1e-3)


def test_layer_decay_is_a_remark_and_a_block_unlike_the_others_is_not(capsys):
    code, text = run(capsys, layered)
    assert code == 0 and "lr times 2 from block to block (layer decay)" in text
    code, text = run(capsys, lambda n: layered(n, (0.25, 0.3, 1.0)))
    assert code == 1 and "deviates: h.1.up.weight: lr 0.0003, where similar tensors" in text


def libraries_muon(n, library, choice):
    model = nn.Sequential(nn.Embedding(50, n), nn.Linear(n, n), nn.Linear(n, 50))
    nn.init.normal_(model[2].weight, std=n**-0.5)
    hidden = [model[1].weight]
    rest = [p for p in model.parameters() if p is not hidden[0]]
    if library == "torch":
        muon = torch.optim.Muon(hidden, lr=1e-3, adjust_lr_fn=choice, weight_decay=0.0)
        return model, [muon, torch.optim.AdamW(rest, lr=1e-3, weight_decay=0.0)]
    groups = [{"params": hidden}, {"params": rest, "use_fallback": True}]
    return model, timm.optim.Muon(groups, lr=1e-3, adjust_lr_fn=choice)


@pytest.mark.parametrize(("choice", "power"), [("match_rms_adamw", 0.5), ("original", 0)])
@pytest.mark.parametrize("step", [[], ["--step"]])
def test_timms_muon_and_torchs_get_one_verdict(capsys, choice, power, step):
    outcomes = []
    for library in ("torch", "timm"):
        outcomes.append(run(capsys, lambda n, lib=library: libraries_muon(n, lib, choice), *step))
        code, text = outcomes[-1]
        kinds = re.findall(r"^(\S+) +\S+ +(\S+) +", text, re.MULTILINE)[1:6]
        assert [name for name, kind in kinds if kind == "muon"] == ["1.weight"]
        assert code == (1 if power else 0)
        assert not power or f"1.weight: lr goes as size^{power}, expected size^0" in text
    verdicts = [re.findall(r"^(?:deviates|nearest).*", text, re.MULTILINE) for _, text in outcomes]
    assert verdicts[0] == verdicts[1]


# The library mup, its form in our words: `infshape` by hand, base width 64.


def of_mup(n, optimizer="adamw", zero=False):
    model = nn.Sequential(nn.Embedding(50, n), nn.Linear(n, 4 * n), nn.Linear(4 * n, n))
    model.append(nn.Linear(n, 50))
    times = n / 64
    with torch.no_grad():  # MuReadout's values are multiplied by the root of its width's factor
        for param in model[3].parameters():
            param.mul_(0.0 if zero else times**0.5)
    split = {2: [], 1: []}
    for module, param in [(m, p) for m in model for p in m.parameters()]:
        matrix = param.dim() == 2 and module in (model[1], model[2])
        split[2 if matrix else 1].append(param)
    if optimizer == "sgd":  # MuSGD: what grows in one axis has a rate as the width
        groups = [{"params": split[2]}, {"params": split[1][:-1], "lr": 0.1 * times}]
        groups.append({"params": split[1][-1:]})
        return model, torch.optim.SGD(groups, lr=0.1)
    matrices = {"params": split[2], "lr": 0.01 / times, "weight_decay": 0.1 * times}
    return model, torch.optim.AdamW([matrices, {"params": split[1]}], lr=0.01, weight_decay=0.1)


@pytest.mark.parametrize("fields", [{}, {"zero": True}, {"optimizer": "sgd"}])
def test_the_library_mup_is_known_by_its_form(capsys, fields):
    code, text = run(capsys, lambda n: of_mup(n, **fields))
    assert code == 0 and "nearest rule: mup, full alignment, the readout's multiplier in" in text
    if not fields:
        forgotten = changed(of_mup, lambda o: o.param_groups[0].update(lr=0.01, weight_decay=0.1))
        assert "as microsoft/mup" not in run(capsys, forgotten)[1]


# Decay and epsilon within a kind.


@pytest.mark.parametrize(
    ("names", "key", "value", "line"),
    [
        (["ln_f.weight"], "weight_decay", 0.1, "ln_f.weight: decay some, where similar"),
        (["h.1.norm.weight"], "weight_decay", 0.1, "h.1.norm.weight: decay some"),
        (["h.0.up.weight"], "weight_decay", 0.0, "h.0.up.weight: decay none"),
        (["*.down.weight"], "weight_decay", 0.0, "h.*.down.weight: decay none"),
        (["*.down.weight"], "eps", 0.0, "h.*.down.weight: eps none"),
        (["h.1.qkv.bias"], "eps", 1e-6, "h.1.qkv.bias: eps 1e-06, where similar"),
    ],
)
def test_a_tensor_unlike_its_kind_is_named(capsys, names, key, value, line):
    def build(n):
        model, optimizer = nanogpt(n)
        odd = named(model, *names)
        moved = {}
        for one in optimizer.param_groups:
            moved = one if any(p is odd[0] for p in one["params"]) else moved
            one["params"] = [p for p in one["params"] if all(p is not other for other in odd)]
        decay = {"weight_decay": moved["weight_decay"]}
        optimizer.add_param_group({"params": odd, **decay, key: value})
        return model, optimizer

    code, text = run(capsys, build)
    assert code == 1 and f"deviates: {line}" in text and text.count("deviates") == 1


@pytest.mark.parametrize("power", [-1.0, -0.5, 0.5, 1.0])
def test_an_epsilon_of_another_power_than_table_1s_is_named(capsys, power):
    def build(n):
        model, optimizer = torchtitan(n)
        optimizer.param_groups[0]["eps"] = 1e-8 * (n / 64) ** power
        return model, optimizer

    code, text = run(capsys, build)
    assert code == 1 and "weight: eps goes as size^" in text


@pytest.mark.parametrize("sizes", [[64], [256], [128, 256], [64, 256]])
@pytest.mark.parametrize("key", ["lr_scale", "weight_decay", "eps"])
def test_a_number_that_is_zero_at_some_sizes_follows_no_rule(capsys, key, sizes):
    """Between a zero and a number there is no power, which is no agreement either."""

    def build(n):
        model, optimizer = nanogpt(n)
        optimizer.param_groups[0] |= {"lr_scale": 1.0}
        optimizer.param_groups[0] |= {key: 0.0} if n in sizes else {}
        return model, optimizer

    code, text = run(capsys, build)
    number = {"lr_scale": "lr", "weight_decay": "decay"}.get(key, key)
    line = f"h.*.qkv.weight: {number} is 0 at {', '.join(map(str, sizes))} alone\n"
    assert code == 1 and line in text


def test_frozen_tensors_are_left_out(capsys):
    def build(n):
        model = GPT(n)
        for param in model.wte.parameters():
            param.requires_grad_(False)
        return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])

    code, text = run(capsys, build)
    assert code == 0 and "frozen, not judged: 1 tensors" in text


@pytest.mark.parametrize("sizes", [[64], [128], [128, 256]])
def test_a_tensor_that_is_frozen_at_some_sizes_follows_no_rule(capsys, sizes):
    def build(n):
        model, optimizer = nanogpt(n)
        model.wte.weight.requires_grad_(n not in sizes)
        return model, optimizer

    code, text = run(capsys, build)
    at = ", ".join(map(str, sizes))
    assert code == 1 and text.count("wte.weight: ") == 1
    assert f"deviates: wte.weight: frozen at {at} alone\n" in text


@pytest.mark.parametrize(
    "factor", [{"lr_scale": 0.0}, {"lr": 0.0, "lr_scale": 0.0}, {"lr": 0.0, "initial_lr": 0.0}]
)
def test_a_tensor_that_its_factor_keeps_still_is_said(capsys, factor):
    def build(n):
        model = GPT(n)
        rest = [p for p in model.parameters() if p is not model.wte.weight]
        groups = [{"params": [model.wte.weight], **factor}, {"params": rest, "lr_scale": 1.0}]
        return model, torch.optim.AdamW(groups, lr=0.01)

    code, text = run(capsys, build)
    assert code == 0 and "rate 0, not judged: 1 tensors, such as wte.weight" in text


class Sequence(nn.Sequential):
    def __init__(self, n):
        layers = [nn.Linear(n, n, bias=False) for _ in range(2)]
        super().__init__(nn.Embedding(50, n), *layers, nn.Linear(n, 50, bias=False))


def test_a_sequence_is_no_stack_of_blocks(capsys):
    def build(n):
        model = nn.ModuleDict({"net": Sequence(n)})
        rules = [Rule("*.0.weight", Role.TOKEN_EMBEDDING), Rule("*.3.weight", Role.READOUT)]
        rules.append(Rule("*.[12].weight", Role.HIDDEN))
        made = plan(model, rules, Everett("mup", n, 64), lr=0.01, absorb_multipliers=True)
        made.initialise(model, seed=0)
        return model, torch.optim.AdamW(made.groups(model))

    assert run(capsys, build)[0] == 0


# One step.


class Kernels(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.first, self.conv = nn.Conv2d(3, n, 4), nn.Conv2d(n, n, 3)
        self.up, self.head = nn.Linear(n, 2 * n), nn.Linear(2 * n, 10)


def with_kernel(n, flat=True):
    """A Muon that takes convolutions; of `flat` the factor is that of (out, in times kernel)."""
    model = Kernels(n)
    factor = lambda p: (max(p.shape[0], p[0].numel()) if flat else max(p.shape[-2:])) ** 0.5

    class Conv(Muon):
        @torch.no_grad()
        def step(self):
            for p in self.param_groups[0]["params"]:
                update = orthogonalised(p.grad.flatten(1)).view_as(p)
                p.sub_(update, alpha=self.param_groups[0]["lr"] * 0.2 * factor(p))

    matrices = [model.conv.weight, model.up.weight]
    rest = [p for p in model.parameters() if all(p is not one for one in matrices)]
    return model, [Conv(matrices), torch.optim.AdamW(rest)]
