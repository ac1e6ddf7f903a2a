"""Checkpoints and logs that are damaged or hostile, files in the way, and a full disk."""

import contextlib
import errno
import gc
import os
import pickle
import tempfile
from pathlib import Path

import pytest
import torch
from torch.distributed import checkpoint as dcp

from param_groups.check import written
from tests.processes import finished
from tests.run_folders import STATE, checkpoints, dies_after, flip, seal, tensors
from tests.training import toy_run as toy
from training import files, loop, runs, summary
from training.checkpoints import checkpoint
from training.errors import RunError, UserError
from training.files import write_json
from training.log import Log

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("toy_run.py")


def truncate(path):
    os.truncate(path, path.stat().st_size - 1)


def link(path):
    path.rename(path.with_suffix(".real"))
    path.symlink_to(path.with_suffix(".real").name)


def empty(path):
    path.write_text("")


def nest(path):  # deeper than Python's reader of JSON goes
    path.write_text("[" * 99_999)


def pipe(path):  # which nobody writes to, so that a reader would wait for ever
    path.unlink()
    os.mkfifo(path)


DAMAGES = [
    (file, damage)
    for file in (STATE, "meta.json", "checksums.json")
    for damage in (truncate, flip, Path.unlink, empty, nest, link, pipe)
]


@pytest.mark.parametrize(("file", "damage"), DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(run, whole, capsys, file, damage):
    damage(run / "checkpoints/step-00000004" / file)
    summary = toy.train(run)
    errors = capsys.readouterr().err
    assert "not used: " in errors and "step-00000004" in errors
    assert summary["resumed_from"] == [2]
    assert toy.left_behind(run)[:3] == toy.left_behind(whole)[:3]
    assert "damaged-step-00000004" in checkpoints(run)  # nothing is lost


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.EMFILE, errno.ESTALE])
def test_a_checkpoint_that_cannot_be_read_now_is_not_called_damaged(
    run, whole, monkeypatch, number
):
    """It may be whole: it keeps its name, and the next command resumes from it."""
    before = checkpoints(run)

    def fails(*_):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch, pytest.raises(UserError, match="cannot read it .*again"):
        patch.setattr(checkpoint, "checksum", fails)
        toy.train(run)
    assert checkpoints(run) == before
    assert toy.train(run)["resumed_from"] == [4]
    assert toy.left_behind(run)[:3] == toy.left_behind(whole)[:3]


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.EMFILE, errno.ESTALE])
@pytest.mark.parametrize("name", ["summary.json", "metrics.jsonl"])
def test_a_finished_run_that_cannot_be_read_now_is_not_called_damaged(
    whole, monkeypatch, name, number
):
    """Its folder would be put aside, and the run trained again."""
    opened, run = files.open_plain, runs.summary(whole)["run"]

    def fails(path, mode):
        if Path(path).name == name:
            raise OSError(number, os.strerror(number))
        return opened(path, mode)

    with monkeypatch.context() as patch:
        patch.setattr(files, "open_plain", fails)
        with pytest.raises(RunError, match=f"{name}: cannot read it .*, nothing is changed"):
            runs.sealed(whole, run)
    assert runs.sealed(whole, run)["status"] == "finished"


def test_without_any_good_checkpoint_the_run_says_so_and_touches_nothing(run):
    for path in (run / "checkpoints").iterdir():
        flip(path / STATE)
    before = (run / "metrics.jsonl").read_bytes()
    with pytest.raises(UserError, match=r"no checkpoint can be used .*checkpoint.resume=never"):
        toy.train(run)
    assert (run / "metrics.jsonl").read_bytes() == before
    assert len(checkpoints(run)) == 2


@pytest.mark.parametrize("damage", [flip, empty])
def test_a_log_that_lost_lines_is_not_gone_on_with(run, damage):
    damage(run / "metrics.jsonl")
    with pytest.raises(UserError, match=r"no checkpoint can be used .*metrics.jsonl: lacks lines"):
        toy.train(run)


