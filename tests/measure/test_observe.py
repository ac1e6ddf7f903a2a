"""Observations during training, after a resume, in a sweep's table, and of runs kept on disk."""

import csv
import importlib
import json
import random
import shutil
import time
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from measure import observations, observe, representations
from nanolm_c4.config import Config as DecoderConfig
from sweeps import tables
from sweeps.reuse import Store, take_over
from sweeps.sweep import SweepWork
from sweeps.sweep_file import load_sweep
from training import checkpoint, environment, log, loop, signals
from training import config as configs
from training import task as tasks
from training.config import leaves, validate
from training.errors import RunError, UserError
from training.experiment import load_experiment

ROOT = Path(__file__).resolve().parents[2]

# A transformer that draws during training, and whose embedding changes after the plan has drawn.
TOY = '''
import torch
from torch import nn
from torch.utils.data import Dataset

from param_groups import Everett, plan
from param_groups.roles import DECODER_RULES
from measure.observations import ObservationRecorder
from measure.probes import ProbeRecorder
from nanolm_c4.model import Decoder
from training.settings import ObservedLoopConfig, RunConfig
from training.experiment import Experiment
from training.task import Task

class Config(RunConfig):
    width: int = 16
    data_seed: int = 2
    vocabulary: int = 20
    training: ObservedLoopConfig

class Dropping(Decoder):
    def forward(self, ids, targets=None):
        if self.training:
            ids = torch.where(torch.rand(ids.shape) < 0.3, 0, ids)
        return super().forward(ids, targets)

class Rows(Dataset):
    def __init__(self, seed):
        generator = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(0, 20, (30, 7), generator=generator)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return self.ids[index, :-1], self.ids[index, 1:]

@torch.no_grad()
def pad(model):
    model.token_embedding.weight[0] = 0

def build_task(config):
    width = config.width
    model = Dropping(vocab_size=config.vocabulary, context=6, layers=2, heads=4,
                     head_dim=width // 4, mlp_ratio=1, attention_scale=0.5)
    numbers = plan(model, DECODER_RULES, Everett("mup", width, 8), lr=config.optimizer.lr)
    return Task(
        config=config, model=model, plan=numbers, train_data=Rows(1),
        eval_data=Rows(config.data_seed), loss=lambda model, batch: model(*batch),
        count=lambda batch: torch.tensor(batch[1].numel()),
        forward=lambda model, batch: model(batch[0]), after_init=pad,
        recorders=[ObservationRecorder(), ProbeRecorder()],
    )

EXPERIMENT = Experiment(
    name="observed", description="", config=Config, build_task=build_task,
    flops=lambda config: 1.0, result=str,
    **dict.fromkeys(["build_plan", "parameters", "tokens_per_step", "memory"]),
)
run = EXPERIMENT.run
'''
SETTINGS = {
    "optimizer": {"name": "adam", "lr": 0.02},
    "schedule": {"name": "constant"},
    "training": {"steps": 5, "batch_size": 4, "observe_every": 2, "observe_samples": 3},
    "checkpoint": {"every": 2, "minutes": None, "final": True},
}


pytestmark = pytest.mark.xdist_group("observe")  # what all look at is trained once


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """The train module of an experiment in a package of its own."""
    root = tmp_path_factory.mktemp("package")
    name = "observed_" + root.name.replace("-", "_")
    (root / name).mkdir()
    (root / name / "__init__.py").write_text("")
    (root / name / "train.py").write_text(TOY)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(root))
        yield importlib.import_module(f"{name}.train")


def toy_in(package, root):
    """The experiment with a folder of runs."""
    name = package.__name__.partition(".")[0]
    return SimpleNamespace(**vars(package), folder=root / "results" / name / "single")


@pytest.fixture
def toy(package, tmp_path):
    return toy_in(package, tmp_path)


@pytest.fixture(scope="module")
def run(package, tmp_path_factory):
    """A finished run, to look at."""
    return train(toy_in(package, tmp_path_factory.mktemp("run")), "run")


def config(toy, **changes):
    keys = {key.replace("__", "."): value for key, value in changes.items()}
    data = configs.set_keys(SETTINGS, keys)
    if not data["training"]["observe_every"]:
        del data["training"]["observe_samples"]
    return validate(toy.Config, data, "toy")


