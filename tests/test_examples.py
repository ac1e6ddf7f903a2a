"""The examples: short, offline, they train; the coordinate check passes them, and no wrong rate."""

import json
import re
from pathlib import Path

import pytest

from tests.processes import finished

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ("huggingface_gpt2.py", "nanogpt.py")
WIDTHS = ("64", "128", "256")


def check(path, out):
    return finished(
        "-m",
        "param_groups",
        "check",
        path,
        "--seeds",
        2,
        "--widths",
        *WIDTHS,
        "--out",
        out,
        cwd=ROOT,
    )


@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "examples").glob("*.py")))
def test_examples_stay_short(name):
    assert len((ROOT / "examples" / name).read_text().splitlines()) <= 85


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_learn(name):
    """A byte costs 5.5 nats at first and 3.3 by its frequency; below that, context helps."""
    result = finished(f"examples/{name}", cwd=ROOT)
    assert result.returncode == 0, result.err
    losses = [float(loss) for loss in re.findall(r"step \d+: ([\d.]+) nats", result.out)]
    assert losses[0] == pytest.approx(5.5, abs=0.3)
    assert len(losses) == 4 and min(losses[-2:]) < 2.9


def test_a_recipe_is_tuned_at_the_base_width_and_carried_to_another():
    result = finished("examples/tune_then_grow.py", "--quick", cwd=ROOT)
    assert result.returncode == 0, result.err
    best = re.findall(r"^(\d+) .* best ([\d.]+)$", result.out, re.M)
    assert [width for width, _ in best] == ["32", "64"] * 2, result.out


def test_a_llama_is_fine_tuned_from_weights_that_nothing_has_touched():
    result = finished("examples/finetune_llama.py", cwd=ROOT)
    assert result.returncode == 0, result.err
    assert "\n20 of 20 tensors are the checkpoint's, bit for bit\n" in result.out
    (_, learnt), (first, last) = re.findall(r"^from ([\d.]+) to ([\d.]+) nats", result.out, re.M)
    assert float(learnt) < 3.3 and float(last) < float(first) - 0.2 < 3.3


def test_the_notebook_runs_from_top_to_bottom_and_prints_what_is_stored_in_it(tmp_path):
    """Its code as one program; of what it prints the digits may be another machine's."""
    cells = json.loads((ROOT / "examples/first_plan.ipynb").read_text())["cells"]
    cells = [cell for cell in cells if cell["cell_type"] == "code"]
    program = tmp_path / "notebook.py"
    program.write_text("\n".join("".join(cell["source"]) for cell in cells))
    result = finished(program, cwd=ROOT / "examples", MPLBACKEND="agg")
    assert result.returncode == 0, result.err
    outputs = [output for cell in cells for output in cell["outputs"]]
    stored = "".join("".join(output.get("text", ())) for output in outputs)
    words = lambda text: re.sub(r"[-+]?[\d.]+(?:e-\d+)?", "0", text).split()
    assert words(result.out) == words(stored) and "passed: 26 ok" in result.out
    assert [len(o["data"]["image/png"]) < 60_000 for o in outputs if "data" in o] == [True]


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_pass_the_coordinate_check(name, tmp_path):
    result = check(f"examples/{name}", tmp_path)
    assert result.returncode == 0, result.out + result.err
    assert re.search(r"^passed: \d+ ok$", result.out, re.M)
    assert "never called" not in result.out
    assert (tmp_path / "coordinate_check.csv").exists()


@pytest.mark.parametrize("name", EXAMPLES)
def test_one_rate_for_all_tensors_does_not_pass(name, tmp_path):
    text = (ROOT / "examples" / name).read_text()
    rule = "base_width=64"
    assert text.count(rule) == 1
    wrong = tmp_path / name
    wrong.write_text(text.replace(rule, 'base_width=64, alignment="global"'))
    result = check(wrong, tmp_path)
    assert result.returncode == 1, result.out + result.err
    assert re.search(r"^FAILED: \d+ grows", result.out, re.M)
