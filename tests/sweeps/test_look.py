"""Runs are found by their keys, named by as little as is unique, and seen with what differs."""

import importlib.util
import json
import os
import shutil
from pathlib import Path

import pytest

from sweeps import look
from sweeps.__main__ import main
from training.config import to_yaml
from training.files import locked

ROOT = Path(__file__).resolve().parents[2]
spec = importlib.util.spec_from_file_location("toy_run", ROOT / "tests/training/toy_run.py")
toy = importlib.util.module_from_spec(spec)
spec.loader.exec_module(toy)

RUNS = {  # rate and seed, and the status
    "first/mup-aa11": (0.01, 0, "finished"),
    "first/mup-ab22": (0.05, 0, "diverged"),
    "first/standard-aa33": (0.05, 1, "finished"),
    "second/mup-ab22": (0.2, 1, None),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a run that the loop has trained."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    toy.train(folder, ["training.log_every=1"])
    return folder


@pytest.fixture
def results(trained, tmp_path):
    """Runs of two sweeps that differ in their rates and seeds; the last one was killed."""
    for name, (rate, seed, status) in RUNS.items():
        folder = tmp_path / "toys" / name
        shutil.copytree(trained, folder)
        config = toy.build_config([f"optimizer.lr={rate}", f"seed={seed}"])
        (folder / "config.yaml").write_text(to_yaml(config))
        plan = json.loads((folder / "plan.json").read_text())
        for row in plan["rows"]:
            row["lr"] *= rate / 0.05
        (folder / "plan.json").write_text(json.dumps(plan))
        summary = json.loads((folder / "summary.json").read_text())
        if status is None:
            (folder / "summary.json").unlink()
        else:
            changed = {**summary, "status": status, "final_eval_loss": 2 + rate}
            (folder / "summary.json").write_text(json.dumps(changed))
    return tmp_path


@pytest.fixture
def command(results, capsys, monkeypatch):
    """Gives a command; its output, and with `fails` its one line of error."""
    monkeypatch.setenv("COLUMNS", "80")

    def give(*words, fails=False):
        if not fails:
            main([*words, "--results", str(results)])
            return capsys.readouterr().out
        with pytest.raises(SystemExit) as ended:
            main([*words, "--results", str(results)])
        assert ended.value.code == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line

    return give


@pytest.mark.parametrize(
    ("conditions", "numbers"),
    [
        ((), (0, 1, 2, 3)),
        (("optimizer.lr=0.05",), (1, 2)),
        (("optimizer.lr==0.05",), (1, 2)),
        (("optimizer.lr>0.01", "seed=1"), (2, 3)),
        (("optimizer.lr>=0.05", "optimizer.lr<0.2"), (1, 2)),
        (("optimizer.lr<=0.01",), (0,)),
        (("status=finished",), (0, 2)),
        (("status!=finished", "sweep=toys/first"), (1,)),
        (("status=unfinished",), (3,)),
        (("final_eval_loss<2.05",), (0,)),
        (("optimizer.clip_norm=null", "optimizer.name=adam", "run=mup-ab22"), (1, 3)),
        (("sweep=first", "final_eval_loss<3"), (0, 1, 2)),
        (("sweep!=first",), (3,)),
        (("status=stopped",), ()),
        (("seed=7",), ()),
    ],
)
def test_runs_are_found_by_keys_of_config_and_summary(command, results, conditions, numbers):
    names = list(RUNS)
    found = command("list", "--paths", *conditions).split()
    assert sorted(found) == sorted(str(results / "toys" / names[n]) for n in numbers)


def test_a_list_shows_what_differs_and_the_last_losses(command, results):
    with locked(results / "toys/second/mup-ab22", "run"):
        lines = [line.split() for line in command("list").splitlines()]
    assert lines[0] == "sweep run status step seed lr train loss eval loss".split()
    assert [line[1] for line in lines[1:]] == ["mup-aa11", "mup-ab22", "standard-aa33", "mup-ab22"]
    assert lines[1][2:6] == ["finished", "7", "0", "0.01"] and lines[1][7] == "2.01"
    assert lines[4][:6] == ["toys/second", "mup-ab22", "running", "7", "1", "0.2"]
    assert [line[-1] for line in command("list", "--keys", "optimizer.beta2").splitlines()[1:]]
    assert "beta2" in command("list", "--keys", "optimizer.beta2").splitlines()[0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("list", "optimizer.rl=1"),
            "no run has the key 'optimizer.rl'; did you mean 'optimizer.lr'?",
        ),
        (("list", "--keys", "sed"), "no run has the key 'sed'; did you mean 'seed'?"),
        (("list", "width"), "command line 'width': expected a key, one of < <= > >= == != and"),
        (("list", "seed=["), "command line seed=["),
        (
            ("list", "optimizer.name<3"),
            "command line optimizer.name<3: optimizer.name is 'adam', which "
            "is neither more nor less than 3; compare it by == or !=",
        ),
        (("list", "optimizer.lr>low"), "optimizer.lr>low: optimizer.lr is 0.01, which is neither"),
        (("list", "status=[finished]"), "no status ['finished']"),
        (
            ("list", "status=finishd"),
            "command line status=finishd: no status 'finishd'; did you mean "
            "'finished'?; there are finished, diverged, stopped, running, unfinished",
        ),
        (("show", "mpu-aa11"), "no run 'mpu-aa11'; did you mean 'mup-aa11'?"),
        (
            ("show", "mup-ab"),
            "2 runs begin with 'mup-ab': toys/first/mup-ab22, toys/second/mup-ab22;",
        ),
        (("show", "mup-aa", "--png", "curve.xyz"), "--png: Format 'xyz' is not supported"),
        (
            ("show", "mup-aa", "--y", "gradient_nrm"),
            "--y: no run has logged 'gradient_nrm'; did you mean 'gradient_norm'?",
        ),
    ],
)
def test_a_mistake_is_one_line(command, words, message):
    assert message in command(*words, fails=True)


