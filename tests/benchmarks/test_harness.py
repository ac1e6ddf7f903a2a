"""The benchmarks' harness, and that the commands of their README parse."""

import importlib
import json
import re
import shlex
from pathlib import Path

import pytest

from benchmarks import harness

README = (Path(__file__).resolve().parents[2] / "benchmarks/README.md").read_text()
COMMANDS = re.findall(r"^    python -m benchmarks\.(\w+)(.*)$", README, re.M)


@pytest.mark.parametrize(("name", "words"), COMMANDS)
def test_documented_commands_parse(name, words):
    module = importlib.import_module(f"benchmarks.{name}")
    assert module.parse(shlex.split(words)) and callable(module.main)


def test_every_benchmark_is_documented():
    files = {path.stem for path in (harness.ROOT / "benchmarks").glob("*.py")}
    headings = re.findall(r"^## `(\w+)\.py`", README, re.M)
    assert files - {"harness", "plain_gpt"} == set(headings)
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