def train(toy, name, **changes):
    """Trains one run in the toy's folder."""
    summary = toy.run(config(toy, **changes), toy.folder / name)
    assert summary["status"] == "finished"
    return toy.folder / name


def lines(folder, name="observations.jsonl"):
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def left(folder):
    """All that a run observed, as bytes."""
    arrays = {path.name: path.read_bytes() for path in (folder / "observations").iterdir()}
    return (folder / "observations.jsonl").read_bytes(), arrays


def values(numbers):
    return {key: value for key, value in numbers.items() if key != "step"}


# ------------------------------------------------------------------------------------------------
# During training


def test_steps_zero_every_few_and_the_last_are_observed(run):
    found = lines(run)
    assert [line["step"] for line in found] == [0, 2, 4, 5]
    assert {line["samples"] for line in found} == {3}
    assert set(left(run)[1]) == {f"step_{step}.safetensors" for step in (0, 2, 4, 5)}
    start, end = found[0], found[-1]
    for numbers in (*start["blocks"], start["all"]):
        assert all(value == 0 for key, value in numbers.items()
                   if "change" in key or "relative" in key)
        assert numbers["kernel_alignment"] == pytest.approx(1)
    assert all(value > 0 for key, value in end["all"].items()
               if "change" in key or "relative" in key)
    first, second = (block["key_change"] for block in end["blocks"])
    assert end["all"]["key_change"] == pytest.approx(((first**2 + second**2) / 2) ** 0.5)
    first, second = (block["head_variance"] for block in end["blocks"])
    assert end["all"]["head_variance"] == pytest.approx((first + second) / 2)
    assert set(found[0]["blocks"][0]) | set(found[0]["all"]) | {"step"} == set(
        tables.OBSERVATIONS.columns
    )


def test_arrays_are_of_the_last_block_and_of_fixed_places(run):
    arrays = load_file(run / "observations/step_5.safetensors")
    final = observe.load_kept(run, 3)
    assert final.step == 5
    seen = representations.capture(final.task.model, final.batch, final.task.forward)
    last = seen.stream[-1]
    close = {"rtol": 1e-5, "atol": 1e-6}
    for name, kernel in {"pooled": representations.pooled_kernel,
                         "spatial": representations.spatial_kernel,
                         "last_token": representations.sample_kernel}.items():
        torch.testing.assert_close(arrays[f"{name}_kernel"], kernel(last), **close)
    assert arrays["attention_places"].tolist() == [[5, 0], [5, 3], [3, 0], [5, 5]]
    expected = torch.stack(
        [torch.stack([b.logits()[0, :, t, s] for t, s in arrays["attention_places"].tolist()])
         for b in seen.blocks]
    )  # fmt: skip
    torch.testing.assert_close(arrays["attention_entries"], expected, **close)
    with torch.no_grad():
        logits = final.task.model.eval()(final.batch[0])
    torch.testing.assert_close(arrays["outputs"], logits[:, -1], **close)


def test_logits_of_a_model_without_tokens_are_stored_whole(toy, tmp_path):
    task = toy.build_task(config(toy))
    tasks.initialise(task)

    def pooled(model, batch):
        return model(batch[0])[:, :, 3]  # a class for each of the 6 tokens

    batch = observations.eval_batch(task, 4, "cpu")
    found = observations.observe(task.model, task.model, batch, pooled)
    observations.save_arrays(tmp_path, 7, found.arrays)
    with torch.no_grad():
        expected = task.model.eval()(batch[0])[:, :, 3]
    stored = load_file(tmp_path / "observations/step_7.safetensors")["outputs"]
    assert stored.shape == (4, 6)
    torch.testing.assert_close(stored, expected)


def test_observing_changes_no_bit_of_training(toy):
    folders = [train(toy, f"every-{n}", training__observe_every=n) for n in (0, 1)]
    states = [load_file(f / "checkpoints/step-00000005/state.safetensors") for f in folders]
    assert all(torch.equal(value, states[1][key]) for key, value in states[0].items())
    assert len({(folder / "metrics.jsonl").read_bytes() for folder in folders}) == 1
    assert not (folders[0] / "observations").exists()


