"""Runs a room's `refused.txt`, a page of what can go wrong and what it says, and holds it to the
source: every `raise` of a user's error in the room is reached by a case, or is in the page's last
list, with the reason.

A paragraph is a case: `>>> code` or `$ command`, then the one line that it must print, which may be
wrapped; `...` in it stands for any text. `name.py:` with indented lines writes that file before,
`name.py: +` adds to it.
A paragraph of code or files alone is set-up for the cases of its `##` section; above the first
section, of the whole page. Other paragraphs are prose."""

import ast
import contextlib
import functools
import importlib.machinery
import importlib.util
import io
import re
import shlex
import sys
import traceback
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError

ROOT = Path(__file__).resolve().parents[1]
# How a command ends, and errors of a developer or of Python's own protocols.
NO_USERS = {"SystemExit", "Verdict", "KeyboardInterrupt", "NotImplementedError"}
NO_USERS |= {"AttributeError", "KeyError", "IndexError"}


@dataclass
class Case:
    line: int
    files: dict = field(default_factory=dict)
    code: str = ""
    command: str = ""
    expected: str = ""
    setup: list = field(default_factory=list)


def read(page):
    """The cases of a page, and `file: piece of the raise` of what it says no case reaches."""
    cases, unreached, common, section, inside = [], [], [], [], False
    text = page.read_text(encoding="utf-8")
    for match in re.finditer(r"(?:.+\n)+", text):
        case = Case(text.count("\n", 0, match.start()) + 1)
        name = None
        for line in match[0].splitlines():
            if line.startswith("## "):
                section, inside = [], True
            elif name and line.startswith("    "):
                case.files[name] += line[4:] + "\n"
            elif re.fullmatch(r"[\w./-]+\.\w+:( \+)?", line) and not case.expected:
                case.files[name := line] = ""
            elif line.startswith((">>> ", "... ")) or line == "...":
                case.code += line[4:] + "\n"
            elif line.startswith("$ "):
                case.command = line[2:]
            elif line.startswith("- `"):
                unreached.append(line[3:].partition("`")[0])
            elif case.code or case.command:
                case.expected = f"{case.expected} {line.strip()}".strip()
        if case.expected:
            case.setup = [*common, *section]
            cases.append(case)
        elif case.code or case.files:
            (section if inside else common).append(case)
    return cases, unreached


@functools.cache
def sites(room):
    """Lines of every `raise` of a user's error in a room: {(file, first, last): its text}."""
    found = {}
    for path in sorted((ROOT / room).rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        lines = source.splitlines()
        for node in ast.walk(ast.parse(source)):
            made = isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)
            if made and getattr(node.exc.func, "id", "") not in NO_USERS:
                text = " ".join(" ".join(lines[node.lineno - 1 : node.end_lineno]).split())
                found[str(path), node.lineno, node.end_lineno] = text
    return found


def passed(error):
    """(file, line) of every frame that an error has passed, and those that it came from."""
    lines = {(one.tb_frame.f_code.co_filename, one.tb_lineno) for one in frames(error)}
    checked = error.errors() if isinstance(error, ValidationError) else ()
    causes = [each.get("ctx", {}).get("error") for each in checked]
    for cause in filter(None, (error.__cause__, error.__context__, *causes)):
        lines |= passed(cause)
    return lines


def frames(error):
    """An error's traceback, link by link."""
    link = error.__traceback__
    while link:
        yield link
        link = link.tb_next


def run(case, folder, names, lines):
    """What a case prints, in a folder of its own: `Error: message`, or a command's stderr; adds
    the lines that its errors have passed."""
    for part in (*case.setup, case):
        for name, text in part.files.items():
            path = folder / name.partition(":")[0]
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "a" if name.endswith("+") else "w", encoding="utf-8") as file:
                file.write(text)
        if part is not case:
            exec(part.code, names)
    before = written(folder)
    if case.code:
        try:
            exec(case.code, names)
            said = "no error"
        except (NameError, SyntaxError):  # of the page
            raise
        except Exception as error:
            lines.update(passed(error))
            said = traceback.format_exception_only(error)[-1].strip()
            said = said.replace(type(error).__module__ + ".", "", 1)
            said = said if "\n" not in str(error) else f"more than one line: {error}"
    if case.command:
        out, err = io.StringIO(), io.StringIO()
        words = shlex.split(case.command.removeprefix("python "))
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code, ended = command(words)
        lines.update(passed(ended) if ended else ())
        said = err.getvalue().strip()
        assert (code, out.getvalue()) == (2, ""), f"exit code {code}, {out.getvalue()}{said}"
        assert "\n" not in said, said
    assert written(folder) == before, f"something was written: {written(folder)}"
    return said.replace(f"{folder}/", "").replace(f"{ROOT}/", "")


