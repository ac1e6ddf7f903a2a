"""Colours that the colour-blind can tell apart, captions, and figures in another dress."""

from __future__ import annotations

import itertools

import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_rgb
from matplotlib.text import Text

from plots import __main__ as command
from plots import style, tables
from plots.__main__ import main, make
from plots.catalogue import drawings
from plots.everett import epsilon, learning_rates

# Linear RGB as seen with full deuteranopia and protanopia (Machado, Oliveira and Fernandes, 2009,
# Table 1, severity 1).
SIGHT = {
    "usual": np.eye(3),
    "deuteranopia": np.array(
        [
            [0.367322, 0.860646, -0.227968],
            [0.280085, 0.672501, 0.047413],
            [-0.011820, 0.042940, 0.968881],
        ]
    ),
    "protanopia": np.array(
        [
            [0.152286, 1.052583, -0.204868],
            [0.114503, 0.786281, 0.099216],
            [-0.003882, -0.048116, 1.051998],
        ]
    ),
}
PALETTES = {
    "all": style.PALETTE,
    "parameterisations": [look["color"] for look in style.looks(list(style.LABELS)).values()],
    "strategies": list(style.STRATEGY_COLORS.values()),
    "mitigations": [look["color"] for look in epsilon.CURVE_LOOKS.values()],
}


def lab(color, sight) -> np.ndarray:
    """CIE L*a*b* (D65) of a colour as it is seen."""
    rgb = np.array(to_rgb(color))
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    xyz = np.array(
        [
            [0.4124564, 0.3575761, 0.1804375],
            [0.2126729, 0.7151522, 0.0721750],
            [0.0193339, 0.1191920, 0.9503041],
        ]
    ) @ np.clip(SIGHT[sight] @ linear, 0, 1)
    part = xyz / np.array([0.95047, 1, 1.08883])
    f = np.where(part > (6 / 29) ** 3, np.cbrt(part), part / (3 * (6 / 29) ** 2) + 4 / 29)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def nearest(colors, sight) -> float:
    """The smallest distance of two colours; about 2 can just be seen side by side."""
    seen = [lab(color, sight) for color in colors]
    return min(float(np.linalg.norm(a - b)) for a, b in itertools.combinations(seen, 2))


@pytest.mark.parametrize("sight", SIGHT)
@pytest.mark.parametrize("name", PALETTES)
def test_colours_are_told_apart_with_any_sight(name, sight):
    assert nearest(PALETTES[name], sight) > 15
    assert nearest(["#55A868", "#C44E52"], "deuteranopia") < 10  # a green and a red that are not


@pytest.mark.parametrize("sight", SIGHT)
def test_widths_are_ordered_by_lightness_with_any_sight(sight):
    light = [lab(color, sight)[0] for color in style.width_colors(range(1, 8)).values()]
    assert all(b - a > 3 for a, b in itertools.pairwise(light))


def test_curves_of_ones_own_get_colours_that_no_parameterisation_has():
    found = style.looks(["mup", "mine", "yours"])
    assert found["mup"] == style.looks(list(style.LABELS))["mup"]
    assert len({look["color"] for look in found.values()}) == 3
    own = {found[name]["color"] for name in ("mine", "yours")}
    assert not own & {look["color"] for look in style.looks(list(style.LABELS)).values()}


@pytest.fixture
def drawn(tmp_path, monkeypatch):
    """The figures that a call draws, not saved, and what it prints."""

    def run(name, *given, **options):
        found = []
        monkeypatch.setattr(style, "files", lambda item, *_: found.append(item) or {})
        text, _ = make(name, given, tmp_path, **options)
        return [item for item in found if not isinstance(item, pd.DataFrame)], text

    return run


@pytest.fixture(scope="module")
def sweeps():
    """The figures of everett/learning_rates from the shipped tables."""
    paths = [tables.shipped(table) for table in learning_rates.TABLES]
    return [
        item
        for _, item, _ in drawings("everett/learning_rates", learning_rates.read(paths), paths)
        if not isinstance(item, pd.DataFrame)
    ]


def words(figure) -> str:
    return "\n".join(text.get_text() for text in figure.findobj(Text))


def test_a_caption_says_sweep_preset_data_and_seeds(drawn, tmp_path):
    (figure,), _ = drawn("everett/adafactor")
    caption = figure.texts[-1].get_text().replace("\n", " ")
    assert caption.startswith(
        "sweep nanolm_c4/figure_10_adafactor, preset laptop; data: the World "
        "English Bible; 1 to 2 seeds per point; loss of the best rate"
    )
    (figure,), _ = drawn("theory/shares")
    assert figure.texts[-1].get_text().startswith("bars: theory; points: 300 networks ±")
    table = tmp_path / "own" / "fine_sweep" / "results.csv"
    table.parent.mkdir(parents=True)
    (table.parent / "manifest.json").write_text("{}")
    table.write_bytes(tables.shipped("everett/figure_10_adafactor").read_bytes())
    (figure,), _ = drawn("everett/adafactor", table)
    assert figure.texts[-1].get_text().startswith("sweep own/fine_sweep; 1 to 2 seeds")


def test_rows_are_chosen_by_conditions_and_the_caption_says_so(drawn):
    where = ["prescription.parameterization!=ntk", "model.width<128"]
    (figure,), text = drawn("everett/adafactor", where=where)
    assert "NTK" not in text + words(figure) and "at D = 64" in text and "D = 128" not in text
    assert f"only {where[0]}; only {where[1]}" in figure.texts[-1].get_text().replace("\n", " ")
    (figure,), text = drawn("everett/adafactor", where=["seed == 0"])
    assert "1 seed per point" in figure.texts[-1].get_text() and "± ?" in text


