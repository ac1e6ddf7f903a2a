"""examples/integrations.py: each trains or steps with the plan's rates, in at most 15 lines."""

import inspect
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from examples import integrations
from param_groups import Everett, Muon, PlanError, Role, Rule, plan, rules_for
from param_groups.optim import MuonAdamW
from tests.processes import finished

ROOT = Path(__file__).resolve().parents[1]
FUNCTIONS = [
    f
    for _, f in inspect.getmembers(integrations, inspect.isfunction)
    if f.__module__ == integrations.__name__
]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_an_integration_has_at_most_15_lines(function):
    assert len(inspect.getsource(function).splitlines()) <= 15


def perceptron(around=None):
    """(model, plan) with three different rates, or for Muon with four tensors."""
    layers = (nn.Linear(4, 16, False), nn.Linear(16, 16, False), nn.Linear(16, 2, False))
    roles = (Role.PATCH_EMBEDDING, Role.MLP_IN, Role.READOUT)
    if around:
        layers = (layers[0], nn.Linear(16, 64, False), nn.Linear(64, 16, False), layers[2])
        roles = (roles[0], Role.MLP_IN, Role.MLP_OUT, roles[2])
        rules = [Rule(f"{i}.weight", role) for i, role in enumerate(roles)]
        decay = {"weight_decay": 0.01, "decay_mode": "independent", "absorb_multipliers": True}
        model = nn.Sequential(*layers)
        return model, plan(model, rules, around(Everett("mup", 16, 4)), lr=0.01, **decay)
    model = nn.Sequential(*layers)
    rules = [Rule(f"{i}.weight", role) for i, role in enumerate(roles)]
    return model, plan(model, rules, Everett("standard", 16, 4, gamma_readout=2), lr=0.01)


def loss_of(model, x):
    return model(x).square().mean()


def rates_over_plan(optimizer, numbers):
    groups = optimizer.param_groups
    assert {n for g in groups for n in g["param_names"]} == {row.name for row in numbers.rows}
    return {round(g["lr"] / numbers[g["param_names"][0]].lr, 9) for g in groups}


def test_plain_torch():
    model, numbers = perceptron()
    numbers.initialise(model, seed=0)
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    before = loss_of(model, x).item()
    optimizer = integrations.plain_torch(model, numbers, [x] * 20, loss_of)
    assert loss_of(model, x).item() < before / 2
    assert rates_over_plan(optimizer, numbers) == {0.1}


@pytest.mark.xdist_group("huggingface")
@pytest.mark.parametrize(
    "train",
    [integrations.hugging_face, integrations.hugging_face_later, integrations.hugging_face_muon],
)
def test_hugging_face(train, tmp_path):
    """Four steps under its linear schedule: the groups are the plan's, and every rate ends at 0."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 16, "n_positions": 8, "n_embd": 32, "n_head": 2, "n_layer": 1}
    ends = {"tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 0}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **ends))
    rule, kind = Everett("mup", 32, 16, qk_exponent=-0.5), torch.optim.AdamW
    if train is integrations.hugging_face_muon:
        rule, kind = Muon(rule), MuonAdamW
    numbers = plan(model, rules_for(model), rule, lr=0.01, absorb_multipliers=True)
    numbers.initialise(model, seed=0)
    before = model.lm_head.weight.clone()
    ids = torch.arange(8)
    quiet = {"report_to": "none", "save_strategy": "no", "disable_tqdm": True}
    arguments = transformers.TrainingArguments(
        tmp_path, max_steps=4, per_device_train_batch_size=2, use_cpu=True, **quiet
    )
    optimizer = train(model, numbers, arguments, [{"input_ids": ids, "labels": ids}] * 8)
    assert type(getattr(optimizer, "optimizer", optimizer)) is kind
    groups = optimizer.param_groups
    initial = {name: group["initial_lr"] for group in groups for name in group["param_names"]}
    assert initial == {row.name: row.lr for row in numbers.rows} and len({*initial.values()}) > 1
    assert rates_over_plan(optimizer, numbers) == {0.0}
    assert not torch.equal(model.lm_head.weight, before)


def test_timm():
    pytest.importorskip("timm")
    model, numbers = perceptron()
    numbers.initialise(model, seed=0)
    optimizer, scheduler = integrations.timm_optimizer(model, numbers)
    loss_of(model, torch.ones(1, 4)).backward()
    for epoch, factor in ((1, 0.5), (5, 0.5), (10, 0.0)):
        scheduler.step(epoch)
        optimizer.step()
        assert rates_over_plan(optimizer, numbers) == {factor}


def stepped(model, optimizers, seed=0):
    """Three steps on gradients of one seed."""
    for step in range(3):
        draw = torch.Generator().manual_seed(seed + step)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=draw)
        for optimizer in optimizers:
            optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def configured(model, numbers, muon=torch.optim.Muon):
    """The optimisers of torchtitan's container, by its rules: a pattern's first match counts."""
    groups, claimed = {"DistMuon": [], "AdamW": []}, set()
    for config in integrations.torchtitan(numbers):
        hits = [n for n, _ in model.named_parameters() if re.search(config["pattern"], n)]
        assert hits and not claimed & {*hits}
        claimed |= {*hits}
        params = [model.get_parameter(name) for name in hits]
        groups[config["optimizer_name"]].append({"params": params, **config["optimizer_kwargs"]})
    assert claimed == {row.name for row in numbers.rows}
    return muon(groups["DistMuon"]), torch.optim.AdamW(groups["AdamW"], betas=(0.9, 0.95))


@pytest.mark.parametrize("make", [integrations.torchs_muon, configured])
def test_torchs_muon_beside_adamw_and_torchtitan_take_the_plans_steps(make):
    """torch's adjusts the rate by the shape, and decays by the rate before: both are undone."""
    (model, numbers), (other, _) = perceptron(Muon), perceptron(Muon)
    numbers.initialise(model, seed=0)
    numbers.initialise(other, seed=0)
    start = [parameter.detach().clone() for parameter in model.parameters()]
    ours = stepped(model, [numbers.optimizers(model)])
    theirs = stepped(other, make(other, numbers))
    for first, one, two in zip(start, ours, theirs, strict=True):  # theirs is in bfloat16
        assert (one - two).norm() < 0.05 * (one - first).norm()
    shapes = {row.shape: row for row in numbers.rows if row.optimizer == "muon"}
    rates = {tuple(group["names"]): group for group in numbers.exported()}
    up = rates["1.weight",]
    assert up["lr"] == pytest.approx(shapes[64, 16].lr / 2)
    assert up["lr"] * up["weight_decay"] == pytest.approx(0.01)


