"""Whatever stands in a file, it is read for what it says, or refused in one line.

The same inputs every time; `FUZZ=600 python -m pytest -n 2 -rP tests/test_fuzz.py` draws others,
for 600 seconds a test, and says how many.
"""

import functools
import itertools
import json
import os
import re
import shutil
import time
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from nanolm_c4.config import Config
from param_groups import Everett, Plan, Role, Rule, plan
from param_groups.check.transfer_command import Runs
from plots import catalogue, tables
from sweeps.__main__ import main
from sweeps.progress import last_line
from sweeps.request import read_manifest
from sweeps.tables import _lines
from tests.run_folders import STATE, seal
from tests.sweeps.test_search import BASE, SEARCH
from tests.sweeps.toys import ROOT, FakePool, drive, make_toy, work_of, write_file
from training import runs
from training.checkpoints import checkpoint
from training.config import leaves, load
from training.data.text import _read_files
from training.data.token_cache import TokenCache
from training.errors import Damaged, one_line_errors

SECONDS = float(os.environ.get("FUZZ", 0))
ODD = [
    *"a seed nan -inf inf -1 0 1 2 0.5 1e-320 1e308 1e999 null true [] [1] {} [[]]".split(),
    *'" \' "a" , \\ud800 é << # .inf .nan 1:2:3 2001-01-01 /dev/zero -0 *a'.split(),
    *'~{"a": 1}~\n~\n  ~\0~\t~\x07~\u2028~---\n~...\n~|\n~: ~? ~&a ~!!set ~!!binary '.split("~"),
    *("!!python/object/apply:os.system ", str(2**70), "[" * 9999, "- " * 200),
    *("x" * 5000, "9" * 5000, "../" * 9),
]
WORD = re.compile(rb"[-\w.+]+")
KINDS = ("word", "word", "word", "insert", "byte", "cut")
KINDS += ("line gone", "line twice", "lines swapped")
CHANGES = st.lists(
    st.tuples(st.sampled_from(KINDS), st.floats(0, 1, exclude_max=True), st.sampled_from(ODD)),
    min_size=1,
    max_size=3,
)


def changed(content, changes):
    """A file's bytes with words replaced, lines moved, bits flipped or an end cut off."""
    for kind, where, text in changes:
        odd, at = text.encode("utf-8", "surrogatepass"), int(where * len(content))
        lines = content.splitlines(keepends=True) or [b""]
        line = int(where * len(lines))
        if kind == "word" and (words := [*WORD.finditer(content)]):
            word = words[int(where * len(words))]
            content = content[: word.start()] + odd + content[word.end() :]
        elif kind == "insert":
            content = content[:at] + odd + content[at:]
        elif kind == "byte":
            other = bytes(255 - byte for byte in content[at : at + 1])
            content = content[:at] + other + content[at + 1 :]
        elif kind == "cut":
            content = content[:at]
        elif kind.startswith("line"):
            some = {"gone": [], "twice": [lines[line]] * 2, "swapped": [lines[line], lines[0]]}
            content = b"".join([*lines[:line], *some[kind.split()[1]], *lines[line + 1 :]])
    return content


def fuzzed(count, *strategies):
    """A test of `count` inputs, or of as many as FUZZ allows."""

    def decorate(check):
        settled = settings(
            max_examples=count,
            derandomize=not SECONDS,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        )

        def test(tmp_path, monkeypatch):
            one, inputs = check(tmp_path, monkeypatch), itertools.count()
            counted = functools.wraps(one)(lambda **drawn: (next(inputs), one(**drawn))[1])
            run = settled(given(*strategies)(counted))
            end = time.monotonic() + SECONDS
            run()
            while time.monotonic() < end:
                run()
            print(f"{next(inputs)} inputs")

        test.__doc__ = check.__doc__
        return test

    return decorate


def in_one_line(function, *errors):
    """What a function returns, or None where it ends with a line and exit code 2."""
    try:
        with one_line_errors(*errors):
            return function()
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    return None


LAPTOP = (ROOT / "nanolm_c4/configs/laptop.yaml").read_bytes()
KEYS = [key for key, _ in leaves(Config)]
WORDS = st.tuples(st.sampled_from(KEYS), st.lists(st.sampled_from(ODD)).map("".join)).map("=".join)


@fuzzed(60, CHANGES | st.text(max_size=200), st.lists(WORDS | st.text(max_size=30), max_size=2))
def test_a_config(tmp_path, monkeypatch):
    def check(changes, overrides):
        text = changes.encode("utf-8", "surrogatepass") if isinstance(changes, str) else None
        (tmp_path / "x.yaml").write_bytes(changed(LAPTOP, changes) if text is None else text)
        in_one_line(lambda: load(Config, tmp_path / "x.yaml", overrides))

    return check


SWEEPS = {
    name: (ROOT / f"nanolm_c4/sweeps/{name}.yaml")
    .read_bytes()
    .replace(b"../configs", str(ROOT / "nanolm_c4/configs").encode())
    for name in ("quickstart", "constants", "transfer_muon")
}


@fuzzed(40, st.sampled_from([*SWEEPS]), CHANGES)
def test_a_sweep_file(tmp_path, monkeypatch):
    def check(name, changes):
        file = tmp_path / f"{name}.yaml"
        file.write_bytes(changed(SWEEPS[name], changes))
        command = ["run", str(file), "--dry-run", "--results", str(tmp_path)]
        in_one_line(lambda: main(command))

    return check


