"""Shipping a table: it goes with where it was made, or not at all."""

import gzip
import json

import pytest

from plots import ship, tables
from plots.__main__ import main


def sweep(folder, environments):
    """A results table whose runs were made in the environments given."""
    lines = ["curve,run"]
    for index, environment in enumerate(environments):
        run = folder / f"run-{index}"
        run.mkdir(parents=True)
        (run / "summary.json").write_text(json.dumps({"environment": environment}))
        lines.append(f"a,run-{index}")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.csv").write_text("\n".join(lines) + "\n")
    return folder / "results.csv"


def test_a_table_is_copied_with_its_environment(tmp_path):
    made = [{"device": "NVIDIA H100", "threads": threads} for threads in (4, 3, 3)]
    table = sweep(tmp_path / "sweep", made)
    main(["ship", str(table), "dinan/figure", "--data", str(tmp_path / "data")])
    assert (tmp_path / "data/dinan/figure.csv").read_bytes() == table.read_bytes()
    origin = json.loads((tmp_path / "data/dinan/figure.json").read_text())
    assert origin == {"runs": 3, "sweep": f"{tmp_path.name}/sweep", "environment": made[0]}


def test_a_shipped_table_says_which_sweep_and_data_it_is_of(tmp_path):
    table = sweep(tmp_path / "nanolm_c4" / "figure_12_adam_laptop", [{"commit": "abc"}])
    config = table.parent / "run-0" / "config.yaml"
    words = ["ship", str(table), "everett/figure_12_adam", "--data", str(tmp_path / "data")]
    for source, data in (
        ("embedded", "the World English Bible"),
        ("c4", "c4"),
        ("drawn", "drawn images of blobs"),
    ):
        config.write_text(f"data: {{source: {source}}}")
        main(words)
        origin = json.loads((tmp_path / "data/everett/figure_12_adam.json").read_text())
        assert origin["sweep"] == "nanolm_c4/figure_12_adam_laptop" and origin["data"] == data


def test_a_large_table_is_kept_compressed_and_read_as_any_other(tmp_path, monkeypatch):
    table = sweep(tmp_path / "sweep", [{"commit": "abc"}] * 3)
    data = tmp_path / "data"
    monkeypatch.setattr(tables, "DATA", data)
    words = [str(table), "dinan/figure", "--data", str(data)]
    main(["ship", *words])
    assert tables.shipped("dinan/figure") == data / "dinan/figure.csv"
    monkeypatch.setattr(ship, "LARGE", 20)
    main(["ship", *words])
    packed = data / "dinan/figure.csv.gz"
    assert tables.shipped("dinan/figure") == packed and not (data / "dinan/figure.csv").exists()
    assert gzip.decompress(packed.read_bytes()) == table.read_bytes()
    assert tables.read(packed, ["curve", "run"])["run"].tolist() == ["run-0", "run-1", "run-2"]
    first = packed.read_bytes()
    main(["ship", *words])
    assert packed.read_bytes() == first
    packed.write_bytes(first[:-12])
    with pytest.raises(tables.TableError, match="figure.csv.gz: cannot read the table"):
        tables.read(packed, ["curve"])
    monkeypatch.setattr(ship, "LARGE", 10**6)
    main(["ship", *words])
    assert tables.shipped("dinan/figure") == data / "dinan/figure.csv" and not packed.exists()


def test_a_file_in_place_of_the_folder_is_one_line(tmp_path, capsys):
    table = sweep(tmp_path / "sweep", [{"commit": "abc"}])
    with pytest.raises(SystemExit, match="2"):
        main(["ship", str(table), "dinan/figure", "--data", str(table)])
    error = capsys.readouterr().err
    assert f"error: {table}/dinan/figure.csv: cannot write: Not a directory" in error