@pytest.mark.parametrize("loss", [Path.unlink, empty, truncate])
@pytest.mark.parametrize("when", ["before the next line", "after the last line"])
def test_a_log_that_loses_lines_while_the_run_trains_is_noticed(tmp_path, monkeypatch, loss, when):
    run, log = toy.build_task(toy.build_config()), tmp_path / "run/metrics.jsonl"
    summarise = summary.of

    def lose_after(step, steps, logged):
        if step == 2 and when == "before the next line":
            loss(log)

    def lose_at_the_end(*args):
        if when == "after the last line":
            loss(log)
        return summarise(*args)

    monkeypatch.setattr(summary, "of", lose_at_the_end)
    with pytest.raises(RunError, match="metrics.jsonl: .* bytes where the run has written"):
        loop.train(run, tmp_path / "run", lose_after)
    assert not (tmp_path / "run/summary.json").exists()


def test_torchs_own_reader_reads_a_checkpoint(run):
    """It is in the Hugging Face format of torch.distributed.checkpoint."""
    wanted = tensors(run / "checkpoints/step-00000004")
    found = {name: torch.zeros_like(tensor) for name, tensor in wanted.items()}
    reader = dcp.HuggingFaceStorageReader(str(run / "checkpoints/step-00000004"))
    dcp.load(found, storage_reader=reader)
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


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
    pipe(run / name)
    with contextlib.suppress(UserError):
        toy.train(run)


@pytest.mark.parametrize("words", [[], ["checkpoint.resume=never"]])
def test_a_checkpoints_folder_that_is_a_link_is_refused(run, tmp_path, words):
    other = run.rename(tmp_path / "other")
    run.mkdir()
    (run / "checkpoints").symlink_to(other / "checkpoints")
    with pytest.raises(UserError, match="run/checkpoints: a link, not a folder of checkpoints"):
        toy.train(run, words)
    assert checkpoints(other) == ["step-00000002", "step-00000004"]


def test_an_old_checkpoint_that_cannot_be_removed_does_not_end_the_run(run, monkeypatch, capsys):
    """As on NFS, while another process has it open."""

    def stays(path):
        raise OSError(errno.ENOTEMPTY, "Directory not empty")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_remove", stays)
        toy.train(run, ["checkpoint.keep=1"])
    assert "step-00000002: cannot be removed: Directory not empty" in capsys.readouterr().err


def test_the_restored_state_does_not_live_in_the_file(run, monkeypatch):
    mapped = []
    original = loop.Loop._update

    def update(self, step):
        mapped.append("step-00000004" in Path("/proc/self/maps").read_text())
        original(self, step)

    monkeypatch.setattr(loop.Loop, "_update", update)
    gc.collect()
    toy.train(run)
    gc.collect()
    assert len(mapped) == 3 and not any(mapped[1:])


# A full disk, hostile files


def test_a_checkpoint_that_does_not_fit_ends_the_run_with_one_line(tmp_path, whole):
    """Files cannot grow beyond 6 kB, as on a full disk."""
    dies_after(3, toy.train, tmp_path / "run")
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
    assert checkpoints(tmp_path / "run") == ["step-00000002"]  # nothing half-written
    toy.train(tmp_path / "run")
    assert toy.left_behind(tmp_path / "run") == toy.left_behind(whole)


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


@pytest.mark.parametrize("write", [files.write_bytes, written.write])
def test_a_file_in_shared_memory_is_replaced_and_what_is_open_is_written_to(write, tmp_path):
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        path = Path(name, "table.csv")
        path.write_text("old")
        reader = path.open()
        write(path, b"new")
        assert (reader.read(), path.read_text()) == ("old", "new")
        if write is files.write_bytes:
            write(Path(name, "new", "table.csv"), b"new")
    with open(tmp_path / "redirected", "wb") as file:
        write(Path(f"/dev/fd/{file.fileno()}"), b"told")
    assert (tmp_path / "redirected").read_text() == "told"
    (tmp_path / "full").symlink_to("/dev/full")
    for path in (Path("/dev/full"), tmp_path / "full"):
        with pytest.raises(ValueError, match=f"{path}: cannot write: No space left on device"):
            write(path, b"new")
        assert path.is_char_device()


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
    (newest / STATE).write_bytes(bomb)
    (newest / "meta.json").write_bytes(bomb)
    seal(newest, **{"../../../outside/kept": {}})
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
