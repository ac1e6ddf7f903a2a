"""The import rule: which folder stands on which, read from the source; no circles at all; files
that are not too long to be read, and rooms that stay within their budget."""

import ast
import functools
import os
import re
from pathlib import Path

import pytest

from tests.conftest import SLOW, is_slow
from tests.tracked import tracked

pytestmark = pytest.mark.xdist_group("imports")  # every file is read once
ROOT = Path(__file__).resolve().parents[1]
EXPERIMENTS = ("vit_imagenet", "bart_span_denoise", "nanolm_c4", "vit_cifar5m")
# A folder, and the folders or files that its files may import beside their own.
STANDS_ON = {
    "param_groups": (),
    "training": ("param_groups",),
    "measure": ("param_groups", "training"),
    "sweeps": ("training", "param_groups.fits"),
    **dict.fromkeys(EXPERIMENTS, ("param_groups", "training", "measure")),
    "effective_theory": ("param_groups", "training", "measure"),
    "plots": ("param_groups.fits", *(f"training.{f}" for f in ("conditions", "errors", "files"))),
}
# Files at the edge of the repository, which may import all of these and nobody imports.
EDGE = ("scripts", "benchmarks", "examples")
FOLDERS = (*STANDS_ON, *EDGE)
# Lines of Python of a room, held on main alone (.ci/run): a change of a user's fails no test by its
# length. What is new pays for itself, with 2 % of room between two clearings: lower a number when a
# room has become smaller, and raise one only for a move or a promise that stands beside it. The
# first number of a comment is the aim; after it come the promises that stand in its way, in lines.
BUDGET = {
    # 6,900: the trace 2,180, the audit 1,135, the check's gradients and optimisers 430, transfer
    # 616, fits 285, Horizon 275, parts of Muon's matrices and Tied 390, docstrings 1,850, what
    # commands write or say on a full disk 120, attentions known by their queries 60, sums that
    # grow with the width 230, a verdict that no FILE ends 40, rules that go around no other 15, a
    # tie's gradients 18
    "param_groups": 12_595,
    # 4,700: compiled rules and the loss on a GPU 430, files whole on a full disk and locks 340,
    # sharding 236, a simulated step 198, the door to the check 175, the seal of a run 88
    "training": 5_805,
    "measure": 1_007,  # 1,100: representations 393
    "sweeps": 4_512,  # 3,900: searches 823, values from other sweeps 300, cost 247, Ray 241
    " ".join(EXPERIMENTS): 5_853,  # 5,700: fairseq's weights 287, CIFAR-10, two kinds of noise
    "effective_theory": 3_485,  # 3,450
    # 8,000: figures of our own 959, docstrings 640, rules of claims 323, report 274, shipping 112
    "plots": 8_708,
    # 1,500: proofs of transfer 206 and of Muon 127, gpu.py 172, site and package 214, other
    # trainers 133
    "benchmarks scripts examples": 2_093,
    # 27,000: refusals 2,000, models to trace 1,800, planted mistakes 900, kills 1,500
    "tests": 39_200,
}
ROOM = 1.02
LONGEST = 500  # lines of a file
WORDS = 16_000  # of all READMEs, without the claims and findings that `plots fill` writes
ON_MAIN = pytest.mark.skipif("BUDGETS" not in os.environ, reason="held on main: BUDGETS=1")


def modules():
    """Every module of the rooms and its file."""
    files = {}
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return files


@functools.cache
def imports(path):
    """Names of modules that a file imports anywhere, in functions and for type checking, too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found |= {f"{node.module}.{name.name}" for name in node.names} | {node.module}
    return found


MODULES = modules()


@functools.cache
def edges():
    return sorted(
        (importer, imported)
        for importer, path in MODULES.items()
        for imported in imports(path) & MODULES.keys()
        if imported != importer and not importer.startswith(f"{imported}.")
    )


def is_allowed(importer, imported):
    ours, theirs = importer.partition(".")[0], imported.partition(".")[0]
    if ours == theirs:
        return True
    if ours in EDGE:
        return theirs not in (*EDGE, "plots")
    if theirs in EDGE:
        return False
    # `from param_groups import fits` imports the package, too, whose names come without torch.
    return any(
        imported == name or imported.startswith(f"{name}.") or name.startswith(f"{imported}.")
        for name in STANDS_ON[ours]
    )


def circles():
    """Pairs of modules in one folder or several that import each other, directly or not."""
    reach = {module: {b for a, b in edges() if a == module} for module in MODULES}
    for _ in MODULES:
        wider = {a: bs | {c for b in bs for c in reach[b]} for a, bs in reach.items()}
        if wider == reach:
            break
        reach = wider
    return sorted((a, b) for a, b in edges() if a in reach[b])


def test_the_rooms_are_read():
    assert ("training.loop", "training.task") in edges()
    assert len(MODULES) > 100 and all(any(m.startswith(f) for m in MODULES) for f in STANDS_ON)


def test_files_import_only_what_their_folder_stands_on():
    broken = [edge for edge in edges() if not is_allowed(*edge)]
    assert not broken, broken


def test_no_file_imports_itself_by_way_of_others():
    assert not circles()


def test_figures_need_no_torch():
    for importer, path in MODULES.items():
        if importer.partition(".")[0] == "plots":
            heavy = {name.partition(".")[0] for name in imports(path)} & {"torch", "accelerate"}
            assert not heavy, f"{importer} imports {heavy}"


def test_the_core_of_param_groups_knows_neither_stock_models_nor_the_check():
    doors = ("param_groups", "param_groups.__main__")
    rooms = ("param_groups.stock", "param_groups.check")
    for importer, imported in edges():
        inside = importer.startswith("param_groups") and not importer.startswith(rooms)
        if inside and importer not in doors:
            assert not imported.startswith(rooms), f"{importer} imports {imported}"


def lengths():
    """Lines of every Python file that git tracks."""
    paths = tracked("*.py")
    return {str(p.relative_to(ROOT)): len(p.read_bytes().splitlines()) for p in paths}


@ON_MAIN
@pytest.mark.parametrize("room", BUDGET)
def test_a_room_stays_within_its_budget(room):
    folders = tuple(f"{folder}/" for folder in room.split())
    total = sum(length for name, length in lengths().items() if name.startswith(folders))
    assert total <= ROOM * BUDGET[room], f"{room} has {total} lines: what comes in is paid for"


@ON_MAIN
def test_the_readmes_stay_within_theirs():
    written = re.compile("(?s)<!-- (?:claims|findings):.*?<!-- end -->")
    texts = [path.read_text(encoding="utf-8") for path in tracked("*README.md")]
    words = [len(written.sub("", text).split()) for text in texts]
    assert len(words) > 10 and sum(words) <= ROOM * WORDS, "what comes in is paid for"


@ON_MAIN
def test_no_file_is_too_long_to_be_read():
    long = {name: length for name, length in lengths().items() if length > LONGEST}
    assert not long, f"split these: {long}"


def test_the_quick_half_leaves_slow_files_out(request):
    assert all((ROOT / "tests" / name).exists() for name in SLOW)
    assert is_slow(ROOT / "tests/nanolm_c4/test_train.py") and not is_slow(Path(__file__))
    for item in request.session.items:
        assert bool(item.get_closest_marker("slow")) == is_slow(item.path), item