def test_what_another_muon_takes_as_one_matrix_is_not_exported():
    model = nn.MultiheadAttention(16, 2, bias=False)
    rule = Muon(Everett("mup", 16, 4, qk_exponent=-0.5))
    rules = [Rule("in_proj_weight", "qkv"), Rule("out_proj.weight", "attention_output")]
    numbers = plan(model, rules, rule, lr=0.01, absorb_multipliers=True)
    with pytest.raises(PlanError, match="'in_proj_weight' .* several matrices .* separate"):
        numbers.exported()


def test_accelerate():
    accelerate = pytest.importorskip("accelerate")
    model, numbers = perceptron(Muon)
    numbers.initialise(model, seed=0)
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    before = loss_of(model, x).item()
    accelerator = accelerate.Accelerator(cpu=True)
    optimizer = integrations.accelerated(model, numbers, accelerator, [x] * 10, loss_of)
    assert loss_of(model, x).item() < before
    assert rates_over_plan(optimizer, numbers) == {1.0}


@pytest.mark.parametrize("around", [None, Muon])
def test_lightning(around):
    model, numbers = perceptron(around)
    numbers.initialise(model, seed=0)
    trainer = SimpleNamespace(estimated_stepping_batches=20)
    module = SimpleNamespace(model=model, numbers=numbers, trainer=trainer)
    made = integrations.configure_optimizers(module)
    made["optimizer"].step()
    made["lr_scheduler"]["scheduler"].step()
    assert rates_over_plan(made["optimizer"], numbers) == {0.5}


SHARDED = """
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from examples import integrations
from tests.test_integrations import loss_of, perceptron, rates_over_plan
distributed.init_process_group("gloo")
whole, numbers = perceptron()
numbers.initialise(whole, seed=0)
plain = torch.optim.AdamW(numbers.groups(whole))
model, _ = perceptron()
optimizer = integrations.sharded(model, numbers, init_device_mesh("cpu", (2,)))
x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
for one, steps in ((whole, plain), (model, optimizer)):
    for _ in range(3):
        loss_of(one, x).backward()
        steps.step()
        steps.zero_grad()
assert rates_over_plan(optimizer, numbers) == {1.0}
for name, parameter in model.named_parameters():
    torch.testing.assert_close(parameter.full_tensor(), whole.get_parameter(name))
distributed.destroy_process_group()
print("equal")
"""


def test_sharded_and_compiled(tmp_path):
    """Two processes with gloo train as one does; compiled where there is a compiler."""
    script = tmp_path / "sharded.py"
    script.write_text(SHARDED)
    more = {} if shutil.which("g++") else {"TORCHDYNAMO_DISABLE": "1"}
    done = finished(script, ranks=2, cwd=ROOT, PYTHONPATH=ROOT, **more)
    assert done.returncode == 0, done.err[-3000:]
    assert done.out.count("equal") == 2
