"""The training loop on a tiny model: normalisation, accumulation, divergence, files."""

import contextlib
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

from param_groups import Everett, Role, Rule, plan
from param_groups.schedules import factor
from training import environment
from training.config import validate
from training.errors import UserError
from training.loop import train
from training.sampling import sample_ids
from training.settings import RunConfig
from training.task import Task, build_optimizer

IGNORE = -100


class Tiny(nn.Module):
    """Bag of one token: embedding, then readout; sums the cross-entropy."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.readout = nn.Linear(8, 11, bias=False)

    def forward(self, ids, targets):
        logits = self.readout(self.embedding(ids))
        return F.cross_entropy(
            logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORE, reduction="sum"
        )


class Rows(Dataset):
    """Rows of tokens with a different number of targets each."""

    def __init__(self, size=37, seed=3):
        generator = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(0, 11, (size, 6), generator=generator)
        self.targets = (self.ids * 3 + 1) % 11
        for row in range(size):
            self.targets[row, 1 + row % 6 :] = IGNORE

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return self.ids[index], self.targets[index]


RULES = (Rule("embedding.weight", Role.TOKEN_EMBEDDING), Rule("readout.weight", Role.READOUT))


def task(**changes):
    """A task whose config is the default one with dotted keys changed."""
    settings = {
        "seed": 0,
        "optimizer": {"name": "adam", "lr": 0.05},
        "schedule": {"name": "cosine", "warmup_steps": 2},
        "training": {"steps": 12, "batch_size": 8, "log_every": 3},
    }
    for key, value in changes.items():
        section, _, name = key.partition("__")
        if name:
            settings[section][name] = value
        else:
            settings[section] = value
    config = validate(RunConfig, settings, "test")
    model = Tiny()
    prescription = Everett("standard", 8, 8, optimizer=config.optimizer.name)
    numbers = plan(model, RULES, prescription, **config.optimizer.numbers)
    return Task(
        config=config,
        model=model,
        plan=numbers,
        train_data=Rows(),
        eval_data=Rows(size=21, seed=4),
        loss=lambda model, batch: model(*batch),
        count=lambda batch: (batch[1] != IGNORE).sum(),
    )


def weights(run):
    return {name: value.clone() for name, value in run.model.state_dict().items()}


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_training_is_plain_torch_adamw_on_the_mean_loss_per_target(tmp_path):
    run = task()
    train(run, tmp_path)
    reference, data = Tiny(), Rows()
    run.plan.initialise(reference, 0)
    optimizer = torch.optim.AdamW(
        reference.parameters(), lr=0.05, betas=(0.9, 0.98), eps=1e-9, weight_decay=0
    )
    for step in range(12):
        now = factor("cosine", step, warmup_steps=2, total_steps=12)
        optimizer.param_groups[0]["lr"] = 0.05 * now
        ids = sample_ids(len(data), 0, step * 8, 8)
        targets = data.targets[ids]
        loss = reference(data.ids[ids], targets) / (targets != IGNORE).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(run.model.state_dict()[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("micro", [1, 3, 4])
def test_micro_batches_change_nothing_but_rounding(tmp_path, micro):
    whole, parts = task(), task(training__micro_batch_size=micro)
    train(whole, tmp_path / "whole")
    train(parts, tmp_path / "parts")
    for a, b in zip(weights(whole).values(), weights(parts).values()):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_the_same_config_gives_the_same_bits_whatever_the_loader(tmp_path):
    runs = [task(), task(training__data_workers=2)]
    torch.manual_seed(99)  # the global generator plays no part
    for index, run in enumerate(runs):
        train(run, tmp_path / str(index))
        torch.rand(5)
    assert all(torch.equal(a, b) for a, b in zip(*(weights(run).values() for run in runs)))
    assert metrics(tmp_path / "0") == metrics(tmp_path / "1")


def test_metrics_hold_train_and_eval_losses_at_their_steps(tmp_path):
    summary = train(task(training__eval_every=5), tmp_path)
    lines = metrics(tmp_path)
    assert [line["step"] for line in lines if "train_loss" in line] == [1, 3, 6, 9, 12]
    evals = {line["step"]: line["eval_loss"] for line in lines if "eval_loss" in line}
    assert list(evals) == [5, 10, 12]
    assert summary["final_eval_loss"] == evals[12]
    assert summary["best_eval_loss"] == min(evals.values())
    assert lines[0]["lr_factor"] == 0 and lines[1]["lr_factor"] == 1
    assert all(line["gradient_norm"] > 0 for line in lines if "train_loss" in line)


def test_evaluations_per_octave_are_a_function_of_the_step(tmp_path):
    run = task(training__eval_per_octave=2, training__steps=40)
    train(run, tmp_path)
    evals = [line["step"] for line in metrics(tmp_path) if "eval_loss" in line]
    assert evals == sorted({round(2 ** (k / 2)) for k in range(11)} | {40})
    assert "eval_per_octave" not in task().config.model_dump()["training"]  # run ids stay


def test_logged_losses_are_weighted_by_targets(tmp_path):
    train(task(training__log_every=100, optimizer__lr=1e-30, training__steps=4), tmp_path)
    run, data = task(), Rows()
    run.plan.initialise(run.model, 0)
    ids = sample_ids(len(data), 0, 8, 24)  # steps 2 to 4; step 1 is logged by itself
    loss = run.model(data.ids[ids], data.targets[ids]) / (data.targets[ids] != IGNORE).sum()
    assert metrics(tmp_path)[1]["train_loss"] == pytest.approx(loss.item(), rel=1e-5)


@pytest.mark.parametrize("samples", [None, 5])
def test_evaluation_counts_every_target_once_or_those_of_a_subset(tmp_path, samples):
    changes = {"training__eval_batch_size": 4, "training__eval_samples": samples}
    summary = train(task(optimizer__lr=1e-30, **changes), tmp_path)
    run, data = task(), Rows(size=21, seed=4)
    run.plan.initialise(run.model, 0)
    ids, targets = data.ids[:samples], data.targets[:samples]
    loss = run.model(ids, targets) / (targets != IGNORE).sum()
    assert summary["final_eval_loss"] == pytest.approx(loss.item(), rel=1e-6)


def test_clipping_bounds_the_step_of_sgd(tmp_path):
    changes = {"optimizer__name": "sgd", "optimizer__momentum": 0.0, "training__steps": 1,
               "schedule__warmup_steps": 0}
    free, clipped = task(**changes), task(**changes, optimizer__clip_norm=0.01)
    for index, run in enumerate((free, clipped)):
        train(run, tmp_path / str(index))
    start = task(**changes)
    start.plan.initialise(start.model, 0)
    lr = free.plan["readout.weight"].lr
    moved = [
        math.sqrt(sum(((a - b) / lr).square().sum().item()
                      for a, b in zip(weights(run).values(), weights(start).values())))
        for run in (free, clipped)
    ]
    assert moved[0] > 0.05
    assert moved[1] == pytest.approx(0.01, rel=1e-3)
    assert metrics(tmp_path / "1")[0]["gradient_norm"] == pytest.approx(moved[0], rel=1e-3)


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


def test_the_divergence_bound_is_a_multiple_of_the_first_loss(tmp_path):
    run = task(optimizer__name="sgd", optimizer__lr=30.0, schedule__warmup_steps=0,
               training__divergence_factor=1e9, optimizer__momentum=0.0)
    assert train(run, tmp_path / "a")["status"] == "finished"
    run = task(optimizer__name="sgd", optimizer__lr=30.0, schedule__warmup_steps=0,
               training__divergence_factor=1.01, optimizer__momentum=0.0)
    assert train(run, tmp_path / "b")["status"] == "diverged"


def test_the_summary_says_what_and_where(tmp_path):
    summary = train(task(), tmp_path)
    assert summary["status"] == "finished" and summary["step"] == 12
    assert summary["parameters"] == 2 * 11 * 8
    assert summary["parameters_by_role"] == {"token_embedding": 88, "readout": 88}
    assert summary["wall_seconds"] == summary["train_seconds"] + summary["eval_seconds"]
    visited = sample_ids(37, 0, 0, 12 * 8)
    assert summary["targets"] == (Rows().targets[visited] != IGNORE).sum()
    assert summary["targets_per_second"] > 0
    environment = summary["environment"]
    assert environment["packages"]["torch"] == torch.__version__.partition("+")[0]
    assert environment["device"] and environment["threads"] >= 1
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    assert not list(tmp_path.glob(".*"))  # no temporary files stay


@pytest.mark.parametrize(
    "changes",
    [{"training__precision": "bf16"}, {"training__compile": True},
     {"training__precision": "fp16", "training__compile": True}],
)  # fmt: skip
def test_half_precision_and_compile_train_to_about_the_same_loss(tmp_path, changes):
    plain = train(task(), tmp_path / "plain")
    other = train(task(**changes), tmp_path / "other")
    assert other["final_eval_loss"] == pytest.approx(plain["final_eval_loss"], rel=0.03)


def test_fp16_is_a_plain_loop_with_torchs_scaler(tmp_path):
    """To the bit, through steps whose gradient is past fp16's range until the scale has fallen."""
    settings = {"training__precision": "fp16", "training__log_every": 1, "training__steps": 16,
                "optimizer__clip_norm": 1.0}  # fmt: skip
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
    lines = [line for line in metrics(tmp_path) if "train_loss" in line]
    assert [line["loss_scale"] for line in lines] == scales
    skipped = [line["step"] for line in metrics(tmp_path) if "event" in line]
    before = [2.0**16, *scales]
    assert skipped == [n for n, scale in enumerate(scales, 1) if scale < before[n - 1]] != []
    assert summary["skipped_steps"] == len(skipped) < 10 and summary["precision"] == "fp16"
    kept = [(line["train_loss"], loss) for line, loss in zip(lines, losses)
            if line["step"] not in skipped]  # fmt: skip
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
    lines = capsys.readouterr().err.splitlines()
    assert sum("has no bf16 units; this run is float32" in line for line in lines) == (not units)