def die_after(monkeypatch, step):
    original = loop.Loop._update

    def update(self, now):
        if now == step + 1:
            raise KeyboardInterrupt
        original(self, now)

    monkeypatch.setattr(loop.Loop, "_update", update)


def interrupted(toy, name, step, monkeypatch, **changes):
    with monkeypatch.context() as patch:
        die_after(patch, step)
        with pytest.raises(KeyboardInterrupt):
            train(toy, name, **changes)


def test_a_compiled_run_observes_what_an_uncompiled_one_does(toy, monkeypatch):
    graphs, original = [], torch.compile

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def cheap(model, **settings):
        return original(model, **{**settings, "backend": backend})

    # Batches of one size, which are traced once.
    sizes = {"steps": 2, "observe_every": 1, "eval_samples": 4, "eval_batch_size": 4}
    changes = {f"training__{key}": value for key, value in sizes.items()}
    plain = train(toy, "plain", **changes)
    monkeypatch.setattr(torch, "compile", cheap)
    compiled = train(toy, "compiled", **changes, training__compile=True)
    assert graphs
    for one, two in zip(lines(plain), lines(compiled), strict=True):
        assert two["all"] == pytest.approx(one["all"], rel=1e-5, abs=1e-7)
        for mine, theirs in zip(one["blocks"], two["blocks"], strict=True):
            assert theirs == pytest.approx(mine, rel=1e-5, abs=1e-7)


def test_observing_is_no_training_time(toy, monkeypatch):
    """By a clock of its own: a step takes 2 s, an observation 100, of which writing takes 30."""
    clock = SimpleNamespace(now=0.0, perf_counter=lambda: clock.now, monotonic=time.monotonic)

    def slow(owner, name, seconds):
        original = getattr(owner, name)

        def slowed(*args, **kwargs):
            clock.now += seconds
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, slowed)

    monkeypatch.setattr(loop, "time", clock)
    monkeypatch.setattr(log, "time", clock)
    slow(loop.Loop, "_update", 2)
    slow(loop, "evaluate", 7)
    slow(observations.ObservationRecorder, "observe", 70)
    slow(observations, "save_arrays", 30)

    def check(folder):
        summary = json.loads((folder / "summary.json").read_text())
        names = ("wall", "train", "eval", "observe")
        found = [summary[f"{name}_seconds"] for name in names]
        assert found == [10 + 7 + 400, 10, 7, 400]
        assert summary["targets_per_second"] == 5 * 4 * 6 / 10
        speeds = [line["samples_per_second"] for line in lines(folder, "timing.jsonl")]
        assert speeds == [2] * 5

    check(train(toy, "whole", training__log_every=1))
    # Of the steps after the checkpoint the first process leaves nothing, and all are taken again.
    interrupted(toy, "parts", 3, monkeypatch, training__log_every=1)
    check(train(toy, "parts", training__log_every=1))


@pytest.mark.parametrize("every", [0, 1])
def test_a_checkpoint_that_knows_nothing_of_observations_is_resumed(toy, monkeypatch, every):
    changes = {"training__observe_every": every}
    whole = train(toy, "whole", **changes)
    interrupted(toy, "parts", 3, monkeypatch, **changes)
    path = toy.folder / "parts/checkpoints/step-00000002"
    meta = json.loads((path / "meta.json").read_text())
    del meta["observe_seconds"]
    (path / "meta.json").write_text(json.dumps(meta))
    sums = {name: checkpoint._checksum(path / name) for name in ("state.safetensors", "meta.json")}
    (path / "checksums.json").write_text(json.dumps(sums))
    parts = train(toy, "parts", **changes)
    assert json.loads((parts / "summary.json").read_text())["resumed_from"] == [2]
    states = [load_file(f / "checkpoints/step-00000005/state.safetensors") for f in (whole, parts)]
    assert all(torch.equal(value, states[1][key]) for key, value in states[0].items())
    if every:
        assert left(parts) == left(whole)
    else:
        assert not (parts / "observations.jsonl").exists()


