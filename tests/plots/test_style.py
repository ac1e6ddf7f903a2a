"""Colours that the colour-blind can tell apart, captions, and rows chosen by conditions."""

import itertools

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.text import Text

from plots import naming, style, tables
from plots.__main__ import make
from plots.everett import epsilon

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
    "parameterisations": [look["color"] for look in naming.looks(list(style.LABELS)).values()],
    "strategies": [look["color"] for look in style.STRATEGY_LOOKS.values()],
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
    found = naming.looks(["mup", "mine", "yours"])
    assert found["mup"] == naming.looks(list(style.LABELS))["mup"]
    assert len({look["color"] for look in found.values()}) == 3
    own = {found[name]["color"] for name in ("mine", "yours")}
    assert not own & {look["color"] for look in naming.looks(list(style.LABELS)).values()}


@pytest.fixture
def drawn(tmp_path, monkeypatch):
    """The figures that a call draws, not saved, and what it prints."""

    def run(name, *given, **options):
        found = []
        monkeypatch.setattr(style, "files", lambda item, *_: found.append(item) or {})
        text, _ = make(name, given, tmp_path, **options)
        return found, text

    return run


def words(figure) -> str:
    return "\n".join(text.get_text() for text in figure.findobj(Text))


def caption(figure) -> str:
    return figure.texts[-1].get_text()


def test_a_caption_says_sweep_preset_data_and_seeds_in_one_line(drawn, tmp_path):
    (figure,), _ = drawn("everett/adafactor")
    assert caption(figure) == (
        "nanolm_c4/figure_10_adafactor, preset laptop; the World English Bible; "
        "1 to 2 seeds per point"
    )
    (figure,), _ = drawn("theory/shares")
    assert caption(figure) == "300 to 2000 networks"
    table = tmp_path / "own" / "fine_sweep" / "results.csv"
    table.parent.mkdir(parents=True)
    (table.parent / "manifest.json").write_text("{}")
    table.write_bytes(tables.shipped("everett/figure_10_adafactor").read_bytes())
    (figure,), _ = drawn("everett/adafactor", table)
    assert caption(figure) == "own/fine_sweep; 1 to 2 seeds per point"


def test_rows_are_chosen_by_conditions_and_the_caption_says_so(drawn):
    where = ["prescription.parameterization!=ntk", "model.width<128"]
    (figure,), text = drawn("everett/adafactor", where=where)
    assert "NTK" not in text + words(figure) and "at D = 64" in text and "D = 128" not in text
    assert f"only {where[0]}; only {where[1]}" in caption(figure)
    (figure,), text = drawn("everett/adafactor", where=["seed == 0"])
    assert "1 seed per point" in caption(figure) and "± ?" in text
