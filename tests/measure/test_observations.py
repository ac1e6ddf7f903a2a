"""What a run observes of itself: at its steps, after a resume, and what it refuses to observe."""

import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from measure import observations, representations
from sweeps import tables
from tests.measure.probed import logits
from tests.run_folders import STATE, dies_after, kept, lines, observed_bytes
from training import config as configs
from training import log, loop
from training import task as tasks
from training.errors import UserError
from training.experiment import load_experiment

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.xdist_group("observe")  # what all look at is trained once


def test_steps_zero_every_few_and_the_last_are_observed(run):
    found = lines(run, "observations.jsonl")
    assert [line["step"] for line in found] == [0, 2, 4, 5]
    assert {line["samples"] for line in found} == {3}
    assert set(observed_bytes(run)[1]) == {f"step_{step}.safetensors" for step in (0, 2, 4, 5)}
    start, end = found[0], found[-1]
    changes = lambda numbers: [v for k, v in numbers.items() if "change" in k or "relative" in k]
    for numbers in (*start["blocks"], start["all"]):
        assert set(changes(numbers)) == {0}
        assert numbers["kernel_alignment"] == pytest.approx(1)
    assert min(changes(end["all"])) > 0
    first, second = (block["key_change"] for block in end["blocks"])
    assert end["all"]["key_change"] == pytest.approx(((first**2 + second**2) / 2) ** 0.5)
    first, second = (block["head_variance"] for block in end["blocks"])
    assert end["all"]["head_variance"] == pytest.approx((first + second) / 2)
    keys = {"step", *found[0]["blocks"][0], *found[0]["all"]}
    assert keys == set(tables.OBSERVATIONS.columns)


def test_arrays_are_of_the_last_block_and_of_fixed_places(run, toy):
    arrays = load_file(run / "observations/step_5.safetensors")
    final = kept(toy.build_task(toy.config()), run)
    batch = observations.eval_batch(final, 3, "cpu")
    seen = representations.capture(final.model, batch, final.forward)
    last = seen.stream[-1]
    close = {"rtol": 1e-5, "atol": 1e-6}
    for name, kernel in {
        "pooled": representations.pooled_kernel,
        "spatial": representations.spatial_kernel,
        "last_token": representations.sample_kernel,
    }.items():
        torch.testing.assert_close(arrays[f"{name}_kernel"], kernel(last), **close)
    places = arrays["attention_places"].tolist()
    assert places == [[5, 0], [5, 3], [3, 0], [5, 5]]
    wanted = [torch.stack([logits(b)[0, :, t, s] for t, s in places]) for b in seen.blocks]
    torch.testing.assert_close(arrays["attention_entries"], torch.stack(wanted), **close)
    with torch.no_grad():
        outputs = final.model.eval()(batch[0])
    torch.testing.assert_close(arrays["outputs"], outputs[:, -1], **close)


def test_logits_of_a_model_without_tokens_are_stored_whole(toy, tmp_path):
    task = toy.build_task(toy.config())
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
    folders = [toy.train(f"every-{n}", training__observe_every=n) for n in (0, 1)]
    for name in (f"checkpoints/step-00000005/{STATE}", "metrics.jsonl"):
        assert len({(folder / name).read_bytes() for folder in folders}) == 1
    assert not (folders[0] / "observations").exists()


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
    plain = toy.train("plain", **changes)
    monkeypatch.setattr(torch, "compile", cheap)
    compiled = toy.train("compiled", **changes, training__compile=True)
    assert graphs
    logs = (lines(folder, "observations.jsonl") for folder in (plain, compiled))
    for one, two in zip(*logs, strict=True):
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

    check(toy.train("whole", training__log_every=1))
    # Of the steps after the checkpoint the first process leaves nothing, and all are taken again.
    dies_after(3, toy.train, "parts", training__log_every=1)
    check(toy.train("parts", training__log_every=1))


