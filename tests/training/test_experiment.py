"""The contract of an experiment, its trackers, and the processes that load its data."""

import errno
import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from accelerate.tracking import TensorBoardTracker
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.processes import all_end, finished
from tests.run_folders import lines
from tests.training import toy_run as toy
from training import environment, runs
from training.config import load, to_yaml
from training.errors import UserError, one_line_errors
from training.experiment import Experiment, load_experiment
from training.settings import RunConfig

ROOT = Path(__file__).resolve().parents[2]


def test_a_failing_import_inside_a_train_file_keeps_its_own_error(tmp_path, monkeypatch):
    name = "failing_" + tmp_path.name.replace("-", "_")
    (tmp_path / name).mkdir()
    (tmp_path / name / "train.py").write_text("import no_such_package\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        load_experiment(name)


def toy_experiment(build_task):
    unused = dict.fromkeys("build_plan products tokens_per_step".split(), print)
    return Experiment(
        name="toy", description="", config=RunConfig, build_task=build_task, result=str, **unused
    )


def test_the_commit_of_a_run_is_that_of_the_code_that_began_it(tmp_path, monkeypatch):
    """Whoever commits while it trains changes files that it has read already."""
    heads = ["begun"]

    def git(command, **_):
        out = heads[-1] if "rev-parse" in command else ""
        return subprocess.CompletedProcess(command, 0, stdout=out)

    def build_task(config):
        heads.append("later")
        return toy.build_task(config)

    monkeypatch.setattr(environment, "subprocess", type("Git", (), {"run": staticmethod(git)}))
    monkeypatch.setattr(environment, "commit", functools.cache(environment.commit.__wrapped__))
    summary = toy_experiment(build_task).run(toy.build_config(), tmp_path / "run")
    assert summary["environment"]["commit"] == "begun"


# A command whose stdout is `end`, or a pipe that nobody reads, as behind `| head`.
ENDS = """
import os, runpy, sys
end, *sys.argv = sys.argv[1:]
read, write = os.pipe()
os.close(read)
os.dup2(os.open(end, os.O_WRONLY) if end else write, 1)
sys.stdout = open(1, "w", closefd=False)
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""
COMMANDS = [
    "sweeps run nanolm_c4/sweeps/quickstart.yaml --dry-run",
    "nanolm_c4.train nanolm_c4/configs/laptop.yaml --plan --json",
    "param_groups trace examples/coordinate_check_mlp.py",
    "plots --list",
    "param_groups exponents",
]
FULL = "error: standard output: cannot write: No space left on device\n"


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(("end", "code", "says"), [("", 141, ""), ("/dev/full", 2, FULL)])
def test_a_command_whose_output_cannot_be_written(command, end, code, says, tmp_path):
    """Who has seen enough ends it without a line, a full disk with one; tests/param_groups has
    `check`."""
    script, words = tmp_path / "ends.py", command.split()
    script.write_text(ENDS)
    if len(words) > 2:  # torch is there already
        done = finished(script, end, *words, cwd=ROOT, PYTHONPATH=ROOT)
        told = done.err
    else:  # and to the end of Python itself
        line, there = [sys.executable, script, end, *words], {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(line, stderr=subprocess.PIPE, cwd=ROOT, text=True, env=there)
        told = done.stderr
    assert done.returncode == code
    assert told.endswith(says) and told.lower().count("error") == bool(says)


@pytest.mark.parametrize("ends", [">&- 2>&-", "2>/dev/full"])
def test_a_mistake_that_nobody_can_read_is_exit_code_2_all_the_same(ends):
    command = f"{sys.executable} -m sweeps run none.yaml {ends}"
    assert subprocess.run(command, shell=True, cwd=ROOT).returncode == 2


LIMIT = "; raise the limit, `ulimit -n`, or take fewer workers"


@pytest.mark.parametrize(
    ("number", "file", "more"),
    [(errno.EPIPE, None, ""), (errno.EMFILE, None, LIMIT), (errno.EMFILE, "a", f": 'a'{LIMIT}")],
)
def test_what_the_system_refuses_is_told_with_what_to_do(number, file, more, capsys):
    """A pipe of another process, say, and no file, though there is none to name."""
    with pytest.raises(SystemExit, match="2"), one_line_errors(OSError):
        raise OSError(number, os.strerror(number), file)
    assert capsys.readouterr().err == f"error: [Errno {number}] {os.strerror(number)}{more}\n"


@pytest.mark.parametrize("length", [1, 100, 100_000])  # within the buffer, and beyond it
def test_a_full_disk_behind_stdout_is_named(length, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdout", open("/dev/full", "w"))
    with pytest.raises(SystemExit, match="2"), one_line_errors(OSError):
        for _ in range(1000):
            print("x" * length)
    assert capsys.readouterr().err == FULL
    sys.stdout.close()  # as Python does at its end: nothing is held that cannot be written


def test_a_mistake_is_told_though_stdout_is_full(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdout", open("/dev/full", "w"))
    with pytest.raises(SystemExit, match="2"), one_line_errors():
        print("plan")
        raise UserError("a mistake")
    assert capsys.readouterr().err == "error: a mistake\n"
    sys.stdout.close()


@pytest.mark.parametrize("name", ["vit_imagenet", "bart_span_denoise", "vit_cifar5m", "nanolm_c4"])
def test_a_batch_smaller_than_the_processes_is_refused_before_data_is_read(name, monkeypatch):
    experiment = load_experiment(name)
    laptop, words = ROOT / name / "configs/laptop.yaml", ["training.batch_size=32"]
    config = load(experiment.config, laptop, words)
    many = SimpleNamespace(num_processes=64, is_main_process=True)
    monkeypatch.setattr("training.processes.state", lambda: many)
    with pytest.raises(UserError, match=r"training.batch_size 32 does not divide by 64 processes"):
        experiment.run(config, Path("not/made"))


@pytest.mark.parametrize("key", ["data.bpe_encoder", "data.bpe_vocab", "data.bpe_dictionary"])
def test_files_of_barts_bpe_are_missed_before_a_sweep(key, tmp_path):
    keys = ("data.path", "data.bpe_encoder", "data.bpe_vocab", "data.bpe_dictionary")
    paths = {one: tmp_path / one for one in keys}
    for one, path in paths.items():
        if one != key:
            path.touch()
    experiment = load_experiment("bart_span_denoise")
    words = ["data.source=text", *(f"{one}={path}" for one, path in paths.items())]
    config = load(experiment.config, ROOT / "bart_span_denoise/configs/laptop.yaml", words)
    with pytest.raises(UserError, match=rf"{key}: .*{key} does not exist on this machine"):
        experiment.check_data(config)


def test_a_run_does_not_write_over_the_config_that_it_is_given(tmp_path, capsys):
    experiment = toy_experiment(toy.build_task)
    file, text = tmp_path / "own" / "config.yaml", "# mine\n" + to_yaml(toy.build_config())
    file.parent.mkdir()
    file.write_text(text)
    with pytest.raises(SystemExit) as caught:
        experiment.main([str(file), "--run-dir", str(file.parent)])
    assert caught.value.code == 2 and capsys.readouterr().err == (
        f"error: {file}: the run would write its own config over it; choose another --run-dir\n"
    )
    assert file.read_text() == text and os.listdir(file.parent) == ["config.yaml"]
    run = tmp_path / "run"
    experiment.main([str(file), "--run-dir", str(run)])
    (run / "summary.json").unlink()  # as if it had died: its own config trains it to its end
    experiment.main([str(run / "config.yaml"), "--run-dir", str(run)])
    assert (run / "summary.json").exists()


# Trackers show what metrics.jsonl says; they change no number, and none can fail a run


SHOWN = ["training.trackers=[tensorboard]"]


def curves(folder):
    """What TensorBoard shows of a run."""
    events = EventAccumulator(str(next(folder.glob("tensorboard/*"))), {"scalars": 0})
    events.Reload()
    tags = events.Tags()["scalars"]
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in tags}


def assert_shown_whole(folder, groups):
    shown, logged = curves(folder), lines(folder)
    for key in ("train_loss", "eval_loss", "gradient_norm", "lr_factor"):
        wanted = [(line["step"], line[key]) for line in logged if key in line]
        assert shown[key] == [(step, pytest.approx(value, rel=1e-6)) for step, value in wanted]
    factors = dict(shown["lr_factor"])
    for name, rate in groups.items():
        assert shown[f"lr/{name}"] == [
            (step, pytest.approx(factor * rate, rel=1e-6)) for step, factor in factors.items()
        ]


def rates():
    plan = toy.build_task(toy.build_config()).plan
    return {row.role: row.lr for row in plan.rows}


def test_tensorboard_shows_the_lines_also_of_steps_that_are_taken_again(tmp_path):
    toy.train(tmp_path / "run", [*SHOWN, "checkpoint.keep=9"])
    assert_shown_whole(tmp_path / "run", rates())
    (tmp_path / "run/summary.json").unlink()  # as if killed long after the checkpoint of step 4
    for step in (6, 7):
        shutil.rmtree(tmp_path / f"run/checkpoints/step-0000000{step}")
    toy.train(tmp_path / "run", SHOWN)
    assert_shown_whole(tmp_path / "run", rates())


def test_only_the_first_of_several_processes_shows_the_run(tmp_path):
    result = finished(toy.__file__, tmp_path / "run", *SHOWN, ranks=2)
    assert result.returncode == 0, result.err
    assert len(list((tmp_path / "run").glob("tensorboard/*/*"))) == 1


def test_a_tracker_changes_neither_the_run_nor_its_name(tmp_path):
    for name, words in (("with", SHOWN), ("without", [])):
        toy.train(tmp_path / name, words)
    for file in ("metrics.jsonl", "probes.jsonl"):
        assert (tmp_path / "with" / file).read_bytes() == (tmp_path / "without" / file).read_bytes()
    shown = toy.build_config(["training.trackers=[wandb, mlflow]"])
    assert runs.run_id(shown) == runs.run_id(toy.build_config())


@pytest.mark.parametrize("place", ["start", "log", "finish"])
def test_a_tracker_that_fails_is_dropped_and_the_run_goes_on(place, tmp_path, monkeypatch, capsys):
    def fails(*args, **kwargs):
        raise RuntimeError("no network\nand more")

    monkeypatch.setattr(TensorBoardTracker, place, fails)
    assert toy.train(tmp_path, SHOWN)["status"] == "finished"
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "trackers" in line]
    assert line == "training.trackers: dropped, the run goes on: RuntimeError: no network"


# Data-loading processes end with the run, however it ends


SCRIPT = """
import os, sys
from pathlib import Path
from torch.utils.data import DataLoader, Dataset
from training import loading, signals
from training.errors import UserError, one_line_errors

class Rows(Dataset):
    def __len__(self):
        return 100
    def __getitem__(self, index):
        Path(sys.argv[2], str(os.getpid())).touch()
        if sys.argv[1] in ("bad", "leave") and index == 7:
            raise UserError("row 7: cannot be read; mend it")
        if sys.argv[1] == "long" and index == 7:
            raise UserError("row 7: cannot be read\\nin two lines: so")
        return index

loader = DataLoader(Rows(), batch_size=5, num_workers=2, worker_init_fn=signals.follow_parent)
keep = []
with one_line_errors():
    if sys.argv[1] == "leave":  # this iterator lives as long as the process
        batches = loading.batches(loader)
        next(batches)
        keep.append(batches.gi_frame.f_locals["iterator"])
        batches.close()
    for batch in loading.batches(loader):
        if sys.argv[1] == "crash":
            raise RuntimeError("a mistake of ours")
        if sys.argv[1] == "leave":
            keep.append(batch)
            sys.exit(3)
"""


@pytest.mark.parametrize(
    ("how", "code", "error"),
    [
        ("whole", 0, ""),
        ("bad", 2, "error: row 7: cannot be read; mend it\n"),
        ("long", 2, "error: row 7: cannot be read in two lines: so\n"),
        ("crash", 1, "RuntimeError: a mistake of ours\n"),
        ("leave", 3, ""),
    ],
)
def test_no_process_outlives_the_run_or_keeps_it(tmp_path, how, code, error):
    script, notes = tmp_path / "script.py", tmp_path / "notes"
    script.write_text(SCRIPT)
    notes.mkdir()
    if how == "leave":  # Python itself takes down what is left
        command, here = [sys.executable, script, how, notes], {"PYTHONPATH": str(ROOT)}
        result = subprocess.run(command, cwd=ROOT, env=here, capture_output=True, timeout=600)
        told = result.stderr.decode()
    else:
        result = finished(script, how, notes, cwd=ROOT)
        told = result.err
    assert result.returncode == code, told
    assert told.endswith(error) and (how == "crash" or told == error)
    workers = [int(path.name) for path in notes.iterdir()]
    assert workers
    assert all_end(workers)
