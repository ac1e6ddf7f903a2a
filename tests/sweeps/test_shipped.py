"""Shipped sweeps: names of their runs, their recorded results fed through the rules, and what waits
for a GPU.

A run's name is a hash of its config: shipped tables and resumed sweeps rely on it. `run_ids.json`
holds, for every shipped sweep file and preset, the number of runs of its grid and a hash of their
names, and for every shipped config its name. A change here makes finished runs of users
unfindable; it must be on purpose and said in the closing note and the changelog.
"""

import csv
import gzip
import hashlib
import importlib
import json
import os
import re
import shutil
from pathlib import Path

import pytest

from sweeps import tables
from sweeps.__main__ import main
from sweeps.request import read_file
from sweeps.study import is_near_edge, suggest
from sweeps.sweep_file import load_sweep
from tests.sweeps.toys import play
from tests.tracked import tracked
from training import runs
from training.config import load, read_yaml

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "plots/data"
RECORDED = json.loads(Path(__file__).with_name("run_ids.json").read_text())


def name_of(key, folder):
    """What `run_ids.json` says of a config, or of a sweep file and preset."""
    file, _, preset = key.partition(" --preset ")
    if "/configs/" in key:
        kind = importlib.import_module(f"{file.split('/')[0]}.config").Config
        return runs.run_id(load(kind, ROOT / file))
    sweep = load_sweep(Path(file), folder, preset or None, draft=True)
    names = sorted(point.run for point in sweep.points)
    return [len(names), hashlib.blake2b("\n".join(names).encode(), digest_size=8).hexdigest()]


def test_every_shipped_file_is_recorded(tmp_path, monkeypatch):
    """A new file of a user's fails no test; on main, where it would be shipped, it is recorded."""
    monkeypatch.chdir(ROOT)
    expected = set()
    for path in tracked("*/sweeps/*.yaml"):
        data = read_yaml(path)
        if "search" not in data:
            name = str(path.relative_to(ROOT))
            expected |= {name, *(f"{name} --preset {preset}" for preset in data.get("presets", ()))}
    configs = (path.relative_to(ROOT) for path in tracked("*/configs/*.yaml"))
    expected |= {str(path) for path in configs if path.parts[0] != "effective_theory"}
    assert RECORDED.keys() <= expected
    new = expected - RECORDED.keys() if "BUDGETS" in os.environ else set()
    lines = {key: name_of(key, tmp_path) for key in sorted(new)}
    assert not lines, f"lines for run_ids.json: {json.dumps(lines)[1:-1]}"


