"""How the package's centre reads: a short plan(), and no question about which class a value is."""

import ast
import functools
import inspect
from pathlib import Path

import param_groups
from param_groups.plan import plan

ROOT = Path(param_groups.__file__).parent
# Where a user hands something in, it is looked at once: file:class. Layers are the user's.
DOORS = """
check/measuring:Check check/reading:MuonAdamW model/forward:Scaled model/read:Multiplied
model/values:Multiplied prescription:Prescription roles:Rule rules/everett:Alignment
rules/wrappers:Prescription schedules:Plan
"""
# Whose attributes are asked for by name: torch's tensors, modules and optimisers, a user's list.
FOREIGN = {"module", "layer", "parameter", "optimizer", "rules", "update", "function", "out"}
FOREIGN |= {"sys", "matrix", "matrices[0]", "ahead"}  # tensors that may be sharded


@functools.cache
def trees():
    paths = [path for path in sorted(ROOT.rglob("*.py")) if "stock" not in path.parts]
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in paths}


def calls(tree, *names):
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", None) in names:
            yield node


def own(tree):
    """The package's classes by their names in a file; torch has a Tensor, too."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("param_groups"):
            names |= {name.asname or name.name for name in node.names if name.name[0].isupper()}
    return names


def test_plan_reads_at_a_glance():
    (function,) = ast.parse(inspect.getsource(plan)).body
    body = function.body[1:]  # without the docstring
    lines = {line for node in body for line in range(node.lineno, node.end_lineno + 1)}
    assert len(lines) <= 12


def test_no_code_asks_which_of_the_packages_classes_a_value_is():
    asked = {
        f"{path.relative_to(ROOT).with_suffix('')}:{name.id}"
        for path, tree in trees().items()
        for names in [own(tree)]
        for call in calls(tree, "isinstance", "issubclass")
        for name in ast.walk(call.args[1])
        if isinstance(name, ast.Name) and name.id in names
    }
    assert asked == set(DOORS.split())


def test_no_code_looks_for_an_attribute_that_a_value_of_the_package_may_lack():
    """With a constant name; columns of rows are read by the names of their fields."""
    for path, tree in trees().items():
        for call in calls(tree, "getattr", "hasattr"):
            value = ast.unparse(call.args[0])
            columns = not isinstance(call.args[1], ast.Constant) and len(call.args) == 2
            assert columns or value.partition(".")[0] in FOREIGN, (path.name, ast.unparse(call))
