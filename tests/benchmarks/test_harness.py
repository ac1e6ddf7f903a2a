"""The benchmarks' harness, and that the commands of their README parse."""

import importlib
import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from benchmarks import harness, throughput, transfer_words
from benchmarks.transfer_words import PLANTED, judge, mup, train

README = (Path(__file__).resolve().parents[2] / "benchmarks/README.md").read_text()
COMMANDS = re.findall(r"^    python -m benchmarks\.(\w+)(.*)$", README, re.M)


@pytest.mark.parametrize(("name", "words"), COMMANDS)
def test_documented_commands_parse(name, words):
    module = importlib.import_module(f"benchmarks.{name}")
    assert module.parse(shlex.split(words)) and callable(module.main)


def test_every_benchmark_is_documented():
    files = {path.stem for path in (harness.ROOT / "benchmarks").glob("*.py")}
    headings = re.findall(r"^## `(\w+)\.py`", README, re.M)
    others = {"harness", "plain_gpt"}  # parts
    assert files - others == set(headings)
    assert {name for name, _ in COMMANDS} <= files


def test_alternatives_take_turns_in_an_order_that_rotates():
    seen = []
    actions = {name: lambda name=name: seen.append(name) or len(seen) for name in "abc"}
    found = harness.take_turns(actions, repeats=2, warmup=1)
    assert "".join(seen) == "abcbcacab"
    assert found == {"a": [6, 8], "b": [4, 9], "c": [5, 7]}
    assert harness.ratios(found, "a", "b")["median"] == pytest.approx((6 / 4 + 8 / 9) / 2)


def test_a_spread_is_the_median_with_quartiles():
    assert harness.spread([4.0, 1.0, 2.0, 3.0, 5.0]) == {
        "n": 5,
        "median": 3.0,
        "quartiles": [1.5, 4.5],
        "min": 1.0,
    }
    assert harness.spread([2.0])["quartiles"] == [2.0, 2.0]


def test_a_case_that_fails_in_its_process_is_one_line(monkeypatch):
    code = "import json, os; print('noise'); print(json.dumps(os.environ['OMP_NUM_THREADS']))"
    real = harness.subprocess.run

    def run(command, **options):
        assert command[1:3] == ["-m", "benchmarks.throughput"]
        return real([command[0], "-c", "exit(3)" if "bad" in command[-1] else code], **options)

    monkeypatch.setattr(harness.subprocess, "run", run)
    case = {"threads": 3, "device": "cpu"}
    assert harness.fresh("throughput", case) == "3"
    with pytest.raises(SystemExit, match="error: the process of .* ended with 3"):
        harness.fresh("throughput", {**case, "bad": True})


def test_the_document_is_printed_and_kept(tmp_path, capsys):
    path = tmp_path / "new" / "result.json"
    options = harness.parser("text").parse_args(["--json", str(path)])
    harness.show(options, "cpu", [{"a": 1}], unit="ms")
    document = json.loads(capsys.readouterr().out)
    assert document == json.loads(path.read_text())
    assert document["rows"] == [{"a": 1}] and document["unit"] == "ms"
    assert document["environment"]["packages"]["torch"]


@pytest.mark.parametrize("device", [(), ("--cpu",)])
def test_the_script_for_a_gpu_checks_before_it_times_and_its_commands_parse(device, tmp_path):
    """With a python that only says what it is given."""
    fake = tmp_path / "python"
    fake.write_text(f'#!/bin/sh\necho "$@" >>{tmp_path}/calls\n')
    fake.chmod(0o755)
    words = [*device, "--out", str(tmp_path), "some.yaml", "first", "second"]
    script = ["bash", str(harness.ROOT / "benchmarks/gpu.sh"), *words]
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    subprocess.run(script, env=environment, check=True, capture_output=True)
    *parts, first, second = (tmp_path / "calls").read_text().splitlines()
    names = []
    for words in map(shlex.split, parts):
        module = importlib.import_module(words[1])
        assert module.parse(words[2:]).device == ("cpu" if device else "cuda")
        names.append(words[1])
    assert names[0] == "benchmarks.gpu" and set(names[1:]) == {
        "benchmarks.optimizers",
        "benchmarks.throughput",
    }
    for words, preset in ((first, "first"), (second, "second")):
        assert words.startswith(f"-m sweeps run some.yaml --preset {preset}")


@pytest.mark.parametrize("words", [("--gpu",), ("some.yaml",)])
def test_the_script_for_a_gpu_refuses_what_it_does_not_know(words):
    script = ["bash", str(harness.ROOT / "benchmarks/gpu.sh"), *words]
    ran = subprocess.run(script, capture_output=True, text=True)
    assert ran.returncode == 2 and ran.stderr.startswith("error: ")


def test_a_row_of_speeds_has_the_share_of_the_ceiling_that_a_step_reaches():
    words = "--widths 64 --layers 2 --context 16 --head-dim 32 --vocab 64 --batch 2".split()
    case = throughput.cases(throughput.parse([*words, "--modes", "fp32"]))[1]
    row = throughput.summarise(case, [{"ms": [2.0, 4.0], "tensors_mb": 1.0}], {"fp32": 1e9})
    weights, pairs = 2 * 12 * 64**2 + 64 * 64, 2 * 16 * 16 / 2  # of scores and of values
    assert row["flops_per_step"] == 6 * 2 * (16 * weights + 2 * 64 * pairs)
    assert row["utilisation"] == row["flops_per_step"] / 3e-3 / 1e9


# The proof of transfer's words: its shipped losses judged again, and stacks of seeds

RESULTS = Path(transfer_words.__file__).parent / "results"
SHIPPED = {
    row["rule"]: row for row in json.loads((RESULTS / "transfer_words.json").read_text())["rows"]
}


@pytest.mark.parametrize("rule", PLANTED)
def test_at_most_one_word_of_twenty_is_wrong(rule):
    losses = transfer_words.read(RESULTS / "transfer_words.csv")[rule]
    row, known = judge(rule, 20, 2, losses), len(losses)
    assert row["wrong"] <= 0.05 and len(losses) == known
    kept = ("stays", "moves", "undecided", "wrong")
    assert {key: row[key] for key in kept} == {key: SHIPPED[rule][key] for key in kept}


def test_seeds_train_side_by_side_as_alone(monkeypatch):
    monkeypatch.setattr(transfer_words, "STEPS", 10)
    alone = [train(mup(8), 8, -5.0, range(seed, seed + 1))[0] for seed in range(2)]
    assert train(mup(8), 8, -5.0, range(2)) == pytest.approx(alone, rel=1e-4)
