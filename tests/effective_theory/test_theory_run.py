"""The commands that compare everything and that print predictions: files, exit codes, errors."""

from __future__ import annotations

import csv
import json

import numpy as np
import pytest

from effective_theory import run
from effective_theory.dinan import predict

SMALL = (
    "measure.widths=[16,32] measure.seeds=[6,4] model.depth=1 model.mlp_ratio=1 model.outputs=32 "
    "theory.attention_draws=256 bigram.widths=[16,32,64] bigram.seeds=8 bigram.steps=1"
).split()


def call(*argv: str) -> int:
    with pytest.raises(SystemExit) as done:
        run.main(argv)
    return done.value.code


def test_writes_tables_and_json(tmp_path):
    out = tmp_path / "theory"
    # exponents of so few networks may miss their tolerance, which is exit code 1
    assert call("--out", str(out), "--workers", "1", *SMALL) in (0, 1)
    with open(out / "kernels.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["stem"] for row in rows} == {"vision", "language"}
    assert {row["width"] for row in rows} == {"16", "32", "inf"}
    for name in ("vision", "language", "bigram"):
        value = json.loads((out / f"{name}.json").read_text())
        assert value["rows"] and value["config"] and value["environment"]["packages"]["torch"]
        if name != "bigram":
            assert len(value["rows"]) == sum(row["stem"] == name for row in rows)


def test_ships_tables_with_where_they_were_made(tmp_path, capsys):
    table = tmp_path / "out/bigram.csv"
    call("bigram", "--ship", str(tmp_path / "data"), "--out", str(table.parent), *SMALL[-3:])
    assert f"figure: python -m plots theory/bigram {table}\n" in capsys.readouterr().out
    shipped = tmp_path / "data/bigram.csv"
    assert shipped.read_text() == table.read_text()
    origin = json.loads(shipped.with_suffix(".json").read_text())
    assert origin["environment"]["python"]
    assert origin["configs"]["bigram"]["seeds"] == 8 and origin["seconds"] >= 0


@pytest.mark.parametrize("option", ["--out", "--ship"])
def test_a_folder_that_cannot_be_written_is_found_before_anything_is_computed(
    option, tmp_path, capsys
):
    (tmp_path / "file").write_text("")
    folders = {"--out": tmp_path / "out", option: tmp_path / "file"}
    assert call("bigram", *[str(word) for pair in folders.items() for word in pair]) == 2
    error = capsys.readouterr().err
    assert str(tmp_path / "file") in error and error.count("\n") == 1


def test_kernels_that_miss_their_tolerance_are_exit_code_1(monkeypatch, tmp_path, capsys):
    from effective_theory.dinan import compare

    monkeypatch.setattr(compare, "TOLERANCE_WIDTH", 16)
    monkeypatch.setattr(compare, "TOLERANCE_NETWORKS", 2)
    monkeypatch.setattr(compare, "TOLERANCES", {"theta": 10.0})
    monkeypatch.setattr(compare, "QUERY_KEY_TOLERANCE", 1e-9)
    words = ["vision", "--out", str(tmp_path), "--workers", "1", *SMALL[:6]]
    assert call(*words, "measure.widths=[16]", "measure.seeds=[2]", "model.outputs=4") == 1
    error = capsys.readouterr().err
    assert "missed: vision n = 16 theta head query" in error and "readout" not in error


def test_a_missed_tolerance_is_exit_code_1(monkeypatch, tmp_path, capsys):
    from effective_theory.stratos.exponents import FittedExponent

    monkeypatch.setattr(FittedExponent, "met", property(lambda row: row.column != "h_1"))
    assert call("bigram", "--out", str(tmp_path), *SMALL[-3:]) == 1
    assert "missed: " in capsys.readouterr().err


# The command that prints every prediction


_DRAWS = 1024


def _run(capsys, tmp_path, *overrides, text="model:\n  stem: vision\n"):
    path = tmp_path / "theory.yaml"
    path.write_text(text)
    small = ["model.depth=1", f"theory.attention_draws={_DRAWS}"]
    predict.main(["--config", str(path), *small, *overrides])
    return capsys.readouterr().out


def test_the_command_prints_predictions(capsys, tmp_path):
    out = _run(capsys, tmp_path, "model.width=256")
    assert "vision: 2 samples x 4 tokens, n = 256, H = 8, s = 0" in out
    lines = {line.split()[0]: line.split() for line in out.splitlines() if line}
    assert {"stem", "attention.0", "mlp.0", "head"} <= lines.keys()
    assert float(lines["attention.0.query"][1]) == pytest.approx(1 / 256, rel=1e-3)
    single = _run(capsys, tmp_path, "data.samples=1", "data.patch_size=8")
    assert "1 samples x 1 tokens" in single and "nan" not in single


@pytest.mark.parametrize("stem", ["vision", "language"])
def test_the_command_prints_json(capsys, tmp_path, stem):
    text = f"model:\n  stem: {stem}\n  pooling: {str(stem == 'vision').lower()}\n"
    out = json.loads(_run(capsys, tmp_path, "--json", "init.query=0.5", text=text))
    size = 2 if stem == "vision" else 8
    assert out["blocks"] == ["stem", "attention.0", "mlp.0", "head"]
    assert out["config"]["init"]["query"] == 0.5
    for name in ("G", "G_se", "theta", "theta_se"):
        assert np.shape(out[name]["mlp.0"]) == (8, 8)
        assert np.shape(out[name]["head"]) == (size, size)
    assert "head" not in out["F"]
    for kinds in (out["groups"], out["parts"]):
        np.testing.assert_allclose(sum(map(np.array, kinds["head"].values())), out["theta"]["head"])
    assert out["tensors"].keys() == out["parts"]["head"].keys()
    assert ("contact" in out) is (stem == "language")


def test_huge_words_are_printed(capsys, tmp_path):
    text = "model:\n  stem: language\n  pooling: false\n"
    out = json.loads(_run(capsys, tmp_path, "--json", "init.stem=1e200", text=text))
    assert np.max(out["contact"]["leading"]) == pytest.approx(512 * 1e200)