@pytest.mark.parametrize("decay_mode", ["independent", "global", "per_group"])
def test_decay_follows_the_schedule_in_every_mode(tmp_path, decay_mode):
    run = task(optimizer__weight_decay=0.01, optimizer__decay_mode=decay_mode)
    run.loss = lambda model, batch: model(*batch) * 0.0
    train(run, tmp_path)
    start = task()
    start.plan.initialise(start.model, 0)
    peak = {"independent": 0.01, "global": 0.05 * 0.01, "per_group": 0.05 * 0.01}[decay_mode]
    shrink = math.prod(
        1 - peak * factor("cosine", step, warmup_steps=2, total_steps=12)
        for step in range(12)
    )
    torch.testing.assert_close(run.model.readout.weight, start.model.readout.weight * shrink)


class Rates:
    """A recorder of each step's rates over the plan's."""

    def __init__(self, plan):
        self.plan, self.seen = plan, []

    def start(self, run):
        self.groups = run.optimizer.param_groups
        return []

    def around(self, step):
        self.seen.append([g["lr"] / self.plan[g["param_names"][0]].lr for g in self.groups])
        return contextlib.nullcontext()

    def after(self, step):
        pass


@pytest.mark.parametrize("shape", ["cosine", "linear", "constant"])
def test_every_groups_rate_is_the_plans_times_one_factor(tmp_path, shape):
    run = task(schedule__name=shape, schedule__floor=0.1)
    run.plan = plan(run.model, RULES, Everett("standard", 8, 2, gamma_readout=2), lr=0.05)
    run.recorders = [Rates(run.plan)]
    train(run, tmp_path)
    wanted = [factor(shape, n, warmup_steps=2, total_steps=12, floor=0.1) for n in range(12)]
    assert run.recorders[0].seen == [pytest.approx([now, now], rel=1e-15) for now in wanted]