@pytest.mark.parametrize("step", [1, 3])
def test_a_resumed_run_has_observed_what_the_whole_one_has(toy, monkeypatch, step):
    changes = {"training__observe_every": 1}
    whole = left(train(toy, "whole", **changes))
    interrupted(toy, "parts", step, monkeypatch, **changes)
    folder = toy.folder / "parts"
    assert [line["step"] for line in lines(folder)] == list(range(step + 1))
    (folder / ".step_9.safetensors.0123abcd.tmp").write_text("half")
    interrupted(toy, "parts", step - 1, monkeypatch, **changes)  # back to step 0 or 2, no further
    assert [line["step"] for line in lines(folder)] == list(range(step))
    assert len(left(folder)[1]) == step
    assert left(train(toy, "parts", **changes)) == whole
    assert not list(folder.glob(".*.tmp"))


def test_what_is_not_finite_is_null(toy):
    task = toy.build_task(config(toy))
    tasks.initialise(task)
    current = observations.current_state(task)
    with torch.no_grad():
        task.model.blocks[1].attention.key.weight.fill_(torch.nan)
    found = observations.observe(
        observations.initial_state(task), current, observations.eval_batch(task, 2, "cpu"),
        observations.forward_of(task),
    )  # fmt: skip
    line = json.loads(json.dumps(found.line(3), allow_nan=False))
    assert line["blocks"][1]["key_change"] is None and line["all"]["key_change"] is None
    assert line["blocks"][0]["key_change"] == 0


def test_what_cannot_be_observed_is_refused_before_training(toy):
    task = toy.build_task(config(toy))
    task.forward = None
    with pytest.raises(UserError, match="no `forward` that returns them; give it one or set"):
        loop.train(task, toy.folder / "run")
    task = toy.build_task(config(toy))
    del task.model.blocks[0].attention.heads
    with pytest.raises(UserError, match="blocks.0 of Dropping cannot be observed"):
        loop.train(task, toy.folder / "run")
    few = config(toy, training__observe_samples=31)
    with pytest.raises(UserError, match="observe_samples 31 is more than the 30 samples of the va"):
        loop.train(toy.build_task(few), toy.folder / "run")
    task = toy.build_task(config(toy))
    sharded = tasks.LiveRun(task, toy.folder / "run", None, "cpu", True, True, nullcontext)
    with pytest.raises(UserError, match="training.observe_every is not supported with sharding"):
        task.recorders[0].start(sharded)
    assert not (toy.folder / "run").exists()


@pytest.mark.parametrize("every", [{}, {"training.observe_every": 0}])
def test_samples_that_nothing_observes_are_one_line(toy, every):
    data = json.loads(json.dumps(SETTINGS))
    del data["training"]["observe_every"]
    with pytest.raises(UserError, match="training.observe_samples 3 is given, but nothing is obse"):
        validate(toy.Config, configs.set_keys(data, every), "toy")
    del data["training"]["observe_samples"]
    kept = validate(toy.Config, configs.set_keys(data, every), "toy")
    assert not {"observe_every", "observe_samples"} & kept.model_dump()["training"].keys()


SHIPPED = {
    "nanolm_c4/configs/laptop.yaml": ["schedule.warmup_steps=0", "training.precision=bf16"],
    "nanolm_c4/configs/infinite_limits_laptop.yaml": ["model.heads=4", "model.layers=2"],
    "vit_cifar5m/configs/laptop.yaml": [
        "model.patch_size=16", "training.eval_batch_size=2", "data.validation_images=3"],
}  # fmt: skip


@pytest.mark.parametrize("file", SHIPPED)
def test_shipped_configs_are_observed_alike_resumed_and_from_a_checkpoint(
    tmp_path, monkeypatch, file
):
    """In float32, also during a run in bf16: its report differs in the last digits alone."""
    name = file.split("/")[0]
    experiment = load_experiment(name)
    words = [*SHIPPED[file], "training.steps=4", "training.batch_size=2",
             "training.observe_every=1", "training.observe_samples=2",
             "checkpoint.every=2", "checkpoint.final=true"]  # fmt: skip
    if name == "nanolm_c4":
        words += [*texts(tmp_path), "training.eval_samples=2"]
    cfg = configs.load(experiment.config, ROOT / file, words)
    whole, parts = (tmp_path / "results" / name / "single" / run for run in ("whole", "parts"))
    assert experiment.run(cfg, whole)["status"] == "finished"
    found = lines(whole)
    assert [line["step"] for line in found] == [0, 1, 2, 3, 4] and len(found[-1]["blocks"]) == 2
    report, _ = observe.observe_run(whole)
    assert report["samples"] == found[-1]["samples"] == 2
    assert report["all"] == pytest.approx(found[-1]["all"], rel=1e-5)
    for mine, theirs in zip(report["blocks"], found[-1]["blocks"], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)
    assert report["all"]["function_change"] > 0
    with monkeypatch.context() as patch:
        die_after(patch, 3)  # one step past the checkpoint, which is observed again
        with pytest.raises(KeyboardInterrupt):
            experiment.run(cfg, parts)
    assert experiment.run(cfg, parts)["resumed_from"] == [2]
    assert left(parts) == left(whole)


