"""Few pixels, panels that are not laid out, and what a refused table says."""

import matplotlib.pyplot as plt
import pytest
from matplotlib.layout_engine import ConstrainedLayoutEngine

from plots import cards, report, style
from plots.__main__ import main
from tests.plots.made import unjudged


@pytest.fixture(autouse=True)
def coarse(request, monkeypatch):
    """Few pixels and, but for tests with `laid_out`, panels where they are first put and no PDF:
    what is drawn is the same."""
    monkeypatch.setattr(style, "DPI", 30)
    if "laid_out" not in request.fixturenames:
        monkeypatch.delitem(style.FORMATS, "pdf")
        monkeypatch.setattr(ConstrainedLayoutEngine, "execute", lambda *_: None)
    yield
    plt.close("all")  # figures of tests that save none


@pytest.fixture
def claimed(monkeypatch):
    """Claims of articles and of the report without their words: these take every figure's findings,
    and are tested in test_claims.py."""
    for module in (cards, report):
        monkeypatch.setattr(module, "claims", unjudged)
    return unjudged()


@pytest.fixture
def laid_out():
    """For tests of what a user sees: panels have their places, and every file is written."""


@pytest.fixture
def refused(capsys, tmp_path):
    """The one line that `python -m plots` ends with, having written nothing."""

    def run(*words):
        out = tmp_path / "never"
        with pytest.raises(SystemExit) as ended:
            main([*map(str, words), "--out", str(out)])
        error = capsys.readouterr().err
        assert ended.value.code == 2 and error.startswith("error: ") and error.count("\n") == 1
        assert not out.exists()
        return error

    return run
