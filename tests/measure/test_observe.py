"""The command that observes runs kept on disk."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from measure import observe
from tests.run_folders import STATE, lines
from training import loop, signals

pytestmark = pytest.mark.xdist_group("observe")  # what all look at is trained once


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
    report = json.loads((tmp_path / "report.json").read_text())
    observed = lines(run, "observations.jsonl")[-1]
    assert report["all"] == pytest.approx(observed["all"], rel=1e-5)
    row = next(line.split() for line in shown if line.startswith("head_variance"))
    assert row[1:] == [f"{b['head_variance']:.4g}" for b in (*report["blocks"], report["all"])]
    command(run, "--json")  # as many samples as in training
    assert json.loads(capsys.readouterr().out) == report


def test_a_run_that_observed_nothing_shows_a_few_samples_as_far_as_there_are(toy, monkeypatch):
    folder = toy.train("unobserved", training__observe_every=0)
    assert observe.observe_run(folder)[0]["samples"] == 8
    monkeypatch.setattr(observe, "SAMPLES", 31)
    assert observe.observe_run(folder)[0]["samples"] == 30


def test_the_command_writes_what_training_stored_of_a_step(run, tmp_path):
    command(
        run,
        "--samples",
        "3",
        "--step",
        "4",
        "--arrays",
        tmp_path / "new/arrays",
        "--out",
        tmp_path / "report.json",
    )
    written = load_file(tmp_path / "new/arrays")
    stored = {
        f"step_{step}/{name}": array
        for step in (0, 4)
        for name, array in load_file(run / f"observations/step_{step}.safetensors").items()
    }
    assert written.keys() == stored.keys() and len(written) == 2 * 6
    for name, array in written.items():
        torch.testing.assert_close(array, stored[name], rtol=1e-5, atol=1e-6)
    assert not torch.equal(written["step_0/outputs"], written["step_4/outputs"])
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["arrays"]
    report = json.loads((tmp_path / "report.json").read_text())
    line = lines(run, "observations.jsonl")[2]
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
    assert toy.run(toy.config(training__observe_every=1), folder)["status"] == "stopped"
    report, arrays = observe.observe_run(folder, samples=3)
    assert report["step"] == 3 and "step_3/outputs" in arrays
    assert report["all"] == pytest.approx(lines(folder, "observations.jsonl")[-1]["all"], rel=1e-5)


def test_references_give_the_distance_to_their_mean_with_and_without_the_run(toy, capsys):
    folders = [toy.train(f"seed-{seed}", seed=seed) for seed in range(3)]
    finals = [observe.load_kept(folder, 4) for folder in folders]
    with torch.no_grad():
        logits = [final.task.model.eval()(final.batch[0]).double() for final in finals]
    mean, scatter = (logits[1] + logits[2]) / 2, (logits[1] - logits[2]).square().mean() / 4
    outside = ((logits[0] - mean).square().mean() - scatter).item()
    found = observe.observe_run(folders[0], folders[1:], 4)[0]["function_distance"]
    assert found == {
        "mean_square": pytest.approx(outside, rel=1e-4),
        "references": 2,
        "is_one_of_them": False,
    }
    noise = torch.stack(logits).var(0).mean().item() / 2
    inside = (logits[0] - mean).square().mean().item() - noise
    found = observe.observe_run(folders[0], folders, 4)[0]["function_distance"]
    assert found == {
        "mean_square": pytest.approx(inside, rel=1e-4),
        "references": 2,
        "is_one_of_them": True,
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
        path = copy / f"checkpoints/step-00000005/{STATE}"
        path.write_bytes(path.read_bytes()[:-8])

    def other_config(copy):
        text = (copy / "config.yaml").read_text()
        (copy / "config.yaml").write_text(text.replace("lr: 0.02", "lr: 0.01"))

    assert "no such run; expected a folder with config.yaml" in refusal(capsys, tmp_path / "no")
    assert "it has no summary.json; train it" in broken(
        "a", lambda c: (c / "summary.json").unlink()
    )
    assert "diverged at step 3; only a run that is finished or stopped" in (
        broken("c", status("diverged"))
    )
    assert "no checkpoint in it; run the same config with checkpoint.final=true, which" in (
        broken("d", lambda c: shutil.rmtree(c / "checkpoints"))
    )
    assert "no checkpoint of step 3, it has kept 4, 5; checkpoint.every and checkpoint.keep" in (
        refusal(capsys, run, "--step", 3)
    )
    assert "differs from what was written (checksum); the run has to" in broken("e", tear)
    assert "another config (optimizer.lr 0.02 -> 0.01)" in broken("f", other_config)
    assert "experiment 'nothing' has no train.py here" in (
        refusal(capsys, run, "--experiment", "nothing")
    )
    assert "experiment 'training' has no train.py" in (
        refusal(capsys, run, "--experiment", "training")
    )
    elsewhere = shutil.copytree(run, tmp_path / "results" / "sweep" / "run")
    assert (
        f"{elsewhere}: by its folder a run of 'results', which has no train.py here; name its "
        "experiment, such as --experiment nanolm_c4" in refusal(capsys, elsewhere)
    )
    assert "--samples: 0 given, expected at least 1" in refusal(capsys, run, "--samples", 0)


def test_more_samples_than_there_are_is_one_line(run, capsys):
    command(run, "--samples", 30)
    assert "30 samples, step 5" in capsys.readouterr().out
    assert refusal(capsys, run, "--samples", 31) == (
        f"error: {run}: --samples 31 is more than the 30 samples of the validation data; lower "
        "it or give more validation data"
    )


def test_references_on_other_data_or_outputs_are_one_line(run, toy, capsys):
    data = toy.train("data", data_seed=3)
    outputs = toy.train("outputs", vocabulary=21)
    short = toy.train("short", training__steps=1)
    assert f"{short}: no checkpoint of step 5, it has kept 1" in (
        refusal(capsys, run, "--reference", short)
    )
    assert f"{data}: its first 3 samples are not those of {run}; compare" in (
        refusal(capsys, run, "--reference", data)
    )
    line = refusal(capsys, run, "--reference", outputs)
    assert "its outputs have shape (3, 6, 21), those of" in line and "same outputs" in line
    assert "leaving one out needs an ensemble of at least two" in (
        refusal(capsys, run, "--reference", run)
    )