def texts(folder):
    """Overrides for a few made documents and a tokeniser for them."""
    (folder / "texts").mkdir()
    draw = random.Random(0)
    for index in range(30):
        words = ["".join(draw.choices("abdeiklmnoprstu", k=draw.randint(2, 7))) for _ in range(40)]
        (folder / f"texts/{index:02}.txt").write_text(" ".join(words).capitalize() + ".")
    return ["data.source=local", f"data.path={folder / 'texts'}",
            f"data.cache_dir={folder / 'cache'}", "data.tokenizer_vocab_size=64",
            "data.validation_fraction=0.3"]  # fmt: skip


# ------------------------------------------------------------------------------------------------
# A sweep's table


def writer(kind):
    return lambda asked, summaries: tables.write_table(asked, kind, asked.points, summaries)


write_observations = writer(tables.OBSERVATIONS)
write_observed_kernels = writer(tables.OBSERVED_KERNELS)
write_observed_attention = writer(tables.OBSERVED_ATTENTION)


def sweep(toy, **more):
    folder = Path(toy.__file__).parent
    (folder / "base.yaml").write_text(json.dumps(SETTINGS))
    keys = {"experiment": folder.name, "config": "base.yaml", "grid": {"width": [8, 16]}}
    text = json.dumps({**keys, "curves": {"a": {}}, "set": {"training.steps": 3}, **more})
    (folder / "s.yaml").write_text(text)
    return load_sweep(folder / "s.yaml", toy.folder.parent.parent)


@pytest.fixture(scope="module")
def observed(package, tmp_path_factory):
    """A sweep that asks for observations, and the summaries of its two runs."""
    toy = toy_in(package, tmp_path_factory.mktemp("sweep"))
    asked = sweep(toy, observations=True)
    return asked, {p.run: toy.run(p.config, asked.folder / p.run) for p in asked.points}


def table(path):
    """The rows of a table; what a run is and where it stands in the grid comes first."""
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    place = ["curve", "training.steps", "width", "horizon", "constants", "seed", "run", "step"]
    assert list(rows[0])[: len(place)] == place
    return rows


@contextmanager
def changed(path):
    """A file that is as before afterwards."""
    content = path.read_bytes()
    try:
        yield
    finally:
        path.write_bytes(content)


def test_only_finished_runs_are_in_the_tables(observed):
    """The last step that any other has observed is not after training."""
    asked, summaries = observed
    first, second = (point.run for point in asked.points)
    for write in (write_observations, write_observed_kernels, write_observed_attention):
        assert {row["run"] for row in table(write(asked, summaries))} == {first, second}
        for status in ("diverged", "stopped", "failed"):
            some = {**summaries, first: {**summaries[first], "status": status}}
            assert {row["run"] for row in table(write(asked, some))} == {second}


def test_a_sweeps_table_has_a_row_per_block_and_one_for_all(toy, observed):
    asked, summaries = observed
    rows = table(write_observations(asked, summaries))
    assert len(rows) == 2 * 3 * 3  # runs, steps, two blocks and all
    row = next(r for r in rows if (r["width"], r["step"], r["block"]) == ("16", "3", "1"))
    line = lines(asked.folder / row["run"])[-1]
    assert float(row["key_change_weights"]) == line["blocks"][1]["key_change_weights"]
    assert row["function_change"] == "" and (row["curve"], row["seed"]) == ("a", "0")
    row = next(r for r in rows if (r["run"], r["step"], r["block"]) == (row["run"], "3", "all"))
    assert float(row["function_change"]) == line["all"]["function_change"]
    failed = {run: {"status": "failed"} for run in summaries}
    for write in (write_observations, write_observed_kernels, write_observed_attention):
        assert write(sweep(toy), summaries) is None and write(asked, failed) is None


