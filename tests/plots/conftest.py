"""Few pixels, and what a refused table says."""

import matplotlib.pyplot as plt
import pytest

from plots import style
from plots.__main__ import main


@pytest.fixture(autouse=True)
def coarse(monkeypatch):
    """Few pixels: what is drawn is the same."""
    monkeypatch.setattr(style, "DPI", 30)
    yield
    plt.close("all")  # figures of tests that save none


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
