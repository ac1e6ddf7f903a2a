"""The coordinate check's figure, from the files that the check writes."""

import math

import pytest

from measure import coordinate_check as cc
from measure.coordinates import ALONG, Coordinate, Measurement
from measure.slopes import GROWS, OK, fit
from param_groups import Plan
from plots import coordinate_check as figure

WIDTHS = (64, 128, 256, 512)
ALONG = "readout" + ALONG
CHANGES = {  # name -> (part, power of the width)
    "blocks.0.attention_norm": ("hidden", 0), "blocks.1.attention_norm": ("hidden", 0),
    "blocks.0.mlp.down": ("hidden", 0), "blocks.1.mlp.down": ("hidden", 1),
    "readout": ("logits", 0), ALONG: ("logits", 0),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """The files of a check whose second block alone grows."""
    folder = tmp_path_factory.mktemp("results")
    points = [
        Coordinate("change", name, part, step, width, seed, (1 + seed / 9) * width**power)
        for name, (part, power) in CHANGES.items()
        for step in (1, 2) for width in WIDTHS for seed in (0, 1)
    ]
    plan = Plan((), {"name": "mine"}, 0.1, 1e-8, 0.0, "global")
    measured = Measurement(points, dict.fromkeys(WIDTHS, plan))
    cc.write(folder, measured, fit(measured), {"widths": WIDTHS})
    return folder


def test_of_repeated_blocks_the_worst_is_drawn(results):
    chosen = figure.panels(*figure.read(results))
    assert chosen["blocks.1.mlp.down"] == GROWS and "blocks.0.mlp.down" not in chosen
    assert chosen["blocks.0.attention_norm"] == OK
    assert list(chosen)[-1] == ALONG


def test_lines_are_geometric_means_over_seeds(results):
    table, _ = figure.read(results)
    rows = table[(table.name == "readout") & (table.quantity == "change") & (table.step == 2)]
    one, two = rows[rows.width == 64].rms
    line = figure.means(table, "readout")["change", 2]
    assert line[64] == pytest.approx(math.sqrt(one * two))
    assert list(line.index) == list(WIDTHS)


def test_figures_of_the_same_files_are_the_same(results, tmp_path):
    files = [figure.draw(*figure.read(results), tmp_path / name) for name in ("one", "two")]
    for one, two in zip(*files):
        assert one.read_bytes() == two.read_bytes()


@pytest.mark.parametrize("file, text, message", [
    ("coordinate_check.csv", None, "cannot read the file"),
    ("coordinate_check.csv", "a,b\n1,2\n", "no quantity in its"),
    ("coordinate_check.csv", ",".join(figure.COLUMNS) + "\n", "no points"),
    ("coordinate_check.json", "{", "cannot read the file"),
    ("coordinate_check.json", "{}", "no slopes in its"),
])
def test_a_folder_that_is_no_checks_is_one_line(results, tmp_path, file, text, message, capsys):
    for source in results.iterdir():
        (tmp_path / source.name).write_bytes(source.read_bytes())
    (tmp_path / file).unlink() if text is None else (tmp_path / file).write_text(text)
    with pytest.raises(SystemExit) as ended:
        figure.main([str(tmp_path)])
    error = capsys.readouterr().err
    assert ended.value.code == 2 and message in error and error.count("\n") == 1