@pytest.mark.parametrize(
    ("condition", "message"),
    [
        ("model.width", "--where 'model.width': expected COLUMN, one of <= >= != = < >"),
        ("model.with<9", "names no column of it, 'model.with'; did you mean 'model.width'?"),
        ("model.width<wide", "--where compares the numbers of model.width with 'wide'"),
        ("model.width<9", "no row with model.width<9\n"),
    ],
)
def test_a_condition_that_cannot_be_met_is_one_line(condition, message, refused):
    assert message in refused("adafactor", "--where", condition)


def test_a_message_says_that_conditions_have_left_rows_out(refused):
    assert refused("bigram", "--where", "step > 1").endswith(
        "give the whole table (of the rows that --where leaves)\n"
    )


def test_labels_are_other_words_wherever_they_stand(drawn, refused):
    (figure,), _ = drawn("everett/adafactor", labels={"muP": "ours", "one global rate": "global"})
    assert "ours" in words(figure) and "muP" not in words(figure)
    assert figure.axes[0].get_title() == "global"
    assert "--label 'nothing': no such words" in refused("adafactor", "--label", "nothing=x")
    assert r"--label 'muP=$\foo$': not valid mathtext" in refused(
        "adafactor", "--label", r"muP=$\foo$"
    )
    with pytest.raises(SystemExit, match="2"):
        main(["adafactor", "--label", "nothing"])


def test_of_all_figures_one_may_have_the_label(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(command, "names", lambda: ["everett/adafactor", "theory/shares"])
    monkeypatch.setattr(style, "files", lambda *_: {})
    main(["--all", "--out", str(tmp_path), "--label", "muP=ours"])
    with pytest.raises(SystemExit, match="2"):
        main(["--all", "--out", str(tmp_path), "--label", "muP=ours", "--label", "nothing=x"])
    assert "--label 'nothing': no such words in any figure" in capsys.readouterr().err


def test_hollow_points_are_explained_where_there_are_some(drawn, sweeps):
    for figure in (*sweeps, *drawn("everett/quickstart")[0]):
        hollow = any(
            line.get_marker() not in ("None", "D", "") and line.get_markerfacecolor() == "white"
            for axis in figure.axes
            for line in axis.lines
        )
        assert ("hollow points in the panel" in words(figure).replace("\n", " ")) == hollow


def test_a_figure_for_a_paper_has_no_title_and_one_for_a_talk_is_larger(drawn, capsys):
    (usual,), _ = drawn("everett/adafactor")
    (paper,), text = drawn("everett/adafactor", kind="paper")
    (talk,), _ = drawn("everett/adafactor", kind="talk")
    title = "Everett et al., Figure 10: Adafactor and Adam + parameter scaling, loss against size"
    assert not paper.texts[-1].get_visible() and text.startswith(f"{title}\nsweep")
    assert paper.get_figheight() < usual.get_figheight() < talk.get_figheight()
    assert paper.axes[0].xaxis.label.get_fontfamily() == ["serif"]
    sizes = [figure.axes[0].xaxis.label.get_fontsize() for figure in (usual, talk)]
    assert sizes[1] == pytest.approx(1.35 * sizes[0])


@pytest.mark.parametrize(
    ("name", "other", "figure"),
    [
        (
            "everett/quickstart",
            "everett/figure_12_adam",
            "everett/weight_decay and everett/learning_rates",
        ),
        ("everett/learning_rates", "everett/figure_9_weight_decay", "everett/weight_decay"),
        ("everett/loss_vs_size", "everett/figure_10_adafactor", "everett/adafactor"),
    ],
)
def test_a_table_of_another_figure_is_named_as_such(name, other, figure, tmp_path, refused):
    table = tmp_path / "results.csv"
    table.write_bytes(tables.shipped(other).read_bytes())
    said = f"{table}: this is a table of {figure}; how to draw it: `python -m plots everett/"
    assert said in refused(name, table)


def test_the_published_slope_is_drawn_and_tick_labels_do_not_touch(sweeps, laid_out):
    for figure in sweeps:
        figure.draw_without_rendering()
        assert "slope that the paper prints, fixed" in words(figure)
        for axis in figure.axes[-4:]:
            dotted = [line for line in axis.lines if line.get_linestyle() == ":"]
            assert len(dotted) == 1
            assert r"(paper $D^{" in axis.get_legend().get_texts()[0].get_text()
        for axis in figure.axes:
            boxes = [
                label.get_window_extent() for label in axis.get_xticklabels() if label.get_text()
            ]
            boxes.sort(key=lambda box: box.x0)
            assert all(a.x1 <= b.x0 for a, b in itertools.pairwise(boxes))


def test_stars_lie_on_their_curves_and_vertices_are_marked_apart(sweeps):
    figure = sweeps[1]
    assert "vertex of a parabola (bar: standard error)" in words(figure)
    for axis in figure.axes[:8]:
        curves = [line for line in axis.lines if line.get_marker() == "o"]
        points = {point for line in curves for point in zip(*line.get_data(), strict=True)}
        stars = [line for line in axis.lines if line.get_marker() == "*"]
        assert len(stars) == len(curves)
        assert {(line.get_xdata()[0], line.get_ydata()[0]) for line in stars} <= points
        assert all(
            line.get_markerfacecolor() == "white" for line in axis.lines if line.get_marker() == "D"
        )


def test_epsilon_is_on_a_logarithmic_axis(drawn):
    figure = drawn("everett/epsilon", where=["prescription.parameterization=mup"])[0][0]
    assert [axis.get_xscale() for axis in figure.axes[:4:2]] == ["log"] * 2
