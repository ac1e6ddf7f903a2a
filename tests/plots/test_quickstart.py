"""Figures: drawn from tables alone, the findings right on constructed data."""

import math
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from plots import quickstart as width_sweep
from plots.quickstart import MUP, STANDARD, TableError, findings, read, report

ROOT = Path(__file__).resolve().parents[2]


def table(standard=-0.8, mup=0.1, seeds=(0, 1), diverged_above=math.inf):
    """Losses that are parabolas in log2 lr whose optimum follows a power of width."""
    rows = []
    for curve, exponent in ((STANDARD, standard), (MUP, mup)):
        for width in (32, 64, 128, 256):
            for power in range(-12, -2):
                for seed in seeds:
                    optimum = -7 + exponent * math.log2(width / 64)
                    loss = 5 - width / 1000 + 0.05 * (power - optimum) ** 2 + 0.02 * seed
                    gone = 2.0**power > diverged_above
                    rows.append({
                        "curve": curve, "model.width": width, "optimizer.lr": 2.0**power,
                        "seed": seed, "status": "diverged" if gone else "finished",
                        "final_eval_loss": math.nan if gone else loss, "run": "x",
                    })
    return pd.DataFrame(rows)


def by_name(found):
    return {finding.name: finding for finding in found}


def test_exponents_and_penalties_are_those_the_table_was_made_with():
    found = by_name(findings(table()))
    name = "exponent of the optimal rate in width, "
    assert found[name + "standard"].value == pytest.approx(-0.8)
    assert found[name + "muP"].value == pytest.approx(0.1)
    assert found["muP minus standard"].value == pytest.approx(0.9)
    # At 256 the standard optimum is 2^-8.6; the best grid rate there is 2^-9, and that of 64 2^-7.
    penalty = 0.05 * (1.6**2 - 0.4**2)
    name = "loss at D=256 with the rate of D=64, "
    assert found[name + "standard"].value == pytest.approx(penalty)
    assert found[name + "muP"].value == pytest.approx(0, abs=1e-9)
    assert all(finding.met for finding in found.values())


def test_a_missed_band_is_printed_as_missed():
    text = report(table(standard=-0.1, mup=0.0))
    lines = {line[:40]: line for line in text.splitlines()}
    assert "MISSED" in lines["exponent of the optimal rate in width, s"]
    assert "as expected" in lines["exponent of the optimal rate in width, m"]


def test_diverged_runs_are_losses_without_limit_and_seeds_are_averaged():
    losses = width_sweep.mean_losses(table(diverged_above=2**-5), STANDARD, 64)
    assert losses[2.0**-4] == math.inf
    assert losses[2.0**-7] == pytest.approx(5 - 0.064 + 0.01)


def test_a_rate_that_was_not_run_there_is_no_finding():
    data = table()
    gone = (data["model.width"] == 256) & (data["optimizer.lr"] == 2.0**-7)
    found = by_name(findings(data[~gone]))
    finding = found["loss at D=256 with the rate of D=64, standard"]
    assert math.isnan(finding.value) and not finding.met


def test_the_spread_over_seeds_is_a_pooled_standard_deviation():
    spread, n = width_sweep.seed_spread(table(), MUP)
    assert spread == pytest.approx(0.02 / math.sqrt(2)) and n == 40


def test_png_and_pdf_are_drawn_and_the_same_table_gives_the_same_files(tmp_path):
    first = width_sweep.draw(table(), tmp_path / "a")
    second = width_sweep.draw(table(), tmp_path / "b")
    assert [path.name for path in first] == ["width_sweep.png", "width_sweep.pdf"]
    assert all(a.read_bytes() == b.read_bytes() for a, b in zip(first, second))
    assert first[0].stat().st_size > 20_000


def test_curves_with_divergence_and_one_seed_can_be_drawn(tmp_path):
    width_sweep.draw(table(seeds=(0,), diverged_above=2**-6), tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot read the table"),
        ("", "cannot read the table"),
        ("a,b\n1,2\n", "no column 'curve'"),
        ("curve,model.width,optimizer.lr,seed,status,final_eval_loss\n", "no runs in it"),
        ("curve,model.width,optimizer.lr,seed,status,final_eval_loss\n"
         "standard_global,64,0.1,0,finished,3.0\n",
         "no finished run of curve 'standard_global' at model.width 256"),
    ],
)
def test_a_table_that_cannot_be_drawn_is_one_line(tmp_path, capsys, text, message):
    path = tmp_path / "t.csv"
    if text is not None:
        path.write_text(text)
    with pytest.raises(TableError, match=message):
        read(path)
    with pytest.raises(SystemExit) as caught:
        width_sweep.main([str(path), "--out", str(tmp_path)])
    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith(f"error: {path}")


def test_the_shipped_table_redraws_the_shipped_figure(tmp_path):
    """The findings the README quotes come from the table beside the figure."""
    assert width_sweep.draw(read(ROOT / "plots/data/width_sweep.csv"), tmp_path)
    assert (ROOT / "plots/figures/width_sweep.png").exists()
    readme = (ROOT / "README.md").read_text()
    for finding in findings(read(ROOT / "plots/data/width_sweep.csv"))[:2]:
        assert f"{finding.value:+.2f}".replace("-", "−") in readme


def test_plots_import_no_torch():
    code = "import plots.quickstart, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
