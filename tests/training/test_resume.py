"""Runs that are killed, stopped, damaged or resumed by another config."""

import contextlib
import errno
import gc
import json
import math
import os
import pickle
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.processes import Program, finished, gone
from tests.training import toy_run as toy
from training import checkpoint, files, loop, optimizers, resume, runs, state
from training.errors import Damaged, UserError
from training.files import write_json
from training.log import Log
from training.sampling import sample_ids

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("toy_run.py")


def start(folder, *overrides, **more):
    return Program(SCRIPT, folder, *overrides, **more)


def below(pid):
    """All processes that one has started, or those have."""
    found = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True).stdout.split()
    return found + [deeper for child in found for deeper in below(child)]


class Death(BaseException):
    """The process ends here: nothing in the code may catch it."""


def die_after(monkeypatch, step):
    """Training ends abruptly before the update of the step after `step`."""
    original = loop.Loop._update

    def update(self, now):
        if now == step + 1:
            raise Death
        original(self, now)

    monkeypatch.setattr(loop.Loop, "_update", update)


def interrupted(folder, step, monkeypatch, *overrides):
    """A run in `folder` that died after `step` steps."""
    with monkeypatch.context() as patch:
        die_after(patch, step)
        with pytest.raises(Death):
            toy.train(folder, overrides)


@pytest.fixture(scope="module")
def died(tmp_path_factory):
    """A run that died after step 5, which tests leave alone."""
    folder = tmp_path_factory.mktemp("died") / "run"
    with pytest.MonkeyPatch.context() as patch:
        interrupted(folder, 5, patch)
    return folder


@pytest.fixture
def run(died, tmp_path):
    """A copy of it in tmp_path / "run"."""
    return shutil.copytree(died, tmp_path / "run")


# ------------------------------------------------------------------------------------------------
# Killed and stopped runs