@fuzzed(700, CHANGES)
def test_a_saved_plan(tmp_path, monkeypatch):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    rules = [Rule("*.weight", Role.HIDDEN), Rule("*.bias", Role.HIDDEN_BIAS)]
    plain = plan(model, rules, Everett("standard", 8, 8), lr=0.1).to_dict()
    saved = json.dumps(plain, indent=1).encode()

    def used(data):
        found = Plan.from_dict(data)
        found.table(), json.dumps(found.to_dict()), found.differences(found)
        found.initialise(model, 0)
        assert len(found.groups(model)) > 0

    def check(changes):
        try:
            data = json.loads(changed(saved, changes))
        except (ValueError, RecursionError):
            return
        in_one_line(lambda: used(data))

    return check


FIGURES = (
    *("everett/quickstart", "everett/depth", "everett/weight_decay", "dinan/rate_transfer"),
    *("dinan/ablations", "dinan/bart_strategies", "bordelon/rate_transfer", "bordelon/heads"),
    *("theory/error", "theory/bigram"),
)


@fuzzed(60, st.sampled_from(FIGURES), st.floats(0, 1, exclude_max=True), CHANGES)
def test_a_table(tmp_path, monkeypatch):
    """Its findings have numbers, too."""

    def findings(name, paths):
        with catalogue.one_line(paths):
            module = catalogue.load(name)
            return list(module.findings(module.read(paths)))

    def check(name, which, changes):
        paths = [Path(shutil.copy(path, tmp_path)) for path in catalogue.shipped(name)]
        one = paths[int(which * len(paths))]
        one.write_bytes(changed(one.read_bytes(), changes))
        found = in_one_line(lambda: findings(name, paths), tables.TableError) or ()
        assert not any(re.search(r"\bnan\b", str(line)) for line in found)

    return check


NESTED = {  # files that are JSON, and their readers
    "summary.json": lambda path: runs.summary(path.parent),
    "plan.json": lambda path: runs.refuse_other(path.parent, None, None),
    "metrics.jsonl": lambda path: [*_lines(path), last_line(path.parent)],
    "meta.json": lambda path: TokenCache(path.parent),
    "manifest.json": read_manifest,
    "corpus.jsonl": lambda path: [*_read_files([path], "text")],
    "runs.jsonl": lambda path: Runs(path.parent, {}),
    "a_table.json": lambda path: tables.origin(path),
}


@pytest.mark.parametrize("name", NESTED)
def test_json_of_endless_depth(name, tmp_path):
    """No reader ends with a traceback, though json's error of it is no ValueError."""
    for other in NESTED:
        head = "{}\n" if other.endswith("jsonl") else ""
        (tmp_path / other).write_text(head + "[" * 99_999 + "\n")
    (tmp_path / "config.yaml").touch()

    def read():
        with catalogue.one_line([tmp_path] if name == "a_table.json" else []):
            NESTED[name](tmp_path / name)

    in_one_line(read, tables.TableError)


SWEEP = "grid: {gamma.a: [1.0, 2.0]}\ncurves: {a: {}}\nmetrics: true\n"


@pytest.mark.parametrize("kind", ["sweep", "search"])
def test_a_folder_of_runs(kind, tmp_path, monkeypatch):
    """The next command's tables are those of an undisturbed one, or it says what is wrong."""
    toy = make_toy(tmp_path, monkeypatch, BASE)
    file = write_file(toy, SWEEP if kind == "sweep" else SEARCH.replace("12", "4"))
    work = drive(work_of(toy, file), FakePool())
    results, whole = tmp_path / "results", tmp_path / "whole"
    shutil.copytree(results, whole)
    wanted = {path.name: path.read_bytes() for path in work.folder.glob("*.csv")}
    files = sorted(p.relative_to(whole) for p in whole.rglob("*.*") if p.is_file())
    files = [path for path in files if path.name not in ("calls.txt", ".lock")]

    def check(path, changes):
        shutil.rmtree(results)
        shutil.copytree(whole, results)
        (results / path).write_bytes(changed((whole / path).read_bytes(), changes))
        in_one_line(lambda: main(["status", str(file), "--results", str(results)]))
        work = in_one_line(lambda: drive(work_of(toy, file), FakePool()))
        if work and not work.reasons:
            assert wanted == {path.name: path.read_bytes() for path in work.folder.glob("*.csv")}

    fuzzed(60, st.sampled_from(files), CHANGES)(lambda *_: check)(tmp_path, monkeypatch)


@fuzzed(150, st.sampled_from([STATE, "meta.json", "checksums.json"]), CHANGES, st.booleans())
def test_a_checkpoint(tmp_path, monkeypatch):
    """One whose checksums fit, as after a mistake of ours, is damaged or can be read."""
    whole = checkpoint.save(tmp_path, 3, {"model/a": torch.ones(3, 2)}, {"run": "x"}, 1)
    files = {path.name: path.read_bytes() for path in whole.iterdir()}

    def read():
        checkpoint.check(whole)
        found = checkpoint.load(whole)
        return {key: found.read(key) for key in found.parts}

    def check(name, changes, sealed):
        for other, content in files.items():
            (whole / other).write_bytes(content)
        (whole / name).write_bytes(changed(files[name], changes))
        if sealed:
            seal(whole)
        if tensors := in_one_line(read, Damaged):
            assert sealed or tensors["model/a"].tolist() == [[1, 1]] * 3

    return check
