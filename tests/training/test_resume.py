"""Runs that are killed or stopped and go on, what they keep, and what they refuse to go on with."""

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.processes import Program, all_end
from tests.run_folders import STATE, Death, checkpoints, dies_after, lines
from tests.training import toy_run as toy
from training import loop, processes, runs
from training.checkpoints import checkpoint, state
from training.data.sampling import sample_ids
from training.errors import UserError
from training.log import Log
from training.optim import optimizers

SCRIPT = Path(__file__).with_name("toy_run.py")


def below(pid):
    """All processes that one has started, or those have."""
    found = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True).stdout.split()
    return found + [deeper for child in found for deeper in below(child)]


RULES = ("sgd", "adam_param_scaling", "adafactor", "adam_atan2", "muon")
STOPPED = [([], step) for step in range(1, 7)]
STOPPED += [([f"optimizer.name={name}"], 3) for name in RULES]
STOPPED += [([word], 3) for word in ("training.precision=bf16", "training.data_workers=2")]
STOPPED += [(["training.micro_batch_size=3", "optimizer.clip_norm=0.5"], 3)]


@pytest.mark.parametrize(("words", "step"), STOPPED)
def test_a_resumed_run_ends_with_the_same_bits(tmp_path, words, step):
    words = [*words, "checkpoint.every=2", "training.log_every=3"]
    toy.train(tmp_path / "whole", words)
    dies_after(step, toy.train, tmp_path / "died", words)
    summary = toy.train(tmp_path / "died", words)
    assert toy.left_behind(tmp_path / "died") == toy.left_behind(tmp_path / "whole")
    assert summary["resumed_from"] == ([step // 2 * 2] if step > 1 else [])


def test_the_summary_of_a_resumed_run_is_that_of_the_whole_one(run, whole):
    resumed, wanted = toy.train(run), json.loads((whole / "summary.json").read_text())
    for key in ("wall_seconds", "train_seconds", "eval_seconds", "targets_per_second"):
        assert resumed.pop(key) > 0 < wanted.pop(key)
    assert (resumed.pop("resumed_from"), wanted.pop("resumed_from")) == ([4], [])
    for one in (resumed, wanted):  # of these times, too
        assert one.pop("seal") and one["files"].pop("timing.jsonl")
    assert resumed == wanted


def test_no_step_appears_twice_and_old_batches_are_not_read_again(tmp_path, monkeypatch):
    (tmp_path / "notes").mkdir()
    dies_after(5, toy.train, tmp_path / "run", ["training.log_every=1"])
    monkeypatch.setattr(optimizers, "OPTIMIZERS", dict(optimizers.OPTIMIZERS))  # the toy notes
    monkeypatch.setenv("TOY_NOTES", str(tmp_path / "notes"))
    toy.train(tmp_path / "run", ["training.log_every=1"])
    steps = [line["step"] for line in lines(tmp_path / "run") if "train_loss" in line]
    assert steps == list(range(1, 8))
    read = [int(line) for line in (tmp_path / "notes/ids-0").read_text().split()]
    assert read == sample_ids(23, 0, 4 * 4, 3 * 4).tolist()  # steps 5, 6 and 7 of 4 rows each


def test_a_resumed_fp16_run_has_its_scale_and_skips_the_same_steps(tmp_path, monkeypatch):
    forward = toy.Toy.forward
    words = ["training.precision=fp16", "training.log_every=1", "training.divergence_factor=100"]

    def loud(model, ids):  # past 65504 until the scale has been halved twice, then twice more
        times = torch.where(model.calls < 4, 16.0, 64.0) if model.training else 1.0
        return forward(model, ids) * times

    monkeypatch.setattr(toy.Toy, "forward", loud)
    toy.train(tmp_path / "whole", words)
    dies_after(3, toy.train, tmp_path / "died", words)
    assert toy.train(tmp_path / "died", words)["resumed_from"] == [2]
    assert toy.left_behind(tmp_path / "died") == toy.left_behind(tmp_path / "whole")
    logged = lines(tmp_path / "died")
    assert [line["step"] for line in logged if "event" in line] == [1, 2, 5, 6]
    scales = [line["loss_scale"] for line in logged if "loss_scale" in line]
    assert scales == [2**15, *[2**14] * 3, 2**13, *[2**12] * 2]


def test_a_killed_run_with_data_workers_leaves_no_lock_and_no_process(tmp_path):
    overrides = ["training.data_workers=2", "training.log_every=1"]
    process = Program(SCRIPT, tmp_path / "run", *overrides, TOY_PAUSE=1)
    process.wait_for("step 3")
    workers = below(process.pids[0])
    assert len(workers) >= 2
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert toy.train(tmp_path / "run", overrides)["resumed_from"] == [2]
    assert all_end(workers)


def copy_at_every_change(patch, run):
    """Has a run's folder copied wherever its files have changed; returns the copies."""
    copies, seen = [], []

    def copy():
        now = {path: path.is_file() and path.read_bytes() for path in run.rglob("*")}
        if now not in seen[-1:]:
            seen.append(now)
            copies.append(Path(shutil.copytree(run, f"{run}-{len(copies)}")))

    def half_a_file(tensors, path, offsets):
        save_file(tensors, path, offsets)
        os.truncate(path, path.stat().st_size // 2)
        copy()

    def half_a_line(log, record):
        size = log.path.stat().st_size if log.path.exists() else 0
        log.path.open("a").write(json.dumps(record)[:16])
        copy()
        os.truncate(log.path, size)

    def replace(owner, name, before=None):
        function = getattr(owner, name)

        def copying(*args, **kwargs):
            before(*args) if before else copy()
            result = function(*args, **kwargs)
            copy()
            return result

        patch.setattr(owner, name, copying)

    for owner, name in ((os, "fsync"), (os, "rename"), (os, "replace"), (shutil, "rmtree")):
        replace(owner, name)
    replace(checkpoint, "save_file", half_a_file)
    replace(Log, "append", half_a_line)
    return copies


def test_a_run_killed_wherever_a_file_changes_goes_on_to_the_same_end(tmp_path, monkeypatch):
    """From its folder as SIGKILL leaves it before and after every sync, rename and removal, in half
    a file, in half a line."""
    words = ["training.steps=4", "checkpoint.keep=1", "checkpoint.final=false"]
    whole = tmp_path / "whole"
    with monkeypatch.context() as patch:
        copies = copy_at_every_change(patch, whole)
        toy.train(whole, words)
    assert len(copies) > 35
    for copy in copies:
        toy.train(copy, words)
        assert toy.left_behind(copy) == toy.left_behind(whole), copy


def stop_in_evaluation(monkeypatch, step):
    """A signal while the second batch of that step's evaluation is measured."""
    original, calls = toy.Toy.forward, []

    def forward(model, ids):
        if not model.training and model.calls == step:
            calls.append(step)
            if len(calls) == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            assert len(calls) <= 2, "the evaluation goes on"
        return original(model, ids)

    monkeypatch.setattr(toy.Toy, "forward", forward)


@pytest.mark.parametrize("step", [3, 7])
@pytest.mark.parametrize("every", ["1", "0"])
def test_a_signal_stops_an_evaluation_which_is_taken_again(tmp_path, monkeypatch, step, every):
    words = ["training.eval_batch_size=4", f"checkpoint.every={every}", "training.probe_every=0"]
    toy.train(tmp_path / "whole", words)
    with monkeypatch.context() as patch:
        stop_in_evaluation(patch, step)
        stopped = toy.train(tmp_path / "run", words)
    assert (stopped["status"], stopped["step"]) == ("stopped", step)
    assert f"step-{step:08d}" in checkpoints(tmp_path / "run")
    assert toy.train(tmp_path / "run", words)["resumed_from"] == [step]
    for name in ("metrics.jsonl", f"checkpoints/step-00000007/{STATE}"):
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_the_last_step_is_saved_before_its_evaluation(tmp_path, monkeypatch):
    def dies(*args):
        raise Death

    words = ["checkpoint.every=0", "checkpoint.minutes=60", "checkpoint.final=false"]
    with monkeypatch.context() as patch, pytest.raises(Death):
        patch.setattr(loop, "evaluate", dies)
        toy.train(tmp_path / "run", ["training.eval_every=0", *words])
    assert checkpoints(tmp_path / "run") == ["step-00000007"]
    summary = toy.train(tmp_path / "run", ["training.eval_every=0", *words])
    assert summary["resumed_from"] == [7] and not checkpoints(tmp_path / "run")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_a_run_with_a_checkpoint_and_its_exit_code(tmp_path, number):
    overrides = ["training.steps=30", "training.log_every=1", "checkpoint.every=0"]
    toy.train(tmp_path / "whole", overrides)
    process = Program(SCRIPT, tmp_path / "run", *overrides, TOY_PAUSE=0.2)
    process.wait_for("step 3")
    process.send_signal(number)
    out, _ = process.communicate()
    assert process.returncode == 75
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["status"] == "stopped" and 3 <= summary["step"] < 30
    assert f"step {summary['step'] + 1}/" not in out
    assert checkpoints(tmp_path / "run") == [f"step-{summary['step']:08d}"]
    assert toy.train(tmp_path / "run", overrides)["status"] == "finished"
    assert toy.left_behind(tmp_path / "run")[:3] == toy.left_behind(tmp_path / "whole")[:3]


def test_a_second_ctrl_c_ends_the_run_at_once(tmp_path):
    words = ["training.log_every=1", "training.steps=9"]
    process = Program(SCRIPT, tmp_path / "run", *words, TOY_PAUSE=600)
    process.wait_for("step 1")
    process.send_signal(signal.SIGINT)
    process.wait_for("asked to stop")  # two signals at once are one
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=600)
    assert process.returncode == 130 and errors.endswith("interrupted\n")
    assert not (tmp_path / "run/summary.json").exists()


# What is kept


def test_only_the_newest_are_kept_and_a_finished_run_keeps_none_by_default(tmp_path):
    dies_after(6, toy.train, tmp_path / "run", ["checkpoint.every=1", "checkpoint.keep=3"])
    assert checkpoints(tmp_path / "run") == ["step-00000004", "step-00000005", "step-00000006"]
    summary = toy.train(tmp_path / "run", ["checkpoint.final=false"])
    assert summary["status"] == "finished" and summary["resumed_from"] == [6]
    assert not (tmp_path / "run/checkpoints").exists()


def test_checkpoints_go_by_the_clock_too(tmp_path):
    overrides = ["checkpoint.every=0", "checkpoint.minutes=1e-9", "checkpoint.keep=9"]
    toy.train(tmp_path / "run", overrides)
    assert len(checkpoints(tmp_path / "run")) == 7
    toy.train(tmp_path / "other", ["checkpoint.every=0", "checkpoint.minutes=60"])
    assert checkpoints(tmp_path / "other") == ["step-00000007"]  # checkpoint.final


def test_a_checkpoint_that_was_to_stay_outlives_the_same_command_without_the_word(tmp_path):
    toy.train(tmp_path / "kept")  # checkpoint.final
    toy.train(tmp_path / "kept", ["checkpoint.final=false"])
    assert checkpoints(tmp_path / "kept")[-1:] == ["step-00000007"]


def test_an_epsilon_said_or_left_to_the_optimizer_is_the_same_run():
    def run_id(*words):
        return runs.run_id(toy.build_config(words))

    assert run_id() == run_id("optimizer.eps=1e-9") != run_id("optimizer.eps=1e-8")
    words = ["optimizer.name=adafactor", "optimizer.eps=1e-30"]
    assert run_id(words[0]) == run_id(*words)


def test_resume_never_starts_anew(run, whole):
    assert toy.train(run, ["checkpoint.resume=never"])["resumed_from"] == []
    assert toy.left_behind(run) == toy.left_behind(whole)


def test_a_tied_tensor_and_a_buffer_are_saved_once_and_come_back(tmp_path):
    model = torch.nn.Module()
    model.a = torch.nn.Linear(3, 3, bias=False)
    model.b = torch.nn.Linear(3, 3, bias=False)
    model.b.weight = model.a.weight
    model.register_buffer("count", torch.tensor(7))
    before, named = model.a.weight.detach().clone(), state.model_tensors(model)
    assert sorted(named) == ["a.weight", "count"]
    tensors = {f"model/{name}": tensor for name, tensor in named.items()}
    path = checkpoint.save(tmp_path, 1, tensors, {}, keep=1)
    with torch.no_grad():
        model.a.weight.zero_()
        model.count.zero_()
    state.load_model(model, checkpoint.load(path))
    assert torch.equal(model.b.weight, before) and model.count == 7


# Another config, another plan


def test_resuming_with_another_config_is_refused_with_the_difference(run):
    before = (run / "config.yaml").read_text()
    with pytest.raises(UserError, match=r"another config \(optimizer.beta1 0.9 -> 0.8\)"):
        toy.train(run, ["optimizer.beta1=0.8"])
    assert (run / "config.yaml").read_text() == before
    (run / "config.yaml").unlink()  # the checkpoint knows, too
    with pytest.raises(UserError, match=r"step-00000004 holds .*optimizer.beta1 0.9 -> 0.8"):
        toy.train(run, ["optimizer.beta1=0.8"])


def test_resuming_with_another_plan_is_refused_with_the_difference(run, monkeypatch):
    original = toy.Everett
    with monkeypatch.context() as patch:
        patch.setattr(toy, "Everett", lambda *a, **k: original(*a, **k, gamma_readout=2.0))
        for _ in range(2):
            with pytest.raises(UserError, match=r"another plan \(readout.weight: lr .* -> .*\)"):
                toy.train(run)
            (run / "plan.json").unlink(missing_ok=True)
    assert toy.train(run)["resumed_from"] == [4]


def test_resuming_on_other_data_is_refused(tmp_path, monkeypatch):
    original = toy.build_task

    def on(content):
        def build(*args):
            task = original(*args)
            task.data_checksum = content
            return task

        monkeypatch.setattr(toy, "build_task", build)

    on("one")
    dies_after(5, toy.train, tmp_path / "run")
    on("two")
    with pytest.raises(UserError, match="step-00000004: the run began on other data than"):
        toy.train(tmp_path / "run")
    on("one")
    summary = toy.train(tmp_path / "run")
    assert summary["resumed_from"] == [4]
    on("two")
    with pytest.raises(UserError, match="run: the run was trained on other data than its config"):
        toy.train(tmp_path / "run")
    on("one")
    assert toy.train(tmp_path / "run") == summary


def test_a_run_does_not_go_on_in_another_precision(tmp_path, monkeypatch):
    """As on a processor without bf16 units, where the same config trains in float32."""
    dies_after(5, toy.train, tmp_path / "run", ["training.precision=bf16"])
    with monkeypatch.context() as patch, pytest.raises(UserError, match="began in bf16, here"):
        patch.setattr(processes, "precision", lambda _: "fp32")
        toy.train(tmp_path / "run", ["training.precision=bf16"])
    assert toy.train(tmp_path / "run", ["training.precision=bf16"])["resumed_from"] == [4]