def test_kernels_of_the_first_and_the_last_step_are_in_a_table(observed):
    asked, summaries = observed
    rows = table(write_observed_kernels(asked, summaries))
    assert len(rows) == 2 * 2 * (6 + 6 + 21)  # runs, steps, halves of two 3 x 3 and one 6 x 6
    assert [r["width"] for r in rows] == sorted((r["width"] for r in rows), key=int)
    for point in asked.points:
        for step in (0, 3):  # and not the one between
            arrays = load_file(asked.folder / point.run / f"observations/step_{step}.safetensors")
            for kind, name in (("pooled", "pooled_kernel"), ("spatial", "spatial_kernel"),
                               ("last_token", "last_token_kernel")):
                own = {(int(r["row"]), int(r["column"])): float(r["value"]) for r in rows
                       if (r["run"], r["step"], r["kind"]) == (point.run, str(step), kind)}
                for (row, column), value in own.items():
                    assert value == pytest.approx(arrays[name][row, column].item(), rel=1e-5)
                side = len(arrays[name])
                assert set(own) == {(i, j) for i in range(side) for j in range(i, side)}


def test_attention_logits_over_heads_are_in_a_table(observed):
    asked, summaries = observed
    rows = table(write_observed_attention(asked, summaries))
    assert len(rows) == 2 * 2 * 2 * 4 * 4  # runs, steps, blocks, places, heads
    for point in asked.points:
        arrays = load_file(asked.folder / point.run / "observations/step_3.safetensors")
        own = [r for r in rows if (r["run"], r["step"], r["block"]) == (point.run, "3", "1")]
        places = arrays["attention_places"].tolist()
        assert {(int(r["token"]), int(r["attended"])) for r in own} == set(map(tuple, places))
        for row in own:
            place = places.index([int(row["token"]), int(row["attended"])])
            value = arrays["attention_entries"][1, place, int(row["head"])].item()
            assert float(row["value"]) == pytest.approx(value, rel=1e-5)


def test_large_kernels_are_thinned_and_unknown_arrays_left_out(observed):
    asked, summaries = observed
    path = asked.folder / asked.points[0].run / "observations/step_3.safetensors"
    kernel = torch.arange(130.0 * 130).view(130, 130)
    kernel[2, 4] = torch.nan
    with changed(path):
        save_file({"spatial_kernel": kernel, "outputs": torch.ones(2, 3)}, path)
        rows = table(write_observed_kernels(asked, summaries))
        own = [r for r in rows if (r["run"], r["step"]) == (asked.points[0].run, "3")]
        assert {r["kind"] for r in own} == {"spatial"} and len(own) == 44 * 45 / 2
        assert {int(r["column"]) for r in own} == set(range(0, 130, 3))
        assert all(float(r["value"]) == 130 * int(r["row"]) + int(r["column"]) for r in own)
        rows = table(write_observed_attention(asked, summaries))
        assert (asked.points[0].run, "3") not in {(r["run"], r["step"]) for r in rows}
        kernel[0, 3] = torch.inf
        save_file({"spatial_kernel": kernel}, path)
        rows = table(write_observed_kernels(asked, summaries))
        assert [(r["row"], r["column"]) for r in rows if r["value"] == ""] == [("0", "3")]


def test_arrays_that_cannot_be_read_are_named_and_leave_no_table(observed):
    asked, summaries = observed
    path = asked.folder / asked.points[0].run / "observations/step_3.safetensors"
    for kept in asked.folder.glob("observed_*.csv"):
        kept.unlink()
    with changed(path):
        for damage in (lambda: path.write_bytes(path.read_bytes()[:-8]), path.unlink):
            damage()
            for write in (write_observed_kernels, write_observed_attention):
                with pytest.raises(RunError, match="cannot read the arrays of step 3") as error:
                    write(asked, summaries)
                assert str(path) in str(error.value) and "to run again" in str(error.value)
    assert not list(asked.folder.glob("observed_*.csv"))


