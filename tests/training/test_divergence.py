"""Numbers at their limits: divergence, steps that are skipped, half precision."""

import copy
import json
import math

import pytest
import torch

from param_groups.schedules import factor
from tests.run_folders import lines
from tests.training.tiny_task import IGNORE, Rows, task, weights
from training import environment, sharding
from training.data.sampling import sample_ids
from training.loop import train
from training.task import build_optimizer


def test_an_exploding_loss_is_a_result_with_the_step_it_happened(tmp_path):
    changes = {"optimizer__name": "sgd", "optimizer__lr": 1e4, "schedule__warmup_steps": 0}
    summary = train(task(**changes, training__log_every=5), tmp_path)
    assert summary["status"] == "diverged"
    assert summary["final_eval_loss"] is None
    exact = train(task(**changes, training__log_every=1), tmp_path / "exact")
    assert summary["step"] == exact["step"]  # found at the log line, dated to its step
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "diverged"


def test_nan_is_divergence_too(tmp_path):
    run = task()
    run.loss = lambda model, batch: model(*batch) * (math.nan if model.training else 1.0)
    summary = train(run, tmp_path)
    assert (summary["status"], summary["step"]) == ("diverged", 1)
    assert summary["first_train_loss"] is None


@pytest.mark.parametrize(("bound", "status"), [(1e9, "finished"), (1.01, "diverged")])
def test_the_divergence_bound_is_a_multiple_of_the_first_loss(tmp_path, bound, status):
    changes = {"optimizer__name": "sgd", "optimizer__lr": 30.0, "optimizer__momentum": 0.0}
    changes |= {"schedule__warmup_steps": 0, "training__divergence_factor": bound}
    assert train(task(**changes), tmp_path)["status"] == status


COMPILED = {"training__precision": "fp16", "training__compile": True}


@pytest.mark.parametrize(  # inductor takes half a minute to compile what aot_eager traces
    ("changes", "backend"),
    [
        ({"training__precision": "bf16"}, None),
        (COMPILED, "aot_eager"),
        pytest.param(COMPILED, "inductor", marks=pytest.mark.thorough),
    ],
)
def test_half_precision_and_compile_train_to_about_the_same_loss(
    tmp_path, monkeypatch, changes, backend
):
    real, given = torch.compile, []

    def compiled(model, **settings):
        given.append(settings["backend"])
        return real(model, **{**settings, "backend": backend})

    monkeypatch.setattr(torch, "compile", compiled)
    plain = train(task(), tmp_path / "plain")
    other = train(task(**changes), tmp_path / "other")
    assert other["final_eval_loss"] == pytest.approx(plain["final_eval_loss"], rel=0.03)
    assert set(given) == ({"inductor"} if backend else set())


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_copy_of_a_placed_model_runs_its_own_weights(precision):
    """As the observations' copy of the initial state does."""
    run, data = task(), Rows()
    run.plan.initialise(run.model, 0)
    sharding.place(run.model, torch.device("cpu"), precision)
    before, other = run.model(data.ids, data.targets), copy.deepcopy(run.model)
    torch.nn.init.zeros_(other.readout.weight)
    uniform = math.log(11) * (data.targets != IGNORE).sum().item()
    assert other(data.ids, data.targets).item() == pytest.approx(uniform, rel=1e-6)
    assert run.model(data.ids, data.targets).item() == before.item() != pytest.approx(uniform, 1e-5)


def test_fp16_is_a_plain_loop_with_torchs_scaler(tmp_path):
    """To the bit, through steps whose gradient is past fp16's range until the scale has fallen."""
    settings = {"training__precision": "fp16", "training__log_every": 1, "training__steps": 16}
    settings["optimizer__clip_norm"] = 1.0
    run, reference, data = task(**settings), task(**settings), Rows()
    run.loss = lambda model, batch: model(*batch) * 64.0
    summary = train(run, tmp_path)
    reference.plan.initialise(reference.model, 0)
    optimizer, model = build_optimizer(reference), reference.model
    scaler, scales, losses = torch.amp.GradScaler("cpu"), [], []
    for step in range(16):
        for group in optimizer.param_groups:
            now = factor("cosine", step, warmup_steps=2, total_steps=16)
            group["lr"] = group["initial_lr"] * now
        ids = sample_ids(len(data), 0, step * 8, 8)
        targets = data.targets[ids]
        with torch.autocast("cpu", torch.float16):
            loss = model(data.ids[ids], targets) * 64.0 * (1 / (targets != IGNORE).sum())
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        losses.append(loss.item())
    logged = [line for line in lines(tmp_path) if "train_loss" in line]
    assert [line["loss_scale"] for line in logged] == scales
    skipped = [line["step"] for line in lines(tmp_path) if "event" in line]
    before = [2.0**16, *scales]
    assert skipped == [n for n, scale in enumerate(scales, 1) if scale < before[n - 1]] != []
    assert summary["skipped_steps"] == len(skipped) < 10 and summary["precision"] == "fp16"
    kept = [
        (line["train_loss"], loss)
        for line, loss in zip(logged, losses, strict=True)
        if line["step"] not in skipped
    ]
    assert [a for a, _ in kept] == pytest.approx([b for _, b in kept], rel=1e-6)
    for name, value in model.state_dict().items():
        assert torch.equal(run.model.state_dict()[name], value), name


