"""What holds for every experiment: plans, costs, runs, resuming, processes, keys and exit codes."""

import json
import math
import signal
import subprocess
import sys

import pytest
import torch

from param_groups import Plan
from tests.experiment_cases import CASES, HOW, ROOT, write_files
from tests.processes import finished
from tests.run_folders import lines
from tests.tracked import tracked
from training import loading, loop, task
from training.config import leaves, load
from training.errors import UserError
from training.experiment import load_experiment

# A process that makes an experiment's files and runs does so for all tests of it.
NAMES = {name: pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in CASES}
KEYS = [  # thorough: those of other experiments than the decoder's
    pytest.param(
        name, key, marks=(*NAMES[name].marks, *[pytest.mark.thorough] * (name != "nanolm_c4"))
    )
    for name, case in CASES.items()
    for key in case.all_changes()
]
CONFIGS = sorted(
    path.relative_to(ROOT) for name in CASES for path in tracked(f"{name}/configs/*.yaml")
)


class Small:
    """An experiment at its smallest, with its files and cache."""

    def __init__(self, case, files):
        self.case, self.files = case, files
        self.experiment = load_experiment(case.name)
        self.known = {}

    def words(self, *overrides):
        words = [*self.case.small, f"data.cache_dir={self.files}/cache", *overrides]
        return [word.format(files=self.files) for word in words]

    def config(self, *overrides):
        return load(self.experiment.config, self.case.config, self.words(*overrides))

    def trace(self, folder, *overrides):
        """All of what a run leaves behind that is the same every time."""
        summary = self.experiment.run(self.config("checkpoint.minutes=null", *overrides), folder)
        logs = [text(folder / f"{name}.jsonl") for name in ("metrics", "probes", "observations")]
        return logs, summary["status"], summary["parameters"]

    def base(self, folders, *overrides):
        """The trace that many cases start from: each is run once."""
        if overrides not in self.known:
            self.known[overrides] = self.trace(folders.mktemp("base"), *overrides)
        return self.known[overrides]


def text(path):
    return path.read_text() if path.exists() else None


@pytest.fixture(scope="session")
def smalls(tmp_path_factory):
    made = {}

    def small(name):
        if name not in made:
            files = tmp_path_factory.mktemp(name)
            write_files(CASES[name], files)
            made[name] = Small(CASES[name], files)
        return made[name]

    return small


@pytest.fixture(params=NAMES.values())
def small(request, smalls):
    return smalls(request.param)


