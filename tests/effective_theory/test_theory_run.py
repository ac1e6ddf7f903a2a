"""The command that compares everything: its files, its exit codes, its errors."""

from __future__ import annotations

import csv
import json

import pytest

from effective_theory import run

SMALL = [
    "measure.widths=[16, 32]",
    "measure.seeds=[6, 4]",
    "model.depth=1",
    "model.mlp_ratio=1",
    "model.outputs=32",
    "theory.attention_draws=256",
    "bigram.widths=[16, 32, 64]",
    "bigram.seeds=8",
    "bigram.steps=1",
]


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