class Placed(Rows):
    """Rows asked for by place; an evaluation row by number. Keeps the places, in this process."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.seen = []

    def __getitem__(self, place):
        self.seen.append(place)
        return super().__getitem__(place.index)


def by_epoch(**changes):
    """The tiny task with whole epochs, and accuracy measured beside the loss."""
    run = task(training__eval_every=4, **changes)
    run.by_epoch, run.train_data = True, Placed()

    def measure(model, batch):
        ids, targets = batch[0], batch[1]
        logits = model.readout(model.embedding(ids))
        right = ((logits.argmax(-1) == targets) & (targets != IGNORE)).sum()
        return {"loss": run.loss(model, (ids, targets)), "top1": right}

    run.measure = measure
    run.eval_collate = lambda samples: [torch.stack(part) for part in zip(*samples)] + ["whole"]
    run.eval_count = lambda batch: (batch[1] != IGNORE).sum() if batch[2] == "whole" else 1 / 0
    return run


def test_a_task_by_epoch_sees_places_and_logs_epochs(tmp_path):
    run = by_epoch()
    train(run, tmp_path)
    assert [place.epoch for place in run.train_data.seen[::8]] == [0] * 4 + [1] * 4 + [2] * 4
    assert [line["epoch"] for line in metrics(tmp_path) if "eval_top1" in line] == [1, 2, 3]
    assert metrics(tmp_path)[0]["epoch"] == 0.25


def test_what_is_measured_is_a_mean_per_target_logged_and_summarised(tmp_path):
    run = by_epoch()
    summary = train(run, tmp_path)
    data = run.eval_data
    with torch.no_grad():
        logits = run.model.readout(run.model.embedding(data.ids))
    kept = data.targets != IGNORE
    top1 = ((logits.argmax(-1) == data.targets) & kept).sum().item() / kept.sum().item()
    lines = [line for line in metrics(tmp_path) if "eval_top1" in line]
    assert lines[-1]["eval_top1"] == summary["final_eval_top1"] == pytest.approx(top1)
    values = [line["eval_top1"] for line in lines]
    assert summary["best_eval_top1"] == max(values)
    assert summary["best_eval_top1_step"] == lines[values.index(max(values))]["step"]
    assert summary["best_eval_loss"] == min(line["eval_loss"] for line in lines)


def test_speed_has_a_log_of_its_own_so_that_metrics_repeat(tmp_path):
    train(task(), tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "timing.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [line["step"] for line in metrics(tmp_path)][:-1]
    for line in lines:
        assert line["samples_per_second"] > 0 and 0 <= line["waiting_for_data"] <= 1


def test_the_floor_in_units_of_the_rate_is_that_fraction(tmp_path):
    rate = task(schedule__min_lr=0.01)
    share = task(schedule__floor=0.01 / 0.05)
    train(rate, tmp_path / "rate")
    train(share, tmp_path / "share")
    assert metrics(tmp_path / "rate") == metrics(tmp_path / "share")
    train(task(), tmp_path / "plain")
    assert metrics(tmp_path / "rate") != metrics(tmp_path / "plain")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schedule__min_lr": 0.01, "schedule__floor": 0.1}, "say the same; keep one"),
        ({"schedule__steps": 11}, "schedule.steps 11 is less than training.steps 12"),
        ({"schedule__min_lr": 0.1}, "schedule.min_lr 0.1 is more than optimizer.lr 0.05"),
    ],
)
def test_a_floor_that_makes_no_sense_is_refused(changes, message):
    with pytest.raises(UserError, match=message):
        task(**changes)


class Unreadable(Rows):
    def __getitem__(self, index):
        raise UserError("data.path: image x.jpg cannot be read")


@pytest.mark.parametrize("workers", [0, 1])
def test_a_mistake_found_in_a_data_worker_keeps_its_one_line(tmp_path, workers):
    run = task(training__data_workers=workers)
    run.train_data = Unreadable()
    with pytest.raises(UserError) as caught:
        train(run, tmp_path)
    assert str(caught.value) == "data.path: image x.jpg cannot be read"


def test_no_readable_evaluation_sample_is_one_line(tmp_path):
    run = task()
    run.eval_data.targets[:] = IGNORE
    with pytest.raises(UserError, match="no evaluation sample could be read"):
        train(run, tmp_path)


def test_what_the_plan_drew_can_be_changed_before_training(tmp_path):
    run = task(training__steps=1, schedule__warmup_steps=1)  # a first step at rate 0

    @torch.no_grad()
    def zero_a_row(model):
        model.embedding.weight[3] = 0

    run.after_init = zero_a_row
    train(run, tmp_path)
    assert (run.model.embedding.weight[3] == 0).all()
    assert (run.model.embedding.weight[2] != 0).any()


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
    events = [line for line in metrics(tmp_path) if "event" in line]
    told = [(line["step"], line["skipped_steps"], line["event"]) for line in events]
    assert told == [(s, n, "gradient_overflow") for n, s in enumerate(sorted(steps), start=1)]
    assert metrics(tmp_path)[-2]["skipped_steps"] == len(steps)
    assert all(torch.isfinite(value).all() for value in weights(run).values())
    plain = train(task(), tmp_path / "plain")
    assert summary["targets"] < plain["targets"]  # what was skipped was not trained on


def test_nothing_but_such_steps_is_divergence(tmp_path):
    run = task(training__skip_overflow=True, training__steps=150, training__log_every=10)
    summary = train(overflowing(run, set(range(3, 500))), tmp_path)
    assert (summary["status"], summary["step"]) == ("diverged", 102)


def test_the_gradient_beside_epsilon_is_its_rms_per_role_after_clipping(tmp_path):
    run = task(training__gradient_scale=True, training__steps=1, training__log_every=1,
               optimizer__clip_norm=1e-3, optimizer__eps=1e-6, schedule__warmup_steps=0)
    train(run, tmp_path)
    reference, data = Tiny(), Rows()
    run.plan.initialise(reference, 0)
    ids = sample_ids(len(data), 0, 0, 8)
    (reference(data.ids[ids], data.targets[ids]) / (data.targets[ids] != IGNORE).sum()).backward()
    torch.nn.utils.clip_grad_norm_(reference.parameters(), 1e-3)
    found = metrics(tmp_path)[0]["gradient_to_epsilon"]
    tensors = {"token_embedding": reference.embedding.weight, "readout": reference.readout.weight}
    expected = {n: float(p.grad.double().square().mean().sqrt()) / 1e-6 for n, p in tensors.items()}
    assert found == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adam_param_scaling", "adafactor"])
@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer__eps": 1e-320, "training__gradient_scale": True},
        {"optimizer__lr": 1e15, "schedule__warmup_steps": 0},
        {"optimizer__lr": 1e15, "optimizer__weight_decay": 1e15},
        {"optimizer__lr": 1e15, "optimizer__weight_decay": 1e15, "optimizer__decay_mode": "global"},
        {"optimizer__lr": 1e-300},
    ],
)
def test_numbers_at_the_ends_of_their_range_finish_or_diverge(tmp_path, optimizer, changes):
    changes = {"optimizer__name": optimizer, "training__log_every": 1, **changes}
    assert train(task(**changes), tmp_path)["status"] in ("finished", "diverged")


def test_an_infinite_gradient_of_a_finite_loss_is_logged_as_none(tmp_path):
    run = overflowing(task(training__gradient_scale=True, training__log_every=1), {2})
    train(run, tmp_path)
    assert metrics(tmp_path)[1]["gradient_to_epsilon"] == {"token_embedding": None, "readout": None}


def test_a_run_may_end_before_its_schedule_and_is_then_the_first_part_of_the_whole(tmp_path):
    train(task(), tmp_path / "whole")
    train(task(training__steps=6, schedule__steps=12), tmp_path / "part")
    whole, part = metrics(tmp_path / "whole"), metrics(tmp_path / "part")
    assert [line for line in part if "train_loss" in line] == whole[:3]


def test_the_log_of_speed_is_cut_to_the_steps_that_are_not_taken_again(tmp_path):
    run = task(checkpoint={"every": 6, "minutes": None, "keep": 9, "final": True})
    assert train(run, tmp_path)["status"] == "finished"
    checkpoints = sorted((tmp_path / "checkpoints").glob("step-*"))
    shutil.rmtree(checkpoints[-1])  # as if it had been killed after step 6
    (tmp_path / "summary.json").unlink()
    with open(tmp_path / "timing.jsonl", "a") as file:
        file.write('{"step": 12, "samp')
    again = task(checkpoint={"every": 6, "minutes": None, "keep": 9, "final": True})
    assert train(again, tmp_path)["resumed_from"] == [6]
    lines = [json.loads(line) for line in (tmp_path / "timing.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 3, 6, 9, 12]
    assert all(0 < line["samples_per_second"] < 1e9 for line in lines)


def test_a_run_in_one_process_loads_no_compiler(tmp_path):
    code = (
        "import pathlib, sys, toy_run\n"
        "for name in ('adam', 'sgd', 'adafactor'):\n"
        f"    toy_run.train(pathlib.Path({str(tmp_path)!r}, name), ['training.steps=2', "
        "'training.eval_every=2', f'optimizer.name={name}'])\n"
        "    print([name for name in ('torch._dynamo', 'sympy') if name in sys.modules])\n"
    )
    here = Path(__file__)
    path = f"{here.parents[2]}{os.pathsep}{here.parent}"
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path},
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if "step" not in line] == 3 * ["[]"]
