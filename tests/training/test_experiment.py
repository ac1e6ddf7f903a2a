"""The contract of an experiment: what `load_experiment` finds, and what it refuses."""

import functools
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.training import toy_run as toy
from training import environment
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
    unused = dict.fromkeys("build_plan products tokens_per_step".split(), print)
    experiment = Experiment(
        name="toy", description="", config=RunConfig, build_task=build_task, result=str, **unused
    )
    summary = experiment.run(toy.build_config(), tmp_path / "run")
    assert summary["environment"]["commit"] == "begun"


@pytest.mark.parametrize(
    "words",
    [
        "sweeps run nanolm_c4/sweeps/figure_12_adam.yaml --dry-run".split(),
        "plots --list".split(),
        "param_groups exponents".split(),
        "param_groups check examples/coordinate_check_mlp.py --seeds 1 --out OUT".split(),
    ],
)
def test_who_has_seen_enough_ends_a_command_without_a_line(words, tmp_path):
    """As `| head` does; stdout's reader is gone before the command prints."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", *(str(tmp_path) if word == "OUT" else word for word in words)]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, cwd=ROOT, text=True)
    os.close(write)
    assert done.returncode == 141 and "error" not in done.stderr.lower()


@pytest.mark.parametrize(
    ("words", "ends", "code"),
    [
        ("status nanolm_c4/sweeps/quickstart.yaml", ">&- 2>&-", 0),
        ("run none.yaml", "2>/dev/full", 2),
    ],
)
def test_a_command_whose_messages_nobody_can_read_does_its_work(words, ends, code):
    done = subprocess.run(f"{sys.executable} -m sweeps {words} {ends}", shell=True, cwd=ROOT)
    assert done.returncode == code


def test_a_broken_pipe_of_another_process_is_told(capsys):
    with pytest.raises(SystemExit, match="2"), one_line_errors(OSError):
        raise BrokenPipeError(32, "Broken pipe")
    assert capsys.readouterr().err == "error: [Errno 32] Broken pipe\n"


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
    unused = dict.fromkeys("build_plan products tokens_per_step".split(), print)
    experiment = Experiment(
        name="toy",
        description="",
        config=RunConfig,
        build_task=toy.build_task,
        result=str,
        **unused,
    )
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