@pytest.mark.parametrize("units", [True, False])
def test_without_bf16_units_a_run_says_so_and_is_float32(tmp_path, monkeypatch, capsys, units):
    monkeypatch.setenv("TRAINING_EMULATE_BF16", "0")
    monkeypatch.setattr(environment, "has_bf16_units", lambda device: units)
    kinds = set()
    run = task(training__precision="bf16")
    run.model.readout.register_forward_hook(lambda *_: kinds.add(torch.is_autocast_enabled("cpu")))
    summary = train(run, tmp_path)
    assert summary["precision"] == ("bf16" if units else "fp32") and kinds == {units}
    logged = capsys.readouterr().err.splitlines()
    assert sum("has no bf16 units; this run is float32" in line for line in logged) == (not units)


def overflowing(run, steps, what="gradient"):
    """The task with an infinite gradient, or loss, in some steps, by number from 1."""
    loss, count = run.loss, iter(range(1, 1000))

    def blown(model, batch):
        value = loss(model, batch)
        if value.requires_grad and next(count) in steps:
            if what == "loss":
                return value * math.inf
            value.register_hook(lambda gradient: gradient * math.inf)
        return value

    run.loss = blown
    return run


@pytest.mark.parametrize("what", ["gradient", "loss"])
@pytest.mark.parametrize("steps", [{1}, {4, 7}, {4, 5, 6}])
def test_a_step_that_is_not_finite_is_skipped_and_an_event(tmp_path, what, steps):
    run = overflowing(task(training__skip_overflow=True, optimizer__clip_norm=1.0), steps, what)
    summary = train(run, tmp_path)
    assert (summary["status"], summary["skipped_steps"]) == ("finished", len(steps))
    events = [line for line in lines(tmp_path) if "event" in line]
    told = [(line["step"], line["skipped_steps"], line["event"]) for line in events]
    assert told == [(s, n, "gradient_overflow") for n, s in enumerate(sorted(steps), start=1)]
    assert lines(tmp_path)[-2]["skipped_steps"] == len(steps)
    assert all(torch.isfinite(value).all() for value in weights(run).values())
    plain = train(task(), tmp_path / "plain")
    assert summary["targets"] < plain["targets"]  # what was skipped was not trained on


def test_nothing_but_such_steps_is_divergence(tmp_path):
    run = task(training__skip_overflow=True, training__steps=150, training__log_every=10)
    summary = train(overflowing(run, set(range(3, 500))), tmp_path)
    assert (summary["status"], summary["step"]) == ("diverged", 102)


DECAY = "optimizer__decay_mode"


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adam_param_scaling", "adafactor"])
@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer__eps": 1e-320, "training__gradient_scale": True},
        {"optimizer__lr": 1e15, "schedule__warmup_steps": 0},
        {"optimizer__lr": 1e15, "optimizer__weight_decay": 0.99, DECAY: "independent"},
        {"optimizer__lr": 1e5, "optimizer__weight_decay": 9e-6, DECAY: "global"},
        {"optimizer__lr": 1e-300},
    ],
)
def test_numbers_at_the_ends_of_their_range_finish_or_diverge(tmp_path, optimizer, changes):
    changes = {"optimizer__name": optimizer, "training__log_every": 1, **changes}
    assert train(task(**changes), tmp_path)["status"] in ("finished", "diverged")


def test_an_infinite_gradient_of_a_finite_loss_is_logged_as_none(tmp_path):
    run = overflowing(task(training__gradient_scale=True, training__log_every=1), {2})
    train(run, tmp_path)
    assert lines(tmp_path)[1]["gradient_to_epsilon"] == {"token_embedding": None, "readout": None}