def test_a_sweep_writes_every_table_it_is_asked_for(observed):
    asked, _ = observed
    SweepWork(asked, Store(asked.folder).recall).write(final=True)  # all its runs are done
    written = {path.name for path in asked.folder.glob("*.csv")}
    assert {"observations.csv", "observed_kernels.csv", "observed_attention.csv"} <= written


def test_a_run_taken_from_another_sweep_brings_its_observations(run, toy, monkeypatch):
    folder = shutil.copytree(run, toy.folder / "run")
    summary = json.loads((folder / "summary.json").read_text())
    summary["environment"]["commit"] = "abc"
    (folder / "summary.json").write_text(json.dumps(summary))
    monkeypatch.setattr(environment, "commit", lambda: "abc")
    assert take_over(folder, toy.folder / "copy") == summary
    assert left(toy.folder / "copy") == left(folder)


# ------------------------------------------------------------------------------------------------
# The command on runs kept on disk


def command(*words):
    """Standard output of the command in this process."""
    observe.main([str(word) for word in words])


def refusal(capsys, *words):
    """The one line that the command ends with."""
    with pytest.raises(SystemExit) as end:
        command(*words)
    error = capsys.readouterr().err.strip().splitlines()
    assert end.value.code == 2 and error[-1].startswith("error: ")
    return error[-1]


def test_the_command_prints_what_training_observed_and_writes_it(run, tmp_path, capsys):
    command(run, "--samples", "3", "--out", tmp_path / "report.json")
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == f"{run}: 3 samples, step 5 beside step 0"
    assert shown[1].split() == ["quantity", "block", "0", "block", "1", "all"]
    report, observed = json.loads((tmp_path / "report.json").read_text()), lines(run)[-1]
    assert report["all"] == pytest.approx(observed["all"], rel=1e-5)
    row = next(line.split() for line in shown if line.startswith("head_variance"))
    assert row[1:] == [f"{b['head_variance']:.4g}" for b in (*report["blocks"], report["all"])]
    command(run, "--json")  # as many samples as in training
    assert json.loads(capsys.readouterr().out) == report


def test_a_run_that_observed_nothing_shows_a_few_samples_as_far_as_there_are(toy, monkeypatch):
    folder = train(toy, "unobserved", training__observe_every=0)
    assert observe.observe_run(folder)[0]["samples"] == 8
    monkeypatch.setattr(observe, "SAMPLES", 31)
    assert observe.observe_run(folder)[0]["samples"] == 30


def test_the_command_writes_what_training_stored_of_a_step(run, tmp_path):
    command(run, "--samples", "3", "--step", "4", "--arrays", tmp_path / "new/arrays",
            "--out", tmp_path / "report.json")
    written = load_file(tmp_path / "new/arrays")
    stored = {f"step_{step}/{name}": array for step in (0, 4) for name, array in
              load_file(run / f"observations/step_{step}.safetensors").items()}
    assert written.keys() == stored.keys() and len(written) == 2 * 6
    for name, array in written.items():
        torch.testing.assert_close(array, stored[name], rtol=1e-5, atol=1e-6)
    assert not torch.equal(written["step_0/outputs"], written["step_4/outputs"])
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["arrays"]
    report, line = json.loads((tmp_path / "report.json").read_text()), lines(run)[2]
    assert (report["step"], line["step"]) == (4, 4)
    assert report["all"] == pytest.approx(line["all"], rel=1e-5)


def test_a_stopped_run_is_read_at_its_newest_step(toy, monkeypatch):
    original = loop.Loop._update

    def update(self, step):
        original(self, step)
        if step == 3:
            signals.signal.raise_signal(signals.signal.SIGTERM)

    monkeypatch.setattr(loop.Loop, "_update", update)
    folder = toy.folder / "run"
    assert toy.run(config(toy, training__observe_every=1), folder)["status"] == "stopped"
    report, arrays = observe.observe_run(folder, samples=3)
    assert report["step"] == 3 and "step_3/outputs" in arrays
    assert report["all"] == pytest.approx(lines(folder)[-1]["all"], rel=1e-5)