@pytest.mark.parametrize("key", RECORDED)
def test_names_of_runs_stay(key, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert name_of(key, tmp_path) == RECORDED[key]


MINUTES = {"s": 1 / 60, "min": 1, "minutes": 1, "h": 60, "hours": 60, "d": 1440}


def minutes(text):
    parts = re.findall(rf"([\d.]+) ({'|'.join(MINUTES)})\b", text)
    return sum(float(number) * MINUTES[unit] for number, unit in parts)


def announced(command, capsys):
    """Minutes that a dry run says."""
    assert main(["run", *command, "--dry-run"]) in (None, 0)
    return minutes(re.search(r"about (.*) on \d CPU cores?", capsys.readouterr().out)[1])


@pytest.mark.thorough
@pytest.mark.parametrize("path", tracked("*/sweeps/*.yaml"), ids=lambda path: path.stem)
def test_the_time_in_a_files_head_is_the_dry_runs(path, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    _, _, time, command, *_ = path.read_text(encoding="utf-8").splitlines()
    if " of one core" not in time:
        pytest.skip("GPU-hours, which `sweeps cost` says")
    words = command.split("python -m sweeps run ")[1].split()
    options = ["--workers", "1", "--results", str(tmp_path)]
    said = announced([*words, *options], capsys)
    assert minutes(time.split(" of one core")[0]) == pytest.approx(said, rel=0.06, abs=0.6)


# The shipped sweeps, replayed

FOLDERS = {
    "everett": ["nanolm_c4"],
    "bordelon": ["vit_cifar5m", "nanolm_c4"],
    "dinan": ["vit_imagenet", "bart_span_denoise"],
}


def shipped():
    """(table, sweep file, preset) of every shipped table of results."""
    for table in sorted(DATA.glob("*/*.csv")):
        files = [
            ROOT / folder / "sweeps" / f"{table.stem}.yaml"
            for folder in FOLDERS.get(table.parent.name, ())
        ]
        for file in filter(Path.exists, files):
            if "status" in table.open().readline().split(","):
                has_laptop = "laptop" in read_file(file).get("presets", {})
                yield table, file, "laptop" if has_laptop else None


SHIPPED = list(shipped())
NAMES = [f"{table.parent.name}/{table.stem}" for table, *_ in SHIPPED]


def text_beside(notes):
    """A shipped table, by the file that says where it comes from."""
    (table,) = notes.parent.glob(f"{notes.stem}.csv*")
    with (gzip.open if table.suffix == ".gz" else open)(table, "rt", newline="") as file:
        return file.read()


ORIGINS = {notes: json.loads(notes.read_text()).get("sweep") for notes in DATA.glob("*/*.json")}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """A results folder in which sweeps find what they take from each other."""
    folder = tmp_path_factory.mktemp("results")
    for notes, sweep in ORIGINS.items():
        if sweep and "status" in (text := text_beside(notes)).partition("\n")[0].split(","):
            (folder / sweep).mkdir(parents=True)
            (folder / sweep / "results.csv").write_text(text, newline="")
    for name in ("constants", "constants_desktop", "constants_embedding_1_desktop"):
        (own := folder / "nanolm_c4" / (name if "_" in name else f"{name}_laptop")).mkdir()
        shutil.copy(DATA / f"everett/{name}.yaml", own / "constants.yaml")
    return folder


# Tables of preset laptop that were made before runs had their present names.
FORMER = {"figure_1_2", "figure_1_5_6_7_alignment", "figure_12_adam", "figure_11_sgd"}


def typed(text):
    """The value behind a cell of a table."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def test_every_sweep_with_results_is_replayed():
    assert len(SHIPPED) >= 16 and {table.parent.name for table, *_ in SHIPPED} == set(FOLDERS)


@pytest.mark.thorough
@pytest.mark.parametrize(("table", "file", "preset"), SHIPPED, ids=NAMES)
def test_recorded_results_give_the_shipped_points_and_table(results, tmp_path, table, file, preset):
    sweep = load_sweep(file, results, preset)
    axes = {point.curve: [key for key, _ in point.values] for point in sweep.points}
    rows = {}
    with open(table, newline="") as lines:
        for row in csv.DictReader(lines):
            values = tuple((key, typed(row[key])) for key in axes[row["curve"]])
            rows[row["curve"], values, int(row["seed"])] = row

    def row_of(point):
        return rows[point.curve, point.values, point.seed]

    def result(point):
        row = {key: typed(cell) for key, cell in row_of(point).items() if cell}
        return {"final_eval_loss": None, **row, "environment": {"commit": row_of(point)["commit"]}}

    for seed in range(2):
        work = play(sweep, result, seed, 5)
        points = list(work.points.values())
        assert {(p.curve, p.values, p.seed) for p in points} == rows.keys()
        assert all("more are needed" in note for note in work.notes.values())
    sweep.folder = tmp_path
    tables.write(sweep, points, work.results, final=False)
    text = table.read_text()
    names = {row_of(point)["run"]: point.run for point in points}
    assert any(was != now for was, now in names.items()) == (table.stem in FORMER)
    for was, now in names.items():
        text = text.replace(was, now)
    written = (tmp_path / "results.csv").read_text()
    assert written == text


def test_shipped_constants_say_which_are_near_an_edge_of_their_ranges():
    for table in DATA.glob("everett/constants*.yaml"):
        for entry in (file := read_file(table))["constants"]:
            ends, best = entry["ranges"].items(), entry["best"]["set"]
            assert all(low <= best[key] <= high for key, (low, high) in ends)
            near = [key for key, of in ends if is_near_edge(best[key], of, file["search"]["edge"])]
            assert near == entry["near_edge"], (table, entry["where"])


def test_the_sampler_gives_the_recorded_trials():
    """The second trial of preset laptop's search with standard and SGD; it depends on no loss."""
    ranges = dict.fromkeys(("embedding", "hidden", "readout"), (1e-2, 1e2))
    given = suggest([], ranges, (0, "effective-standard-sgd", 1, 1))
    recorded = [22.807887451003424, 0.22439802444770182, 0.035832244153487756]
    assert list(given.values()) == pytest.approx(recorded, rel=1e-9)


# What waits for a GPU: each block starts from the shipped tables, and stays small

TEXT = (ROOT / "scripts/gpu_blocks.sh").read_text(encoding="utf-8")
BLOCKS = [line[2:] for line in re.findall(r"^[1-5] .*$", TEXT, re.MULTILINE)]
SEARCHED = "constants_embedding_1_desktop_800", "constants_desktop_800"  # by blocks before


@pytest.fixture(scope="module")
def gpu_results(tmp_path_factory):
    """A results folder with the tables that the script puts into it."""
    root = tmp_path_factory.mktemp("gpu")
    for path, shipped in re.findall(r"^table (\S+) (\S+)$", TEXT, re.MULTILINE):
        (root / path).parent.mkdir(parents=True)
        shutil.copy(ROOT / "plots/data" / shipped, root / path)
    return root


@pytest.mark.parametrize("block", BLOCKS)
def test_a_block_starts_from_shipped_tables(block, gpu_results, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    main(["run", *block.split(), "--dry-run", "--verbose", "--results", str(gpu_results)])
    text = capsys.readouterr().out
    runs = int(re.search(r": (\d+) of \d+ runs to do", text)[1])
    assert 0 < runs <= 420, text
    missing = re.findall(r"(\S+) (?:does not exist|has no runs yet)", text)
    assert all(Path(path).parent.name in SEARCHED for path in missing), missing


CLAIMS = read_yaml(ROOT / "plots/claims.yaml")
PREPARED = {
    entry["prepared"]: entry["claim"]
    for of in CLAIMS.values()
    for entry in of
    if "prepared" in entry
}


@pytest.mark.parametrize("words", PREPARED)
def test_a_prepared_run_starts_and_has_no_table(words, results, capsys):
    """What the page of claims calls prepared, and no longer when it has run."""
    file, preset, time = words.split(", ", 2)
    preset = preset.removeprefix("preset ")
    options = ["--preset", preset, "--workers", "1", "--results", str(results)]
    said = announced([str(ROOT / file), *options], capsys)
    assert minutes(time.split(" of one core")[0]) == pytest.approx(said, rel=0.1)
    experiment, _, name = file.split("/")
    assert f"{experiment}/{Path(name).stem}_{preset}" not in ORIGINS.values(), PREPARED[words]