def test_help_needs_neither_torch_nor_data():
    heavy = {"torch", "accelerate"}.union(*(case.imports for case in CASES.values()))
    code = (
        f"import sys, importlib\nfor name in {[*CASES]}:\n"
        "    try: importlib.import_module(f'{name}.train').EXPERIMENT.main(['--help'])\n"
        "    except SystemExit: pass\n"
        f"    assert not {heavy!r} & set(sys.modules), (name, {heavy!r} & set(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0 and result.stdout.count("optimizer.lr (") == 4, result.stderr


@pytest.mark.parametrize("name", CASES)
def test_help_names_every_key(name, capsys):
    experiment = load_experiment(name)
    with pytest.raises(SystemExit, match="0"):
        experiment.main(["--help"])
    text = capsys.readouterr().out
    for key, item in leaves(experiment.config):
        assert f"  {key} (" in text and item.description, key
    assert "optimizer.lr (float, required)" in text


@pytest.mark.parametrize("path", CONFIGS, ids=str)
def test_every_shipped_config_has_a_plan_without_data_and_its_cost(path, tmp_path, monkeypatch):
    experiment = load_experiment(path.parts[0])
    config = load(experiment.config, ROOT / path, [f"data.cache_dir={tmp_path / 'cache'}"])
    monkeypatch.chdir(tmp_path)
    plan = experiment.plan(config)
    assert not (tmp_path / "cache").exists()
    parameters = experiment.parameters(config)
    assert parameters["total"] == sum(math.prod(row.shape) for row in plan.rows)
    assert parameters["total"] == parameters["embedding"] + parameters["non_embedding"]
    assert experiment.flops(config) > 0 and experiment.tokens_per_step(config) > 0


def test_a_plan_is_printed_as_a_table_and_as_json_and_is_that_of_the_run(small, capsys):
    arguments = [str(small.case.config), *small.words()]
    small.experiment.main([*arguments, "--plan"])
    table = capsys.readouterr().out
    small.experiment.main([*arguments, "--json", "--plan"])
    plan = Plan.from_dict(json.loads(capsys.readouterr().out))
    made = small.experiment.build_task(small.config())
    assert plan.differences(made.plan) == []
    assert table == made.plan.table() + "\n"
    parameters = sum(parameter.numel() for parameter in made.model.parameters())
    assert small.experiment.parameters(small.config())["total"] == parameters
    with pytest.raises(SystemExit, match="2"):
        small.experiment.main([*arguments, "--json"])
    assert "--json goes with --plan" in capsys.readouterr().err


# Runs


def test_a_run_leaves_its_files_and_is_not_trained_again(small, tmp_path, capsys, monkeypatch):
    folder, config = tmp_path / "run", small.config("training.eval_every=3")
    arguments = [str(small.case.config), *small.words("training.eval_every=3")]
    small.experiment.main([*arguments, "--run-dir", str(folder)])
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["status"] == "finished"
    told = capsys.readouterr().err
    assert "step 6/6  train loss" in told
    outcome = f"finished: {small.experiment.result(summary)}; {folder}/summary.json"
    assert told.splitlines()[-1] == outcome
    files = "config.yaml plan.json metrics.jsonl timing.jsonl summary.json"
    assert {file.name for file in folder.iterdir()} - {".lock"} == {*files.split()}
    assert load(small.experiment.config, folder / "config.yaml") == config
    rows = json.loads((folder / "plan.json").read_text())["rows"]
    assert sum(math.prod(row["shape"]) for row in rows) == summary["parameters"]
    assert [line["step"] for line in lines(folder) if "eval_loss" in line] == [3, 6]
    monkeypatch.setattr(loop, "train", lambda *args: pytest.fail("trained again"))
    assert small.experiment.run(config, folder) == summary
    with pytest.raises(UserError, match=r"another config \(optimizer.lr \S+ -> 0.5\)"):
        small.experiment.run(small.config("optimizer.lr=0.5", "training.eval_every=3"), folder)


def test_a_stopped_run_ends_with_code_75_and_resumes_to_the_same_bits(small, tmp_path, monkeypatch):
    """With a data worker, a probe and, where there are any, observations on both sides of it."""
    words = "training.eval_every=2 checkpoint.final=true training.data_workers=1".split()
    words.append("training.probe_every=2")
    if "training.observe_every" in small.case.changes:
        words += ["training.observe_every=2", "training.observe_samples=2"]
    config = small.config(*words)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    small.experiment.run(config, whole)
    add, calls = task.Losses.add, []

    def stopping(self, *args):  # a signal during the third step
        add(self, *args)
        calls.append(1)
        if len(calls) == 3:
            signal.raise_signal(signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(task.Losses, "add", stopping)
        arguments = [str(small.case.config), *small.words(*words), "--run-dir", str(parts)]
        with pytest.raises(SystemExit) as ended:
            small.experiment.main(arguments)
    assert ended.value.code == 75
    assert small.experiment.run(config, parts)["resumed_from"] == [3]
    left = [
        {
            path.relative_to(folder): path.read_bytes()
            for pattern in ("*.jsonl", "observations/*", "checkpoints/step-00000006/*.safetensors")
            for path in folder.glob(pattern)
            if path.name != "timing.jsonl"
        }
        for folder in (whole, parts)
    ]
    assert left[0] == left[1] and len(left[0]) >= 3


def test_two_processes_train_the_run_that_one_does(small, tmp_path):
    """With accumulation, other evaluation batches, and an odd number of samples."""
    words = ["training.eval_samples=7", "training.eval_every=3"]
    if small.case.name == "bart_span_denoise":  # every process drops out for itself
        words += ["model.dropout=0.0", "model.attention_dropout=0.0"]
    small.experiment.run(small.config(*words, "training.eval_batch_size=50"), tmp_path / "1")
    more = [f"training.micro_batch_size={4 if small.case.name == 'vit_imagenet' else 2}"]
    script = tmp_path / "both.py"
    script.write_text(
        f"import sys; from torch import distributed; from {small.case.name}.train import *\n"
        "EXPERIMENT.main(sys.argv[1:])\n"
        "assert not distributed.is_initialized(), 'a peer may abort in it at its exit'\n"
    )
    command = [script, small.case.config, *small.words(*words, *more), "--run-dir", tmp_path / "2"]
    result = finished(*command, ranks=2, cwd=ROOT, PYTHONPATH=ROOT)
    assert result.returncode == 0, result.err
    assert result.err.count("step 6/6") == 1  # one process speaks
    one, two = (list(map(flat, lines(tmp_path / name))) for name in ("1", "2"))
    assert [line["step"] for line in one] == [line["step"] for line in two]
    for first, second in zip(one, two, strict=True):
        assert second == pytest.approx(first, rel=1e-4)
    summaries = [json.loads((tmp_path / n / "summary.json").read_text()) for n in "12"]
    for key in ("targets", "eval_targets"):
        assert summaries[0][key] == summaries[1][key]


def flat(line):
    """A line with the groups' numbers next to the others."""
    groups = line.pop("gradient_to_epsilon", {})
    return {**line, **{f"group {name}": value for name, value in groups.items()}}


# Every key has an effect: another value of it changes what a short run leaves behind.


def test_every_key_is_covered(small):
    # What checkpoint.* does is tested in tests/training/test_resume.py, key by key.
    case = small.case
    keys = [key for key, _ in leaves(small.experiment.config) if not key.startswith("checkpoint.")]
    covered = [*case.all_changes(), *HOW, *case.elsewhere, *case.refused]
    assert sorted(covered) == sorted(keys)


@pytest.mark.parametrize(("name", "key"), KEYS)
def test_every_key_changes_what_a_run_leaves_behind(smalls, name, key, tmp_path, tmp_path_factory):
    small = smalls(name)
    value, *words = small.case.all_changes()[key]
    changed = small.trace(tmp_path, *words, f"{key}={value}")
    assert changed != small.base(tmp_path_factory, *small.case.alone.get(key, words))


@pytest.mark.parametrize("key", HOW)
def test_the_other_keys_change_how_a_run_is_computed(small, key, tmp_path, monkeypatch):
    rows = {True: [], False: []}
    workers, compiled = set(), []
    values = (
        "training.micro_batch_size=4 training.eval_batch_size=2 training.compile=true "
        "training.cuda_graphs=true training.data_workers=1 training.trackers=[tensorboard] "
        f"data.cache_dir={tmp_path / 'cache'}"
    )
    value = dict(word.split("=") for word in values.split())[key]
    loader = loading.DataLoader

    def counted_loader(*args, **kwargs):
        workers.add(kwargs["num_workers"])
        return loader(*args, **kwargs)

    def counted_compile(model, **kwargs):  # to load the compiler would take seconds
        compiled.append(kwargs.get("mode", "default"))
        return model

    def counted(function):
        def call(model, batch):
            rows[model.training].append(len(batch[0]))
            return function(model, batch)

        return call

    monkeypatch.setattr(loading, "DataLoader", counted_loader)
    monkeypatch.setattr(torch, "compile", counted_compile)
    words = small.case.cache if key == "data.cache_dir" else ()
    words = ("training.compile=true",) if key == "training.cuda_graphs" else words
    made = small.experiment.build_task(small.config(*words, f"{key}={value}"))
    made.measure = counted(made.measure or (lambda model, batch: {"loss": loss(model, batch)}))
    loss, made.loss = made.loss, counted(made.loss)
    assert loop.train(made, tmp_path / "run")["status"] == "finished"
    assert max(rows[True]) == (4 if key == "training.micro_batch_size" else 8)
    assert max(rows[False]) == (2 if key == "training.eval_batch_size" else 8)
    modes = {"training.compile": ["default"], "training.cuda_graphs": ["reduce-overhead"]}
    assert compiled == modes.get(key, [])
    assert workers == {int(key == "training.data_workers")}
    assert (tmp_path / "run" / "tensorboard").exists() == (key == "training.trackers")
    assert (tmp_path / "cache").exists() == (key == "data.cache_dir")


def test_our_own_mistakes_keep_their_traceback(small, monkeypatch):
    monkeypatch.setattr("param_groups.plan", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        small.experiment.main([str(small.case.config), "--plan"])
