"""The training loop on a tiny model: normalisation, accumulation, schedules, logs, evaluation."""

import contextlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from param_groups import Everett, plan
from param_groups.schedules import factor
from tests.run_folders import dies_after, lines
from tests.training.tiny_task import IGNORE, RULES, Rows, initial, mean_loss, task, weights
from training.data.sampling import sample_ids
from training.errors import UserError
from training.loop import train


def test_training_is_plain_torch_adamw_on_the_mean_loss_per_target(tmp_path):
    run = task()
    train(run, tmp_path)
    reference, data = initial(), Rows()
    optimizer = torch.optim.AdamW(
        reference.parameters(), lr=0.05, betas=(0.9, 0.98), eps=1e-9, weight_decay=0
    )
    for step in range(12):
        now = factor("cosine", step, warmup_steps=2, total_steps=12)
        optimizer.param_groups[0]["lr"] = 0.05 * now
        optimizer.zero_grad()
        mean_loss(reference, data, sample_ids(len(data), 0, step * 8, 8)).backward()
        optimizer.step()
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(run.model.state_dict()[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("micro", [1, 3, 4])
def test_micro_batches_change_nothing_but_rounding(tmp_path, micro):
    whole, parts = task(), task(training__micro_batch_size=micro)
    train(whole, tmp_path / "whole")
    train(parts, tmp_path / "parts")
    for a, b in zip(weights(whole).values(), weights(parts).values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_the_same_config_gives_the_same_bits_whatever_the_loader(tmp_path):
    runs = [task(), task(training__data_workers=2)]
    torch.manual_seed(99)  # the global generator plays no part
    for index, run in enumerate(runs):
        train(run, tmp_path / str(index))
        torch.rand(5)
    assert all(map(torch.equal, *(weights(run).values() for run in runs)))
    assert lines(tmp_path / "0") == lines(tmp_path / "1")


def test_metrics_hold_train_and_eval_losses_at_their_steps(tmp_path):
    summary = train(task(training__eval_every=5), tmp_path)
    logged = lines(tmp_path)
    assert [line["step"] for line in logged if "train_loss" in line] == [1, 3, 6, 9, 12]
    evals = {line["step"]: line["eval_loss"] for line in logged if "eval_loss" in line}
    assert list(evals) == [5, 10, 12]
    assert summary["final_eval_loss"] == evals[12]
    assert summary["best_eval_loss"] == min(evals.values())
    assert logged[0]["lr_factor"] == 0 and logged[1]["lr_factor"] == 1
    assert all(line["gradient_norm"] > 0 for line in logged if "train_loss" in line)


def test_evaluations_per_octave_are_a_function_of_the_step(tmp_path):
    run = task(training__eval_per_octave=2, training__steps=40)
    train(run, tmp_path)
    evals = [line["step"] for line in lines(tmp_path) if "eval_loss" in line]
    assert evals == sorted({round(2 ** (k / 2)) for k in range(11)} | {40})
    assert "eval_per_octave" not in task().config.model_dump()["training"]  # run ids stay


def test_logged_losses_are_weighted_by_targets(tmp_path):
    train(task(training__log_every=100, optimizer__lr=1e-30, training__steps=4), tmp_path)
    ids = sample_ids(len(Rows()), 0, 8, 24)  # steps 2 to 4; step 1 is logged by itself
    loss = mean_loss(initial(), Rows(), ids)
    assert lines(tmp_path)[1]["train_loss"] == pytest.approx(loss.item(), rel=1e-5)


@pytest.mark.parametrize("samples", [None, 5])
def test_evaluation_counts_every_target_once_or_those_of_a_subset(tmp_path, samples):
    changes = {"training__eval_batch_size": 4, "training__eval_samples": samples}
    summary = train(task(optimizer__lr=1e-30, **changes), tmp_path)
    loss = mean_loss(initial(), Rows(size=21, seed=4), slice(samples))
    assert summary["final_eval_loss"] == pytest.approx(loss.item(), rel=1e-6)


def test_clipping_bounds_the_step_of_sgd(tmp_path):
    changes = {"optimizer__name": "sgd", "optimizer__momentum": 0.0, "training__steps": 1}
    changes["schedule__warmup_steps"] = 0
    free, clipped = task(**changes), task(**changes, optimizer__clip_norm=0.01)
    vector, moved = torch.nn.utils.parameters_to_vector, []
    for index, run in enumerate((free, clipped)):
        train(run, tmp_path / str(index))
        change = vector(run.model.parameters()) - vector(initial(**changes).parameters())
        moved.append(change.norm().item() / free.plan["readout.weight"].lr)
    assert moved[0] > 0.05
    assert moved[1] == pytest.approx(0.01, rel=1e-3)
    assert lines(tmp_path / "1")[0]["gradient_norm"] == pytest.approx(moved[0], rel=1e-3)


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


@pytest.mark.parametrize("decay_mode", ["independent", "global", "per_group"])
def test_decay_follows_the_schedule_in_every_mode(tmp_path, decay_mode):
    run = task(optimizer__weight_decay=0.01, optimizer__decay_mode=decay_mode)
    run.loss = lambda model, batch: model(*batch) * 0.0
    train(run, tmp_path)
    peak = {"independent": 0.01, "global": 0.05 * 0.01, "per_group": 0.05 * 0.01}[decay_mode]
    shrink = math.prod(
        1 - peak * factor("cosine", step, warmup_steps=2, total_steps=12) for step in range(12)
    )
    torch.testing.assert_close(run.model.readout.weight, initial().readout.weight * shrink)


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
    run.eval_collate = lambda samples: (
        [torch.stack(part) for part in zip(*samples, strict=True)] + ["whole"]
    )
    return run


def test_a_task_by_epoch_sees_places_and_logs_epochs(tmp_path):
    run = by_epoch()
    train(run, tmp_path)
    assert [place.epoch for place in run.train_data.seen[::8]] == [0] * 4 + [1] * 4 + [2] * 4
    assert [line["epoch"] for line in lines(tmp_path) if "eval_top1" in line] == [1, 2, 3]
    assert lines(tmp_path)[0]["epoch"] == 0.25


def test_what_is_measured_is_a_mean_per_target_logged_and_summarised(tmp_path):
    run = by_epoch()
    summary = train(run, tmp_path)
    data = run.eval_data
    with torch.no_grad():
        logits = run.model.readout(run.model.embedding(data.ids))
    kept = data.targets != IGNORE
    top1 = ((logits.argmax(-1) == data.targets) & kept).sum().item() / kept.sum().item()
    logged = [line for line in lines(tmp_path) if "eval_top1" in line]
    assert logged[-1]["eval_top1"] == summary["final_eval_top1"] == pytest.approx(top1)
    values = [line["eval_top1"] for line in logged]
    assert summary["best_eval_top1"] == max(values)
    assert summary["best_eval_top1_step"] == logged[values.index(max(values))]["step"]
    assert summary["best_eval_loss"] == min(line["eval_loss"] for line in logged)


def test_the_floor_in_units_of_the_rate_is_that_fraction(tmp_path):
    rate = task(schedule__min_lr=0.01)
    share = task(schedule__floor=0.01 / 0.05)
    train(rate, tmp_path / "rate")
    train(share, tmp_path / "share")
    assert lines(tmp_path / "rate") == lines(tmp_path / "share")
    train(task(), tmp_path / "plain")
    assert lines(tmp_path / "rate") != lines(tmp_path / "plain")


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


def test_the_gradient_beside_epsilon_is_its_rms_per_role_after_clipping(tmp_path):
    changes = {"training__gradient_scale": True, "training__steps": 1, "training__log_every": 1}
    changes |= {"optimizer__eps": 1e-6, "schedule__warmup_steps": 0}
    train(task(**changes, optimizer__clip_norm=1e-3), tmp_path)
    reference, data = initial(), Rows()
    mean_loss(reference, data, sample_ids(len(data), 0, 0, 8)).backward()
    torch.nn.utils.clip_grad_norm_(reference.parameters(), 1e-3)
    found = lines(tmp_path)[0]["gradient_to_epsilon"]
    tensors = {"token_embedding": reference.embedding.weight, "readout": reference.readout.weight}
    expected = {n: float(p.grad.double().square().mean().sqrt()) / 1e-6 for n, p in tensors.items()}
    assert found == pytest.approx(expected, rel=1e-4)


def test_a_run_may_end_before_its_schedule_and_is_then_the_first_part_of_the_whole(tmp_path):
    train(task(), tmp_path / "whole")
    train(task(training__steps=6, schedule__steps=12), tmp_path / "part")
    whole, part = lines(tmp_path / "whole"), lines(tmp_path / "part")
    assert [line for line in part if "train_loss" in line] == whole[:3]


def test_the_log_of_speed_is_cut_to_the_steps_that_are_not_taken_again(tmp_path):
    saved = {"checkpoint": {"every": 6, "minutes": None}}
    dies_after(11, train, task(**saved), tmp_path)
    with open(tmp_path / "timing.jsonl", "a") as file:
        file.write('{"step": 12, "samp')
    assert train(task(**saved), tmp_path)["resumed_from"] == [6]
    logged = lines(tmp_path, "timing.jsonl")
    assert [line["step"] for line in logged] == [1, 3, 6, 9, 12]
    assert all(0 < line["samples_per_second"] < 1e9 for line in logged)
    assert all(0 <= line["waiting_for_data"] <= 1 for line in logged)
    assert [line["step"] for line in lines(tmp_path)] == [1, 3, 6, 9, 12, 12]  # a log of its own


def test_a_run_in_one_process_loads_no_compiler_and_needs_nobody_who_reads_its_messages(tmp_path):
    code = (
        "import sys, toy_run\n"
        "for name in ('adam', 'sgd', 'adafactor'):\n"
        "    sys.argv[1:] = [name, 'training.steps=2', 'training.eval_every=2', "
        "f'optimizer.name={name}']\n"
        "    toy_run.main()\n"
        "    loaded = [name for name in ('torch._dynamo', 'sympy') if name in sys.modules]\n"
        "    print(loaded, file=open('loaded', 'a'))\n"
    )
    here = Path(__file__)
    path = f"{here.parents[2]}{os.pathsep}{here.parent}"
    command = ["sh", "-c", '"$@" >&- 2>/dev/full', "sh", sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 0 and (tmp_path / "adafactor/summary.json").exists()
    assert (tmp_path / "loaded").read_text() == 3 * "[]\n"


def test_an_exported_number_of_micro_batches_scales_no_gradient(tmp_path, monkeypatch):
    """accelerate would divide every loss by it; SGD shows it, Adam would not."""
    plain, exported = task(optimizer__name="sgd"), task(optimizer__name="sgd")
    train(plain, tmp_path / "plain")
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    train(exported, tmp_path / "exported")
    assert all(map(torch.equal, *(weights(run).values() for run in (plain, exported))))


def test_logs_are_on_the_disk_before_a_summary_says_that_the_run_is_done(tmp_path, monkeypatch):
    """After a power cut it would never be trained again, and its logs would be torn."""
    noted = {}

    def note(path):
        assert path.name not in noted.get("done", ()), "the summary was there before"
        noted[path.name] = path.stat().st_size

    def summary(path, value):
        noted["done"] = dict(noted)
        path.write_text("{}")

    monkeypatch.setattr("training.log.sync", note)
    monkeypatch.setattr("training.runs.write_json", summary)
    train(task(), tmp_path)
    for name in ("metrics.jsonl", "timing.jsonl"):
        assert noted["done"][name] == (tmp_path / name).stat().st_size > 0