@pytest.mark.parametrize("step", [1, 3])
def test_a_resumed_run_has_observed_what_the_whole_one_has(toy, step):
    changes = {"training__observe_every": 1}
    whole = observed_bytes(toy.train("whole", **changes))
    dies_after(step, toy.train, "parts", **changes)
    folder = toy.folder / "parts"
    assert [line["step"] for line in lines(folder, "observations.jsonl")] == list(range(step + 1))
    (folder / "observations/.step_9.safetensors.0123abcd.tmp").write_text("half")
    dies_after(step - 1, toy.train, "parts", **changes)  # back to step 0 or 2, no further
    assert [line["step"] for line in lines(folder, "observations.jsonl")] == list(range(step))
    assert len(observed_bytes(folder)[1]) == step
    assert observed_bytes(toy.train("parts", **changes)) == whole


def test_a_stopped_run_does_not_go_on_with_arrays_that_have_changed(toy):
    folder = toy.folder / "run"
    dies_after(4, toy.run, toy.config(), folder)
    path = folder / "observations/step_2.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(UserError, match="no checkpoint can be used .*step_2.safetensors: not what"):
        toy.run(toy.config(), folder)


def test_what_is_not_finite_is_null(toy):
    task = toy.build_task(toy.config())
    tasks.initialise(task)
    current = observations.current_state(task)
    with torch.no_grad():
        task.model.blocks[1].attention.key.weight.fill_(torch.nan)
    batch, forward = observations.eval_batch(task, 2, "cpu"), observations.forward_of(task)
    found = observations.observe(observations.initial_state(task), current, batch, forward)
    line = json.loads(json.dumps(found.line(3), allow_nan=False))
    assert line["blocks"][1]["key_change"] is None and line["all"]["key_change"] is None
    assert line["blocks"][0]["key_change"] == 0


def test_what_cannot_be_observed_is_refused_before_training(toy):
    task = toy.build_task(toy.config())
    del task.model.blocks[0].attention.heads
    with pytest.raises(UserError, match="blocks.0 of Dropping cannot be observed"):
        loop.train(task, toy.folder / "run")
    few = toy.config(training__observe_samples=31)
    with pytest.raises(UserError, match="observe_samples 31 is more than the 30 samples of the va"):
        loop.train(toy.build_task(few), toy.folder / "run")
    assert not (toy.folder / "run").exists()


VIT = "model.patch_size=16 training.eval_batch_size=2 data.validation_images=3"
SHIPPED = {
    "nanolm_c4/configs/laptop.yaml": "schedule.warmup_steps=0 training.precision=bf16",
    "nanolm_c4/configs/infinite_limits_laptop.yaml": "model.heads=4 model.layers=2",
    "vit_cifar5m/configs/laptop.yaml": VIT,
}


@pytest.mark.parametrize("file", SHIPPED)
def test_shipped_configs_are_observed_alike_resumed_and_from_a_checkpoint(tmp_path, texts, file):
    """In float32, also during a run in bf16: its report differs in the last digits alone."""
    name = file.split("/")[0]
    experiment = load_experiment(name)
    words = (
        f"{SHIPPED[file]} training.steps=4 training.batch_size=2 training.observe_every=1 "
        "training.observe_samples=2 checkpoint.every=2 checkpoint.final=true"
    ).split()
    if name == "nanolm_c4":
        words += [*texts, "training.eval_samples=2"]
    cfg = configs.load(experiment.config, ROOT / file, words)
    whole, parts = (tmp_path / "results" / name / "single" / run for run in ("whole", "parts"))
    assert experiment.run(cfg, whole)["status"] == "finished"
    found = lines(whole, "observations.jsonl")
    assert [line["step"] for line in found] == [0, 1, 2, 3, 4] and len(found[-1]["blocks"]) == 2
    task = kept(experiment.build_task(cfg), whole)
    batch, forward = observations.eval_batch(task, 2, "cpu"), observations.forward_of(task)
    initial = observations.initial_state(task)
    end = observations.observe(initial, task.model, batch, forward).line(4)
    assert end["samples"] == found[-1]["samples"] == 2
    assert end["all"] == pytest.approx(found[-1]["all"], rel=1e-5)
    for mine, theirs in zip(end["blocks"], found[-1]["blocks"], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)
    assert end["all"]["function_change"] > 0
    dies_after(3, experiment.run, cfg, parts)  # one step past the checkpoint, observed again
    assert experiment.run(cfg, parts)["resumed_from"] == [2]
    assert observed_bytes(parts) == observed_bytes(whole)