@pytest.mark.parametrize(
    ("words", "step"),
    [
        *(([], step) for step in range(1, 7)),
        *(([f"optimizer.name={name}"], 3)
          for name in ("sgd", "adam_param_scaling", "adafactor", "adam_atan2")),
        (["training.micro_batch_size=3", "optimizer.clip_norm=0.5"], 3),
        (["training.precision=bf16"], 3),
        (["training.data_workers=2"], 3),
    ],
)  # fmt: skip
def test_a_resumed_run_ends_with_the_same_bits(tmp_path, monkeypatch, words, step):
    words = [*words, "checkpoint.every=2", "training.log_every=3"]
    toy.train(tmp_path / "whole", words)
    interrupted(tmp_path / "died", step, monkeypatch, *words)
    summary = toy.train(tmp_path / "died", words)
    assert toy.left_behind(tmp_path / "died") == toy.left_behind(tmp_path / "whole")
    assert summary["resumed_from"] == ([step // 2 * 2] if step > 1 else [])


def test_the_summary_of_a_resumed_run_is_that_of_the_whole_one(tmp_path, monkeypatch):
    whole = toy.train(tmp_path / "whole")
    interrupted(tmp_path / "died", 3, monkeypatch)
    resumed = toy.train(tmp_path / "died")
    times = {"wall_seconds", "train_seconds", "eval_seconds", "targets_per_second", "resumed_from"}
    assert {k: v for k, v in resumed.items() if k not in times} == {
        k: v for k, v in whole.items() if k not in times
    }


def test_no_step_appears_twice_and_old_batches_are_not_read_again(tmp_path, monkeypatch):
    (tmp_path / "notes").mkdir()
    interrupted(tmp_path / "run", 5, monkeypatch, "training.log_every=1")
    monkeypatch.setattr(optimizers, "AdamW", optimizers.AdamW)  # the toy's notes replace it
    monkeypatch.setenv("TOY_NOTES", str(tmp_path / "notes"))
    toy.train(tmp_path / "run", ["training.log_every=1"])
    lines = [json.loads(x) for x in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines if "train_loss" in line]
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
    interrupted(tmp_path / "died", 3, monkeypatch, *words)
    assert toy.train(tmp_path / "died", words)["resumed_from"] == [2]
    assert toy.left_behind(tmp_path / "died") == toy.left_behind(tmp_path / "whole")
    lines = [json.loads(line) for line in (tmp_path / "died/metrics.jsonl").open()]
    assert [line["step"] for line in lines if "event" in line] == [1, 2, 5, 6]
    scales = [line["loss_scale"] for line in lines if "loss_scale" in line]
    assert scales == [2**15, *[2**14] * 3, 2**13, *[2**12] * 2]


def test_a_killed_run_with_data_workers_leaves_no_lock_and_no_process(tmp_path):
    overrides = ["training.data_workers=2", "training.log_every=1"]
    process = start(tmp_path / "run", *overrides, TOY_PAUSE=1)
    while "step 3" not in process.stdout.readline():
        pass
    workers = below(process.pids[0])
    assert len(workers) >= 2
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert toy.train(tmp_path / "run", overrides)["resumed_from"] == [2]
    assert all(gone(worker) for worker in workers)


def copy_at_every_change(patch, run):
    """Has a run's folder copied wherever its files change; returns the copies."""
    copies = []

    def copy():
        copies.append(Path(shutil.copytree(run, f"{run}-{len(copies)}")))

    def half_a_file(tensors, path):
        save_file(tensors, path)
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
    assert len(copies) > 50
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
    assert f"step-{step:08d}" in names(tmp_path / "run")
    assert toy.train(tmp_path / "run", words)["resumed_from"] == [step]
    for name in ("metrics.jsonl", "checkpoints/step-00000007/state.safetensors"):
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_the_last_step_is_saved_before_its_evaluation(tmp_path, monkeypatch):
    def dies(*args):
        raise Death

    words = ["checkpoint.every=0", "checkpoint.minutes=60", "checkpoint.final=false"]
    with monkeypatch.context() as patch, pytest.raises(Death):
        patch.setattr(loop, "evaluate", dies)
        toy.train(tmp_path / "run", ["training.eval_every=0", *words])
    assert names(tmp_path / "run") == ["step-00000007"]
    summary = toy.train(tmp_path / "run", ["training.eval_every=0", *words])
    assert summary["resumed_from"] == [7] and not names(tmp_path / "run")


def test_a_signal_does_not_end_the_wait_for_the_last_checkpoint(tmp_path, monkeypatch):
    settle = resume.Checkpoints.settle

    def told(checkpoints):
        if (tmp_path / "checkpoints/step-00000007").exists():
            os.kill(os.getpid(), signal.SIGTERM)
        settle(checkpoints)

    monkeypatch.setattr(resume.Checkpoints, "settle", told)
    before = signal.signal(signal.SIGTERM, lambda *_: pytest.fail("the run has not heard it"))
    try:
        assert toy.train(tmp_path)["status"] == "finished"
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_a_run_with_a_checkpoint_and_its_exit_code(tmp_path, number):
    overrides = ["training.steps=30", "training.log_every=1", "checkpoint.every=0"]
    toy.train(tmp_path / "whole", overrides)
    process = start(tmp_path / "run", *overrides, TOY_PAUSE=0.2)
    while "step 3" not in process.stdout.readline():
        pass
    process.send_signal(number)
    out, _ = process.communicate()
    assert process.returncode == 75
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["status"] == "stopped" and 3 <= summary["step"] < 30
    assert f"step {summary['step'] + 1}/" not in out
    assert [p.name for p in (tmp_path / "run/checkpoints").iterdir()] == [
        f"step-{summary['step']:08d}"
    ]
    assert toy.train(tmp_path / "run", overrides)["status"] == "finished"
    assert toy.left_behind(tmp_path / "run")[:3] == toy.left_behind(tmp_path / "whole")[:3]


def test_a_second_ctrl_c_ends_the_run_at_once(tmp_path):
    words = ["training.log_every=1", "training.steps=9"]
    process = start(tmp_path / "run", *words, TOY_PAUSE=3)
    while "step 1" not in process.stdout.readline():
        pass
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)  # two signals at once are one
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and errors.endswith("interrupted\n")
    assert not (tmp_path / "run/summary.json").exists()


# ------------------------------------------------------------------------------------------------
# What is kept


def names(folder):
    return sorted(path.name for path in (folder / "checkpoints").glob("*"))


def test_only_the_newest_are_kept_and_a_finished_run_keeps_none_by_default(tmp_path, monkeypatch):
    interrupted(tmp_path / "run", 6, monkeypatch, "checkpoint.every=1", "checkpoint.keep=3")
    assert names(tmp_path / "run") == ["step-00000004", "step-00000005", "step-00000006"]
    summary = toy.train(tmp_path / "run", ["checkpoint.final=false"])
    assert summary["status"] == "finished" and summary["resumed_from"] == [6]
    assert not (tmp_path / "run/checkpoints").exists()


def test_checkpoints_go_by_the_clock_too(tmp_path, monkeypatch):
    overrides = ["checkpoint.every=0", "checkpoint.minutes=1e-9", "checkpoint.keep=9"]
    toy.train(tmp_path / "run", overrides)
    assert len(names(tmp_path / "run")) == 7
    toy.train(tmp_path / "other", ["checkpoint.every=0", "checkpoint.minutes=60"])
    assert names(tmp_path / "other") == ["step-00000007"]  # checkpoint.final


def test_how_checkpoints_are_made_does_not_make_another_run(tmp_path):
    one, two = toy.build_config(), toy.build_config(["checkpoint.every=1", "checkpoint.keep=5"])
    assert runs.run_id(one) == runs.run_id(two) != runs.run_id(toy.build_config(["seed=1"]))


def test_an_epsilon_said_or_left_to_the_optimizer_is_the_same_run():
    def run_id(*words):
        return runs.run_id(toy.build_config(words))

    assert run_id() == run_id("optimizer.eps=1e-9") != run_id("optimizer.eps=1e-8")
    assert run_id("optimizer.name=adafactor") == run_id(
        "optimizer.name=adafactor", "optimizer.eps=1e-30"
    )


def test_resume_never_starts_anew(run, tmp_path):
    summary = toy.train(run, ["checkpoint.resume=never"])
    assert summary["resumed_from"] == []
    toy.train(tmp_path / "whole")
    assert toy.left_behind(run) == toy.left_behind(tmp_path / "whole")


def test_a_tied_tensor_and_a_buffer_are_saved_once_and_come_back(tmp_path):
    model = torch.nn.Module()
    model.a = torch.nn.Linear(3, 3, bias=False)
    model.b = torch.nn.Linear(3, 3, bias=False)
    model.b.weight = model.a.weight
    model.register_buffer("count", torch.tensor(7))
    saved = {k: v.detach().clone() for k, v in state.model_tensors(model).items()}
    assert sorted(saved) == ["a.weight", "count"]
    with torch.no_grad():
        model.a.weight.zero_()
        model.count.zero_()
    state.check_model(model, saved)
    state.load_model(model, saved)
    assert torch.equal(model.b.weight, saved["a.weight"]) and model.count == 7


# ------------------------------------------------------------------------------------------------
# Damage


def truncate(path):
    os.truncate(path, path.stat().st_size - 1)


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


def link(path):
    path.rename(path.with_suffix(".real"))
    path.symlink_to(path.with_suffix(".real").name)


def empty(path):
    path.write_text("")


DAMAGES = [
    (file, damage)
    for file in ("state.safetensors", "meta.json", "checksums.json")
    for damage in (truncate, flip, Path.unlink, empty)
] + [("state.safetensors", link)]


@pytest.mark.parametrize(("file", "damage"), DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(
    run, tmp_path, capsys, file, damage
):
    damage(run / "checkpoints/step-00000004" / file)
    summary = toy.train(run)
    errors = capsys.readouterr().err
    assert "not used: " in errors and "step-00000004" in errors
    assert summary["resumed_from"] == [2]
    toy.train(tmp_path / "whole")
    assert toy.left_behind(run)[:3] == toy.left_behind(tmp_path / "whole")[:3]
    assert "damaged-step-00000004" in names(run)  # nothing is lost


def test_without_any_good_checkpoint_the_run_says_so_and_touches_nothing(run):
    for path in (run / "checkpoints").iterdir():
        flip(path / "state.safetensors")
    before = (run / "metrics.jsonl").read_bytes()
    with pytest.raises(UserError, match=r"no checkpoint can be used .*checkpoint.resume=never"):
        toy.train(run)
    assert (run / "metrics.jsonl").read_bytes() == before
    assert len(names(run)) == 2


@pytest.mark.parametrize("damage", [flip, empty])
def test_a_log_that_lost_lines_is_not_gone_on_with(run, damage):
    damage(run / "metrics.jsonl")
    with pytest.raises(UserError, match=r"no checkpoint can be used .*metrics.jsonl: lacks lines"):
        toy.train(run)


def test_a_checkpoint_of_another_step_or_format_is_damaged(tmp_path):
    path = checkpoint.save(tmp_path, 3, {"x": torch.ones(2)}, {}, keep=1)
    renamed = path.rename(path.with_name("step-00000009"))
    with pytest.raises(Damaged, match="of step 3"):
        checkpoint.load(renamed)
    meta = renamed / "meta.json"
    meta.write_text(meta.read_text().replace('"format": 1', '"format": 9'))
    with pytest.raises(Damaged, match="not of format 1"):
        checkpoint.load(renamed, verify=False)


def resealed(path, change):
    """Changes a checkpoint's meta.json or tensors and makes its checksums fit."""
    meta = json.loads((path / "meta.json").read_text())
    tensors = load_file(path / "state.safetensors")
    change(meta, tensors)
    meta["tensors"] = {name: list(tensor.shape) for name, tensor in tensors.items()}
    save_file(tensors, path / "state.safetensors")
    (path / "meta.json").write_text(json.dumps(meta))
    sums = {name: checkpoint._checksum(path / name) for name in ("state.safetensors", "meta.json")}
    (path / "checksums.json").write_text(json.dumps(sums))


@pytest.mark.parametrize(
    "change",
    [
        lambda meta, tensors: meta.pop("logs"),
        lambda meta, tensors: meta["logs"].pop("probes.jsonl"),
        lambda meta, tensors: meta.pop("plan"),
        lambda meta, tensors: meta.pop("random"),
        lambda meta, tensors: meta.pop("config"),
        lambda meta, tensors: meta.update(config=3),
        lambda meta, tensors: meta.update(plan=[1]),
        lambda meta, tensors: meta.update(seconds="long"),
        lambda meta, tensors: meta.update(eval_seconds=math.nan),
        lambda meta, tensors: meta.update(evals=[[3]]),
        lambda meta, tensors: meta.update(evals=[[3, {"loss": "low"}]]),
        lambda meta, tensors: meta.update(losses={"first": []}),
        lambda meta, tensors: meta.update(skipped=0),
        lambda meta, tensors: meta.update(resumed_from=[None]),
        lambda meta, tensors: meta.update(eval_targets=1.5),
        lambda meta, tensors: meta.update(step=4.0),
        lambda meta, tensors: meta.update(random=[]),
        lambda meta, tensors: meta.update(random=[{"python": [3, [1], None]}]),
        lambda meta, tensors: meta["random"][0].update(torch="00"),
        lambda meta, tensors: meta["random"][0].update(numpy={"bit_generator": "MT19937"}),
        lambda meta, tensors: meta["logs"]["metrics.jsonl"].update(bytes="all"),
        lambda meta, tensors: meta["logs"]["metrics.jsonl"].update(bytes=-1),
        lambda meta, tensors: tensors.pop("model/calls"),
        lambda meta, tensors: tensors.update({"model/calls": torch.ones((), dtype=torch.int8)}),
        lambda meta, tensors: tensors.update({"model/calls": torch.ones(3)}),
        lambda meta, tensors: tensors.update({"optimizer/readout.weight/exp_avg": torch.ones(3)}),
        lambda meta, tensors: tensors.update({"optimizer/other/exp_avg": torch.ones(3)}),
    ],
)
def test_a_checkpoint_of_something_else_is_not_used(run, capsys, change):
    resealed(run / "checkpoints/step-00000004", change)
    assert toy.train(run)["resumed_from"] == [2]
    assert "not used: " in capsys.readouterr().err


def test_a_checkpoint_past_the_end_of_the_run_is_not_used(run, capsys):
    path = run / "checkpoints/step-00000004"
    resealed(path, lambda meta, tensors: meta.update(step=100))
    path.rename(path.with_name("step-00000100"))
    assert toy.train(run)["resumed_from"] == [2]
    assert "of step 100 in a run of 7" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["pipe", "link"])
@pytest.mark.parametrize("name", ["metrics.jsonl", "probes.jsonl", ".lock", "summary.json"])
def test_a_pipe_or_link_in_the_results_folder_is_refused_in_one_line(tmp_path, name, kind):
    victim, file = tmp_path / "victim", tmp_path / "run" / name
    victim.write_text("mine")
    file.parent.mkdir()
    os.mkfifo(file) if kind == "pipe" else file.symlink_to(victim)
    with pytest.raises(UserError, match=f"{name}: (cannot write: a {kind}|not a summary)"):
        toy.train(tmp_path / "run")
    assert victim.read_text() == "mine"


@pytest.mark.parametrize("name", ["config.yaml", "plan.json", "timing.jsonl"])
def test_a_pipe_is_never_waited_for(run, name):
    (run / name).unlink()
    os.mkfifo(run / name)
    with contextlib.suppress(UserError):
        toy.train(run)


@pytest.mark.parametrize("words", [[], ["checkpoint.resume=never"]])
def test_a_checkpoints_folder_that_is_a_link_is_refused(tmp_path, monkeypatch, words):
    interrupted(tmp_path / "other", 5, monkeypatch)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/checkpoints").symlink_to(tmp_path / "other/checkpoints")
    with pytest.raises(UserError, match="run/checkpoints: a link, not a folder of checkpoints"):
        toy.train(tmp_path / "run", words)
    assert names(tmp_path / "other") == ["step-00000002", "step-00000004"]


def test_a_pipe_in_place_of_a_file_is_not_waited_for(run):
    for name in ("checksums.json", "meta.json"):
        path = run / "checkpoints/step-00000004" / name
        path.unlink()
        os.mkfifo(path)
    assert toy.train(run)["resumed_from"] == [2]


def test_an_old_checkpoint_that_cannot_be_removed_does_not_end_the_run(
    tmp_path, monkeypatch, capsys
):
    """As on NFS, while another process has it open."""
    interrupted(tmp_path / "run", 3, monkeypatch)

    def stays(path):
        raise OSError(errno.ENOTEMPTY, "Directory not empty")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_remove", stays)
        toy.train(tmp_path / "run", ["checkpoint.keep=1"])
    assert "step-00000002: cannot be removed: Directory not empty" in capsys.readouterr().err


def test_the_restored_state_does_not_live_in_the_file(tmp_path, monkeypatch):
    interrupted(tmp_path / "run", 3, monkeypatch)
    mapped = []
    original = loop.Loop._update

    def update(self, step):
        mapped.append("step-00000002" in Path("/proc/self/maps").read_text())
        original(self, step)

    monkeypatch.setattr(loop.Loop, "_update", update)
    gc.collect()
    toy.train(tmp_path / "run")
    gc.collect()
    assert len(mapped) == 5 and not any(mapped[1:])


# ------------------------------------------------------------------------------------------------
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
    interrupted(tmp_path / "run", 5, monkeypatch)
    on("two")
    with pytest.raises(UserError, match="step-00000004: the run began on other data than"):
        toy.train(tmp_path / "run")
    on("one")
    assert toy.train(tmp_path / "run")["resumed_from"] == [4]


def test_a_run_does_not_go_on_in_another_precision(tmp_path, monkeypatch):
    """As on a processor without bf16 units, where the same config trains in float32."""
    interrupted(tmp_path / "run", 5, monkeypatch, "training.precision=bf16")
    with monkeypatch.context() as patch, pytest.raises(UserError, match="precision 'bf16', here"):
        patch.setattr(loop.Loop, "_precision", lambda _: "fp32")
        toy.train(tmp_path / "run", ["training.precision=bf16"])
    assert toy.train(tmp_path / "run", ["training.precision=bf16"])["resumed_from"] == [4]


def test_other_settings_of_the_checkpoints_are_welcome(run):
    assert toy.train(run, ["checkpoint.every=3"])["resumed_from"] == [4]


# ------------------------------------------------------------------------------------------------
# A full disk, hostile files


def test_a_checkpoint_that_does_not_fit_ends_the_run_with_one_line(tmp_path, monkeypatch):
    """Files cannot grow beyond 6 kB, as on a full disk."""
    interrupted(tmp_path / "run", 3, monkeypatch)
    script = tmp_path / "script.py"
    script.write_text(
        "import resource, toy_run\nresource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000))\n"
        "toy_run.main()\n"
    )
    result = finished(script, tmp_path / "run", PYTHONPATH=f"{ROOT}{os.pathsep}{SCRIPT.parent}")
    assert result.returncode == 2, result.err
    last = result.err.splitlines()[-1]
    assert last.startswith("error: ") and "step-00000004: cannot write the checkpoint" in last
    assert "step-00000002 is intact" in last and "Traceback" not in result.err
    assert names(tmp_path / "run") == ["step-00000002"]  # nothing half-written
    toy.train(tmp_path / "run")
    toy.train(tmp_path / "whole")
    assert toy.left_behind(tmp_path / "run") == toy.left_behind(tmp_path / "whole")


def full(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_files_that_cannot_be_written_are_named_in_one_line(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="/dev/full: cannot write: No space left on device"):
        Log(Path("/dev/full")).append({"step": 1})
    monkeypatch.setattr(files.os, "fsync", full)
    for path in (tmp_path / "plan.json", tmp_path / "old.json"):
        (tmp_path / "old.json").write_text("old")
        with pytest.raises(UserError, match=f"{path.name}: cannot write: No space left"):
            write_json(path, {"a": 1})
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]


class Bomb:
    """Unpickling it creates a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


def test_hostile_files_execute_and_overwrite_nothing(run, tmp_path):
    mark, outside = tmp_path / "executed", tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("kept")
    bomb = pickle.dumps(Bomb(mark))
    folder = run / "checkpoints"
    newest = folder / "step-00000009"
    newest.mkdir()
    (newest / "state.safetensors").write_bytes(bomb)
    (newest / "meta.json").write_bytes(bomb)
    names = ("state.safetensors", "meta.json")
    sums = {name: checkpoint._checksum(newest / name) for name in names}
    (newest / "checksums.json").write_text(json.dumps({**sums, "../../../outside/kept": {}}))
    (folder / "step-00000010").symlink_to(outside)
    (folder / "step-00000011").write_bytes(bomb)
    (folder / "..step-00000012").mkdir()
    for name in ("state.pt", "optimizer.pkl", "pytorch_model.bin"):
        (folder / name).write_bytes(bomb)
        (run / name).write_bytes(bomb)
    assert toy.train(run, ["checkpoint.keep=1"])["resumed_from"] == [4]
    assert not mark.exists()
    assert (outside / "kept").read_text() == "kept"
    checkpoint.discard(folder)
    assert (outside / "kept").exists()
    pickle.loads(bomb)  # the bomb is live
    assert mark.exists()


def test_no_code_of_ours_can_unpickle():
    """torch.load and pickle are not called where results are read."""
    folders = ("training", "measure", "param_groups", "plots", "nanolm_c4")
    for path in [p for folder in folders for p in (ROOT / folder).glob("*.py")]:
        text = path.read_text()
        assert "torch.load(" not in text and "import pickle" not in text, path
        assert "allow_pickle=True" not in text, path
