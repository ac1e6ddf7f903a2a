"""The coordinate check's figure, from constructed points and slopes."""

import itertools
import json
import math

import pandas as pd
import pytest

from measure import coordinate_check
from measure.coordinates import Coordinate, Measurement
from measure.slopes import GROWS, OK, fit
from param_groups import Plan
from plots import coordinate_check as figure
from plots.__main__ import make

WIDTHS = (64, 128, 256)
# Module -> power of the width in its change, and verdict.
MODULES = {
    "blocks.0.mlp.down": (0.0, "ok"),
    "blocks.1.mlp.down": (1.0, "grows"),
    "blocks.0.norm": (0.0, "ok"),
    "blocks.1.norm": (0.0, "-"),
    "readout": (-0.5, "shrinks"),
    "readout along features": (0.0, "expected exception"),
}


@pytest.fixture
def check(tmp_path):
    """The folder of a check of two steps and two seeds, which differ by a factor of four."""
    points, slopes = [], []
    for name, (power, verdict) in MODULES.items():
        for quantity, step in (("init", 0), ("change", 1), ("change", 2), ("update", 1)):
            key = {"quantity": quantity, "name": name, "part": "", "step": step}
            points += [
                {**key, "width": width, "seed": seed, "rms": 4.0**seed * width**power}
                for width in WIDTHS
                for seed in (0, 1)
            ]
            judged = {"verdict": verdict if quantity == "change" else "ok", "note": "", "aim": 0.0}
            predicted = 0.0 if step == 1 else None
            slopes.append({**key, "slope": power, "error": 0.01, "predicted": predicted, **judged})
    pd.DataFrame(points).to_csv(tmp_path / "coordinate_check.csv", index=False)
    result = {
        "slopes": slopes,
        "prescription": {"name": "everett", "optimizer": "adam"},
        "target": ["my/model.py"],
        "scan": "model.head_dim",
    }
    (tmp_path / "coordinate_check.json").write_text(json.dumps(result))
    return tmp_path


def test_of_repeated_blocks_the_worst_is_drawn_and_said(check):
    data = figure.read([check / "coordinate_check.csv"])
    chosen = figure.panels(data[1])
    assert chosen["blocks.1.mlp.down"] == "grows" and "blocks.0.mlp.down" not in chosen
    assert chosen["blocks.0.norm"] == "ok" and len(chosen) == 4
    _, *found = figure.findings(data)
    assert [line.name for line in found] == [
        "blocks.1.mlp.down: change, step 1",
        "blocks.0.norm: initial RMS",
        "readout: change, step 1",
        "readout along features: change, step 1",
    ]
    assert (found[0].measured, found[0].published) == ("+1.00 ± 0.01", "+0.00")
    assert [line.verdict for line in found] == ["grows", "ok", "shrinks", "expected exception"]


def test_the_files_that_a_check_writes_are_drawn(tmp_path):
    points = [
        Coordinate("change", f"blocks.{n}.mlp.down", "hidden", step, width, seed, width**n)
        for n, step, width, seed in itertools.product((0, 1), (1, 2), WIDTHS, (0, 1))
    ]
    plan = Plan((), {"name": "mine"}, 0.1, 1e-8, 0.0, "global")
    measured = Measurement(points, dict.fromkeys(WIDTHS, plan))
    coordinate_check.write(tmp_path, measured, fit(measured), {"widths": WIDTHS})
    text, files = make("coordinate_check", [tmp_path], None)
    assert "blocks.1.mlp.down: change, step 1  " in text and GROWS in text and OK not in text
    assert [path.parent for path in files] == [tmp_path] * 2


def test_lines_are_geometric_means_over_seeds(check):
    table, _ = figure.read([check])
    line = figure.means(table, "readout")["change", 2]
    assert line[64] == pytest.approx(math.sqrt(4) / 8) and list(line.index) == list(WIDTHS)


def test_a_panel_says_its_verdict_and_dashes_what_is_predicted(check):
    ((name, drawn),) = figure.draw(figure.read([check]))
    assert name == "coordinate_check"
    assert drawn.get_suptitle() == "coordinate check of model.py: everett, adam"
    assert {axis.get_xlabel() for axis in drawn.axes if axis.get_visible()} == {"head dim"}
    titles = [axis.get_title() for axis in drawn.axes]
    assert titles[0] == "blocks.1.mlp.down\ngrows" and titles[-1].startswith("readout\nalong")
    dashed = [line for line in drawn.axes[0].lines if line.get_linestyle() == "--"]
    assert len(drawn.axes[0].lines) == 4 and len(dashed) == 1


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("csv", None, "cannot read the table"),
        ("csv", "a,b\n1,2\n", "no column 'quantity'; is it the coordinate_check.csv of the check?"),
        ("csv", ",".join(figure.COLUMNS) + "\n", "no runs in it; run the check first"),
        ("json", "{", "no slopes of a check"),
        ("json", "{}", "no slopes of a check (KeyError('slopes')); run it again"),
        ("json", '{"slopes": [{"verdict": "odd"}]}', "verdict 'odd'; expected one of not finite,"),
        ("json", None, "no slopes of a check"),
    ],
)
def test_a_folder_that_is_no_checks_is_one_line(check, file, text, message, refused):
    path = check / f"coordinate_check.{file}"
    path.unlink() if text is None else path.write_text(text)
    error = refused("coordinate_check", check / "coordinate_check.csv")
    assert error.startswith(f"error: {path}: ") and message in error
