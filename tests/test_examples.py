"""The examples: short, offline, they train; the coordinate check passes them, and no wrong rate."""

import contextlib
import json
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

from param_groups.__main__ import main

# Importing Hugging Face's library takes seconds: one process has all tests that need it.
pytestmark = pytest.mark.xdist_group("huggingface")
ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ("huggingface_gpt2.py", "nanogpt.py")
FIRST_IS_THOROUGH = pytest.mark.parametrize(
    "name", [pytest.param(EXAMPLES[0], marks=pytest.mark.thorough), *EXAMPLES[1:]]
)
CHECK = "check --seeds 2 --widths 64 128 256 --out".split()


@pytest.fixture
def ran(monkeypatch, capfd):
    """Runs a program as `python PATH` does, but where its libraries are loaded already. What its
    own processes write is caught as well."""

    def run(path, *arguments, cwd=ROOT):
        monkeypatch.chdir(cwd)
        monkeypatch.setattr(sys, "path", [str(path.parent), *sys.path])
        monkeypatch.setattr(sys, "argv", list(map(str, (path, *arguments))))
        torch.manual_seed(2)  # the last batch's loss has a spread of 0.2 nats over draws
        runpy.run_path(str(path), run_name="__main__")
        return capfd.readouterr().out

    return run


@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "examples").glob("*.py")))
def test_examples_stay_short(name):
    """A program is read as a whole; of the integrations one reads one's own, a function each."""
    text = (ROOT / "examples" / name).read_text()
    pieces = re.split(r"^(?=def )", text, flags=re.M) if name == "integrations.py" else [text]
    most = 20 if name == "integrations.py" else 85
    assert max(len(piece.strip().splitlines()) for piece in pieces) <= most


@FIRST_IS_THOROUGH
def test_examples_learn(name, ran):
    """A byte costs 5.5 nats at first and 3.3 by its frequency; below that, context helps."""
    out = ran(ROOT / "examples" / name)
    losses = [float(loss) for loss in re.findall(r"step \d+: ([\d.]+) nats", out)]
    assert losses[0] == pytest.approx(5.5, abs=0.3)
    assert len(losses) == 4 and min(losses[-2:]) < 2.9


@pytest.mark.thorough
def test_a_recipe_is_tuned_at_the_base_width_and_carried_to_another(ran):
    out = ran(ROOT / "examples/tune_then_grow.py", "--quick")
    best = re.findall(r"^(\d+) .* best ([\d.]+)$", out, re.M)
    assert [width for width, _ in best] == ["32", "64"] * 2, out


@pytest.mark.thorough
def test_a_llama_is_fine_tuned_from_weights_that_nothing_has_touched(ran):
    out = ran(ROOT / "examples/finetune_llama.py")
    assert "\n20 of 20 tensors are the checkpoint's, bit for bit\n" in out
    (_, learnt), (first, last) = re.findall(r"^from ([\d.]+) to ([\d.]+) nats", out, re.M)
    assert float(learnt) < 3.3 and float(last) < float(first) - 0.2 < 3.3


@pytest.mark.thorough
def test_the_notebook_runs_from_top_to_bottom_and_prints_what_is_stored_in_it(ran, tmp_path):
    """Its code as one program; of what it prints the digits may be another machine's."""
    cells = json.loads((ROOT / "examples/first_plan.ipynb").read_text())["cells"]
    cells = [cell for cell in cells if cell["cell_type"] == "code"]
    program = tmp_path / "notebook.py"
    sources = ["".join(cell["source"]) for cell in cells]
    # A notebook shows the value of a cell's last line.
    shown = [re.sub(r"^(\w+)\Z", r"print(\1)", source, flags=re.M) for source in sources]
    program.write_text("\n".join(shown))
    out = ran(program, cwd=ROOT / "examples")
    outputs = [output for cell in cells for output in cell["outputs"]]
    texts = [o.get("text") or o["data"].get("text/html", ()) for o in outputs]
    stored = re.sub("</?pre[^>]*>", " ", "".join(map("".join, texts)))
    words = lambda text: re.sub(r"[-+]?[\d.]+(?:e-\d+)?", "0", text).split()
    assert words(out) == words(stored) and "passed: 26 ok" in out
    pictures = [o["data"]["image/png"] for o in outputs if "image/png" in o.get("data", ())]
    assert [len(picture) < 60_000 for picture in pictures] == [True]


@pytest.fixture
def checked(monkeypatch, capsys, tmp_path, no_picture):
    """What the check says of a file, in this process."""

    def check(path, code):
        monkeypatch.chdir(tmp_path)
        with pytest.raises(SystemExit, match="^1$") if code else contextlib.nullcontext():
            main([*CHECK, str(tmp_path), "--", str(path)])
        return capsys.readouterr().out

    return check


@pytest.mark.thorough
@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_pass_the_coordinate_check(name, checked, tmp_path):
    out = checked(ROOT / "examples" / name, 0)
    assert re.search(r"^passed: \d+ ok$", out, re.M) and "never called" not in out
    assert (tmp_path / "coordinate_check.csv").exists()


@FIRST_IS_THOROUGH
def test_one_rate_for_all_tensors_does_not_pass(name, checked, tmp_path):
    text = (ROOT / "examples" / name).read_text()
    rule = "base_width=64"
    assert text.count(rule) == 1
    wrong = tmp_path / name
    wrong.write_text(text.replace(rule, 'base_width=64, alignment="global"'))
    assert re.search(r"^FAILED: \d+ grows", checked(wrong, 1), re.M)