def test_references_give_the_distance_to_their_mean_with_and_without_the_run(toy, capsys):
    folders = [train(toy, f"seed-{seed}", seed=seed) for seed in range(3)]
    finals = [observe.load_kept(folder, 4) for folder in folders]
    with torch.no_grad():
        logits = [final.task.model.eval()(final.batch[0]).double() for final in finals]
    mean, scatter = (logits[1] + logits[2]) / 2, (logits[1] - logits[2]).square().mean() / 4
    outside = ((logits[0] - mean).square().mean() - scatter).item()
    found = observe.observe_run(folders[0], folders[1:], 4)[0]["function_distance"]
    assert found == {
        "mean_square": pytest.approx(outside, rel=1e-4), "references": 2, "is_one_of_them": False
    }
    noise = torch.stack(logits).var(0).mean().item() / 2
    inside = (logits[0] - mean).square().mean().item() - noise
    found = observe.observe_run(folders[0], folders, 4)[0]["function_distance"]
    assert found == {
        "mean_square": pytest.approx(inside, rel=1e-4), "references": 2, "is_one_of_them": True
    }
    command(folders[0], "--reference", *folders, "--samples", "4")
    assert "mean of the other 2 references, its scatter taken off" in capsys.readouterr().out


def test_runs_that_cannot_be_observed_are_one_line(run, toy, capsys, tmp_path):
    def broken(name, change):
        copy = shutil.copytree(run, toy.folder / name)
        change(copy)
        return refusal(capsys, copy)

    def status(word):
        def change(copy):
            summary = json.loads((copy / "summary.json").read_text())
            (copy / "summary.json").write_text(json.dumps({**summary, "status": word, "step": 3}))

        return change

    def tear(copy):
        path = copy / "checkpoints/step-00000005/state.safetensors"
        path.write_bytes(path.read_bytes()[:-8])

    def other_config(copy):
        text = (copy / "config.yaml").read_text()
        (copy / "config.yaml").write_text(text.replace("lr: 0.02", "lr: 0.01"))

    assert "no such run; expected a folder with config.yaml" in refusal(capsys, tmp_path / "no")
    assert "it has no summary.json; train it" in broken("a", lambda c: (
        c / "summary.json").unlink())
    assert "diverged at step 3; only a run that is finished or stopped" in (
        broken("c", status("diverged")))
    assert "no checkpoint in it; run the same config with checkpoint.final=true, which" in (
        broken("d", lambda c: shutil.rmtree(c / "checkpoints")))
    assert "no checkpoint of step 3, it has kept 4, 5; checkpoint.every and checkpoint.keep" in (
        refusal(capsys, run, "--step", 3))
    assert "differs from what was written (checksum); the run has to" in broken("e", tear)
    assert "another config (optimizer.lr 0.02 -> 0.01)" in broken("f", other_config)
    assert "experiment 'nothing' has no train.py here" in (
        refusal(capsys, run, "--experiment", "nothing"))
    assert "experiment 'training' has no train.py" in (
        refusal(capsys, run, "--experiment", "training"))
    assert "--samples: 0 given, expected at least 1" in refusal(capsys, run, "--samples", 0)


def test_more_samples_than_there_are_is_one_line(run, capsys):
    command(run, "--samples", 30)
    assert "30 samples, step 5" in capsys.readouterr().out
    assert refusal(capsys, run, "--samples", 31) == (
        f"error: {run}: --samples 31 is more than the 30 samples of the validation data; lower "
        "it or give more validation data"
    )


def test_references_on_other_data_or_outputs_are_one_line(run, toy, capsys):
    data = train(toy, "data", data_seed=3)
    outputs = train(toy, "outputs", vocabulary=21)
    short = train(toy, "short", training__steps=1)
    assert f"{short}: no checkpoint of step 5, it has kept 1" in (
        refusal(capsys, run, "--reference", short))
    assert f"{data}: its first 3 samples are not those of {run}; compare" in (
        refusal(capsys, run, "--reference", data))
    line = refusal(capsys, run, "--reference", outputs)
    assert "its outputs have shape (3, 6, 21), those of" in line and "same outputs" in line
    assert "leaving one out needs an ensemble of at least two" in (
        refusal(capsys, run, "--reference", run))


def test_help_describes_the_keys():
    found = {key: item.description for key, item in leaves(DecoderConfig)}
    assert "from step 0 on; 0 for none" in found["training.observe_every"]
    assert found["training.observe_samples"].startswith("Validation samples")