def command(words):
    """The exit code of `python -m room words`, or of a file of a room, in this process, and how it
    ended."""
    module = importlib.import_module(words[1] if "." in words[1] else f"{words[1]}.__main__")
    try:
        (getattr(module, "main", None) or module.EXPERIMENT.main)(words[2:])
    except SystemExit as ended:
        return ended.code, ended
    return 0, None


def written(folder):
    """What is in a folder, but for a cache of data and compiled bytecode."""
    return {
        str(path.relative_to(folder)): path.is_file() and path.read_bytes()
        for path in folder.rglob("*")
        if path.relative_to(folder).parts[0] != "cache" and "__pycache__" not in path.parts
    }


class Here:
    """Finds the modules that a case has written in its folder, and no others of their names."""

    def __init__(self, folder, names):
        self.folder, self.names = folder, names

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in self.names:
            return None
        place = self.folder.joinpath(*name.split("."))
        if place.is_dir():
            spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
            spec.submodule_search_locations = [str(place)]
            return spec
        file = place.with_suffix(".py")
        return importlib.util.spec_from_file_location(name, file) if file.exists() else None


def complaints(room, page, tmp_path, monkeypatch):
    """What is wrong with a page: cases that say something else, and raises that none reaches."""
    cases, unreached = read(page)
    problems, lines = [], set()
    paths = [one for one in sys.path if not one.startswith(str(tmp_path.parent))]
    finders = [*sys.meta_path]
    for case in cases:
        folder = tmp_path / str(case.line)
        folder.mkdir()
        for path in ROOT.glob("*/configs"):  # as from the root of the repository
            (folder / path.parent.name).symlink_to(path.parent)
        monkeypatch.chdir(folder)
        monkeypatch.setattr(sys, "path", [*paths, str(folder)])
        files = [name for part in (*case.setup, case) for name in part.files]
        made = [Path(name).parts[0].partition(".")[0] for name in files if ".py:" in name]
        for name in [one for one in sys.modules if one.partition(".")[0] in made]:
            monkeypatch.delitem(sys.modules, name)  # a module of another test's folder
        monkeypatch.setattr(sys, "meta_path", [Here(folder, made), *finders])
        known = dict(sys.modules)
        try:
            said = run(case, folder, {}, lines)
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        new = [name for name, module in [*sys.modules.items()] if known.get(name) is not module]
        for name in new:  # another case's file may have its name
            held = getattr(sys.modules[name], "__dict__", {})
            places = [held.get("__file__") or "", *(held.get("__path__") or ())]
            if any(str(place).startswith(f"{folder}/") for place in places):
                del sys.modules[name]
        pattern = ".*".join(map(re.escape, case.expected.split("...")))
        if not re.fullmatch(pattern, " ".join(said.split())):
            problems.append(f"{page.name}:{case.line}: {said}\n    expected {case.expected}")
    raised = [(str(Path(path).relative_to(ROOT)), text) for (path, *_), text in sites(room).items()]
    for place, piece in (one.split(": ", 1) for one in unreached):
        if not any(place == name and piece in text for name, text in raised):
            problems.append(f"{place}: no raise says {piece!r}; leave it out of the list")
    for (path, first, last), text in sites(room).items():
        name = str(Path(path).relative_to(ROOT))
        hit = any((path, line) in lines for line in range(first, last + 1))
        places = (one.split(": ", 1) for one in unreached)
        listed = [place for place, piece in places if place == name and piece in text]
        if hit == bool(listed):
            problems.append(f"{name}:{first}: {'reached, and listed as not' if hit else text}")
    return problems