@pytest.mark.parametrize(
    ("name", "content", "listed"),
    [
        ("plan.json", b'{"rows": [', 4),
        ("plan.json", b'{"forward": []}', 4),
        ("plan.json", None, 4),
        ("metrics.jsonl", b'{"step": 1}\n{"st\n', 4),
        ("metrics.jsonl", b"1\n", 4),
        ("metrics.jsonl", b'{"train_loss": 1.0}\n', 4),
        ("metrics.jsonl", None, 4),
        ("config.yaml", b"seed: \xff\xfe\n", 3),
        ("config.yaml", b"", 3),
        ("config.yaml", None, 3),
        ("summary.json", b"{", 3),
        ("summary.json", b'{"status": "x", "final_eval_loss": "y"}', 4),
    ],
)
def test_a_damaged_file_of_a_run_is_named(command, results, name, content, listed):
    path = results / "toys/first/standard-aa33" / name
    path.unlink()
    if content is None:
        os.mkfifo(path)
    else:
        path.write_bytes(content)
    line = command("show", "standard", fails=True)
    assert line.startswith(f"error: {path}: ")
    assert len(command("list", "--paths").splitlines()) == listed  # the others, at least


def test_a_damaged_run_is_left_out_of_a_list_and_named(results, capsys):
    path = results / "toys/first/standard-aa33/config.yaml"
    path.write_bytes(b"\xff")
    (results / "toys/second/mup-ab22/metrics.jsonl").write_text("1\n")
    main(["list", "--results", str(results)])
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 4 and "standard" not in out
    first, second = err.splitlines()[:2]
    assert first.startswith(f"left out: {path}: cannot read it (UnicodeDecodeError")
    assert second.startswith("3 of 3 runs: ")


def test_an_empty_results_folder_is_one_line(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["list", "--results", str(tmp_path / "none")])
    assert "none: no run in it; train one" in capsys.readouterr().err


@pytest.mark.parametrize("word", ["mup-aa", "first/mup-aa", "toys/first/mup-aa11"])
def test_a_run_is_named_by_what_is_unique(results, word):
    assert look.named(word, results).folder == results / "toys/first/mup-aa11"


def test_a_run_is_named_by_its_folder_wherever_it_lies(trained, tmp_path):
    assert look.named(str(trained), tmp_path).folder == trained


def test_show_has_result_config_plan_and_curve(command):
    text = command("show", "mup-aa11")
    assert "finished at step 7 of 7" in text and "eval loss 2.0100" in text
    assert "optimizer   name adam, lr 0.01," in text
    role = next(line.split() for line in text.splitlines() if line.startswith("readout"))
    assert role == ["readout", "1", "88", "0.125", "1", "0.0025", "2.83e-09", "0"]
    assert "train loss, x: eval loss" in text and "x" in text.split("│", 1)[1]
    assert max(map(len, text.splitlines()[-19:])) <= 80
    assert "gradient norm" in command("show", "mup-aa11", "--y", "gradient_norm")


def test_compare_says_what_differs_in_configs_and_plans(command):
    text = command("compare", "mup-aa", "standard")
    rows = {line.split("  ")[0]: line.split() for line in text.splitlines()}
    assert rows["optimizer.lr"][1:] == ["0.01", "0.05"] and rows["seed"][1:] == ["0", "1"]
    rates = [line.split()[2:] for line in text.splitlines() if line.startswith("plan: lr")]
    assert rates == [
        ["0.02", "0.1", "of", "token_embedding"],
        ["0.0025", "0.0125", "of", "readout"],
    ]
    assert "plan: eps" not in rows and "optimizer.beta1" not in rows
    assert "━━ seed 0, lr 0.01" in text and "━━ seed 1, lr 0.05" in text


def test_a_picture_is_drawn(command, tmp_path):
    for words, name in ((["show", "mup-aa"], "a.png"), (["compare", "mup-aa", "standard"], "b")):
        file = tmp_path / name
        assert command(*words, "--png", str(file)).splitlines()[-1] == str(file)
        assert file.read_bytes().startswith(b"\x89PNG")


def test_open_says_where_the_files_are(command, results):
    folder = results / "toys/first/mup-aa11"
    text = command("open", "mup-aa")
    assert text.splitlines()[0] == str(folder) and "  metrics.jsonl" in text.splitlines()
    assert "tensorboard" not in text
    (folder / "tensorboard").mkdir()
    assert f"tensorboard --logdir {folder.parent}" in command("open", "mup-aa")


def test_a_curve_is_where_its_points_are():
    """Eight by eight dots, of which the diagonal is drawn, and a cross in the corner above it."""
    lines = look.text_plot([[(0, 7.0), (7, 0.0)]], [[(7, 7.0)]], 4, 2).plain.splitlines()
    assert lines[:2] == ["       7 │⠑⢄ x", "       0 │  ⠑⢄"]
    assert look.text_plot([[(3, 2.0)]], [], 4, 1).plain.startswith("       2 │⠁   \n")
