"""Looking at runs: find them by their keys, see their curves, see what differs between them.

    python -m sweeps list model.width=64 'optimizer.lr>0.01' status=finished
    python -m sweeps show RUN
    python -m sweeps compare RUN RUN ...
    python -m sweeps open RUN

A RUN is the folder of a run, or the beginning of its name, which may be preceded by its sweep:
`mup-3f`, `quickstart/mup-3f`. All is read from the files of the runs, whoever trains them.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import re
import shutil
import sys
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from sweeps.asked import Condition
from sweeps.progress import columns, last_line
from sweeps.tables import by_size
from training import runs
from training.errors import UserError, nearest, one_line_errors
from training.files import is_locked, read_text, reading

COLUMNS = 8  # keys that a list shows unless --keys names them
STATUSES = ("finished", "diverged", "stopped", "running", "unfinished")
COLORS = ("cyan", "yellow", "magenta", "green", "blue", "red")


def main(argv: Sequence[str]) -> None:
    """The commands list, show, compare and open; exit code 2 for a user's mistake, in one line."""
    args = _parser(argv[0]).parse_intermixed_args(argv[1:])
    with one_line_errors(OSError):
        {"list": list_, "show": show, "compare": compare, "open": open_}[argv[0]](args)


def _parser(command: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m sweeps {command}",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    if command == "list":
        add(
            "where",
            nargs="*",
            metavar="key=value",
            help="keys of the config or the summary, status, sweep; with = != < <= > >=",
        )
        add(
            "--keys",
            nargs="+",
            metavar="KEY",
            help=f"keys to show (default: the first {COLUMNS} that differ)",
        )
        add("--paths", action="store_true", help="print the folders alone")
    else:
        add("run", nargs="+" if command == "compare" else 1, metavar="RUN")
    if command in ("show", "compare"):
        add(
            "--y",
            metavar="KEY",
            help="draw this key of metrics.jsonl (default: train_loss, and points of eval_loss)",
        )
        add("--png", type=Path, metavar="FILE", help="draw the curve here")
    add("--results", type=Path, default=runs.RESULTS, help="results folder")
    return parser


# Runs and what their files say


class Run:
    """A run's folder; everything in it is read when it is asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sweep = "/".join(folder.absolute().parts[-3:-1])

    @functools.cached_property
    def config(self) -> dict[str, Any]:
        """By dotted keys."""
        path = self.folder / "config.yaml"
        with reading(path):
            text = read_text(path)
            # Thousands of runs share most of their sections, and YAML takes a millisecond to read.
            parts = [_section(part) for part in re.split(r"^(?=\S)", text, flags=re.M) if part]
            if not parts or not all(isinstance(part, dict) for part in parts):
                raise UserError(f"{path}: not the config of a run")
            return dict(runs.flat({key: value for part in parts for key, value in part.items()}))

    @functools.cached_property
    def result(self) -> dict[str, Any]:
        """The summary, or what a run without one has logged last, and its status."""
        found = runs.summary(self.folder)
        if found is None:
            status = "running" if is_locked(self.folder) else "unfinished"
            found = {"status": status, **last_line(self.folder)}
        losses = {
            "final_train_loss": found.get("train_loss"),
            "final_eval_loss": found.get("eval_loss"),
        }
        return {**losses, **found}

    @functools.cached_property
    def values(self) -> dict[str, Any]:
        """What it is found by: keys of its config and its summary, its name and its sweep."""
        return {**self.result, **self.config, "run": self.folder.name, "sweep": self.sweep}

    @functools.cached_property
    def lines(self) -> list[dict[str, Any]]:
        """metrics.jsonl by dotted keys; a last line that is being written is left out."""
        path = self.folder / "metrics.jsonl"
        if not path.exists():
            return []
        with reading(path):
            lines = [dict(runs.flat(json.loads(line))) for line in read_text(path).split("\n")[:-1]]
            if not all(isinstance(line["step"], int) for line in lines):
                raise ValueError("a step that is no number")
        return lines

    def curve(self, key: str) -> list[tuple[float, float]]:
        """(step, value) of a key of metrics.jsonl, where it is a number."""
        return [
            (line["step"], line[key])
            for line in self.lines
            if isinstance(line.get(key), (int, float))
        ]

    def plan(self) -> dict[str, dict[str, str]]:
        """Per role what its tensors have, every value of theirs, and what the model multiplies."""
        path = self.folder / "plan.json"
        if not path.exists():
            return {}
        with reading(path):
            return _by_role(json.loads(read_text(path)))


def _by_role(saved: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    roles: dict[str, list[dict[str, Any]]] = {}
    for row in saved["rows"]:
        roles.setdefault(row["role"], []).append(row)
    factors = {factor["name"]: factor["value"] for factor in saved.get("forward") or ()}
    plan = {
        role: {
            "tensors": str(len(rows)),
            "parameters": f"{sum(math.prod(row['shape']) for row in rows):,}",
            **{
                name: ", ".join(dict.fromkeys(f"{row[name]:.3g}" for row in rows))
                for name in ("init_std", "multiplier", "lr", "eps", "weight_decay")
            },
        }
        for role, rows in roles.items()
    }
    return plan | ({"forward": {k: f"{v:.3g}" for k, v in factors.items()}} if factors else {})


@functools.lru_cache(maxsize=10_000)
def _section(text: str) -> Any:
    try:
        return yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except yaml.YAMLError:
        return None


def find(results: Path) -> list[Run]:
    """The runs in a results folder that have begun; UserError where there is none."""
    found = [Run(path.parent) for path in sorted(results.glob("*/*/*/config.yaml"))]
    if not found:
        raise UserError(
            f"{results}: no run in it; train one, or name the folder that holds "
            "<experiment>/<sweep>/<run>/ with --results"
        )
    return found


def named(word: str, results: Path) -> Run:
    """The run that a path, or the beginning of a name, means; UserError unless it is one."""
    if (Path(word) / "config.yaml").is_file():
        return Run(Path(word))
    names = {run: f"{run.sweep}/{run.folder.name}" for run in find(results)}
    tails = {run: [name, name.split("/", 1)[1], run.folder.name] for run, name in names.items()}
    whole = [run for run in names if word in tails[run]]
    fitting = whole or [run for run in names if any(t.startswith(word) for t in tails[run])]
    if not fitting:
        known = [tail for run in names for tail in tails[run]]
        raise UserError(f"{results}: no run {word!r}{nearest(word, known)}")
    if len(fitting) > 1:
        some = ", ".join(names[run] for run in fitting[:3])
        raise UserError(
            f"{results}: {len(fitting)} runs begin with {word!r}: {some}"
            f"{', ...' if len(fitting) > 3 else ''}; give more of the name, or the sweep before it"
        )
    return fitting[0]


# Commands


def list_(args: argparse.Namespace) -> None:
    """Prints a line per run that fits all conditions."""
    every = [run for run in find(args.results) if _readable(run)]
    conditions = [Condition.read(word, "command line") for word in args.where]
    known = {key for run in every for key in run.values}
    for key in (*(args.keys or ()), *(condition.key for condition in conditions)):
        if key not in known:
            raise UserError(f"no run has the key {key!r}{nearest(key, sorted(known))}")
    fitting = [_fitting(every, condition) for condition in conditions]
    found = [run for run in every if all(run in runs for runs in fitting)]
    if args.paths:
        print(*(run.folder for run in found), sep="\n")
        return
    keys, hidden = args.keys or [], []
    if args.keys is None:
        differing = _differing([run.config for run in found])
        keys, hidden = differing[:COLUMNS], differing[COLUMNS:]
    cells = {run: [run.values.get(key) for key in keys] for run in found}
    found.sort(key=lambda run: (run.sweep, [by_size(value) for value in cells[run]]))
    rows = [
        (
            run.sweep,
            run.folder.name,
            run.result["status"],
            str(run.result.get("step", 0)),
            *map(_short, cells[run]),
            _short(run.result["final_train_loss"]),
            _short(run.result["final_eval_loss"]),
        )
        for run in found
    ]
    head = ("sweep", "run", "status", "step", *_headings(keys), "train loss", "eval loss")
    if rows:
        print(columns([head, *rows]))
    states = Counter(run.result["status"] for run in found)
    told = ", ".join(f"{count} {status}" for status, count in states.most_common())
    print(f"{len(found)} of {len(every)} runs{f': {told}' if told else ''}", file=sys.stderr)
    if hidden:
        print(f"{', '.join(hidden)} differ, too; --keys shows them", file=sys.stderr)


def _fitting(every: Sequence[Run], condition: Condition) -> set[Run]:
    """The runs that are meant; those without the key, or with another kind of value, are not.

    UserError if all have another kind of value, or for a status that no run can have.
    """
    key, wanted = condition.key, condition.value
    values = {run: run.values[key] for run in every if key in run.values}
    if key == "status" and wanted not in [*STATUSES, *values.values()]:
        raise UserError(
            f"command line {condition.text}: no status {wanted!r}{nearest(wanted, STATUSES)}; "
            f"there are {', '.join(STATUSES)}"
        )
    if key == "sweep" and "/" not in str(wanted):  # without its experiment
        values = {run: sweep.rpartition("/")[2] for run, sweep in values.items()}
    found, refused = set(), []
    for run, value in values.items():
        try:
            if condition.compare(value):
                found.add(run)
        except UserError as error:
            refused.append(error)
    if refused and len(refused) == sum(value is not None for value in values.values()):
        raise refused[0]
    return found


def _readable(run: Run) -> bool:
    """Whether a run can be listed; a damaged one is named on stderr."""
    try:
        return bool(run.config and run.result)
    except UserError as error:
        print(f"left out: {error}", file=sys.stderr)
        return False


def show(args: argparse.Namespace) -> None:
    """Prints a run's result, config, plan and curve."""
    run = named(args.run[0], args.results)
    _headline(run)
    sections: dict[str, list[str]] = {}
    for key, value in run.config.items():
        section, _, name = key.rpartition(".")
        if value is not None:
            sections.setdefault(section, []).append(f"{name} {_short(value)}")
    width = max(map(len, sections)) + 2
    room = max(40, shutil.get_terminal_size().columns - width)
    for section, words in sections.items():
        text = textwrap.fill(", ".join(words), room, break_long_words=False)
        print(textwrap.indent(text, " " * width).replace(" " * width, f"{section:{width}}", 1))
    plan = run.plan()
    forward = plan.pop("forward", {})
    if plan:
        heads = list(next(iter(plan.values())))
        lines = [(role, *cells.values()) for role, cells in plan.items()]
        print(f"\n{columns([('role', *heads), *lines])}")
        print(*(f"{name} {value}" for name, value in forward.items()), sep=", ")
    _draw({run: run.folder.name}, args)


def compare(args: argparse.Namespace) -> None:
    """Prints what differs between runs, and draws their curves together."""
    chosen = [named(word, args.results) for word in args.run]
    for run in chosen:
        _headline(run)
    configs = [run.config for run in chosen]
    keys = _differing(configs)
    plans = [dict(runs.flat(run.plan())) for run in chosen]
    changed: dict[tuple[str, ...], list[str]] = {}  # roles that change in the same way
    for key in _differing(plans):
        role, _, name = key.rpartition(".")
        if name not in ("tensors", "parameters"):
            changed.setdefault((name, *(plan.get(key, "") for plan in plans)), []).append(role)
    # A run's column is named by what is its own, where that is short.
    few = list(zip(_headings(keys), keys, strict=True)) if 0 < len(keys) <= 3 else []
    labels = {
        run: ", ".join(f"{name} {_short(run.config.get(key))}" for name, key in few)
        or run.folder.name
        for run in chosen
    }
    rows = [(key, *(_short(config.get(key)) for config in configs), "") for key in keys]
    rows += [
        (f"plan: {name}", *cells, f"of {', '.join(roles)}")
        for (name, *cells), roles in changed.items()
    ]
    rows += [
        (key, *(_short(run.result.get(key)) for run in chosen), "")
        for key in ("parameters", "step", "final_train_loss", "final_eval_loss", "train_seconds")
    ]
    print(columns([("", *(run.folder.name for run in chosen), ""), *rows]))
    _draw(labels, args)


def open_(args: argparse.Namespace) -> None:
    """Prints where a run's files are, and how to see its curves elsewhere."""
    run = named(args.run[0], args.results)
    print(run.folder.absolute())
    for path in sorted(run.folder.iterdir()):
        if not path.name.startswith("."):
            print(f"  {path.name}{'/' if path.is_dir() else ''}")
    if (run.folder / "tensorboard").is_dir():
        print(
            f"curves: tensorboard --logdir {run.folder}; of all its sweep's runs: "
            f"tensorboard --logdir {run.folder.parent}"
        )


def _differing(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """The keys whose values are not the same in all, in their order."""
    keys = dict.fromkeys(key for config in configs for key in config)
    return [key for key in keys if len({repr(config.get(key)) for config in configs}) > 1]


def _headings(keys: Sequence[str]) -> list[str]:
    """Keys without their section where what is left says enough."""
    last = [key.rpartition(".")[2] for key in keys]
    return [name if last.count(name) == 1 else key for name, key in zip(last, keys, strict=True)]


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "" if value is None else str(value)


def _headline(run: Run) -> None:
    result, steps = run.result, run.config.get("training.steps")
    words = [f"{result['status']} at step {result.get('step', 0)} of {steps}"]
    with reading(run.folder / "summary.json"):
        for name in ("train", "eval"):
            if result[f"final_{name}_loss"] is not None:
                words.append(f"{name} loss {result[f'final_{name}_loss']:.4f}")
    print(f"{run.folder}: {', '.join(words)}")


# Curves


def _draw(labels: Mapping[Run, str], args: argparse.Namespace) -> None:
    """Draws runs in the terminal, and as a picture where one is asked for."""
    key = args.y or "train_loss"
    curves = [(label, run.curve(key)) for run, label in labels.items()]
    if not any(points for _, points in curves):
        known = {name for run in labels for line in run.lines for name in line}
        if args.y is None and not known:
            print("nothing is logged yet")
            return
        raise UserError(f"--y: no run has logged {key!r}{nearest(key, sorted(known))}")
    dots = [] if args.y else [run.curve("eval_loss") for run in labels]
    if args.png:
        _picture(curves, dots, key, args.png)
        print(args.png)
        return
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    width = min(100, shutil.get_terminal_size().columns) - 12
    console.print(f"\n{key.replace('_', ' ')}{', x: eval loss' if any(dots) else ''}")
    console.print(text_plot([points for _, points in curves], dots, width))
    if len(curves) > 1:
        for number, (label, _) in enumerate(curves):
            console.print(f"━━ {label}", style=COLORS[number % len(COLORS)])


def text_plot(
    curves: Sequence[Sequence[tuple[float, float]]],
    dots: Sequence[Sequence[tuple[float, float]]],
    width: int,
    height: int = 16,
) -> Any:
    """Curves in Braille, two by four dots a cell, in a colour each; `dots` are single crosses."""
    from rich.text import Text

    points = [point for curve in (*curves, *dots) for point in curve]
    (left, right), (low, high) = ((min(axis), max(axis)) for axis in zip(*points, strict=True))
    across, up = (right - left) or 1, (high - low) or 1
    cells: dict[tuple[int, int], tuple[str, int]] = {}

    def place(x: float, y: float) -> tuple[int, int]:
        return (
            round((x - left) / across * (2 * width - 1)),
            round((high - y) / up * (4 * height - 1)),
        )

    for number, curve in enumerate(curves):
        spots = [place(*point) for point in curve]
        for (x0, y0), (x1, y1) in zip(spots, spots[1:] or spots, strict=True):
            parts = max(abs(x1 - x0), abs(y1 - y0), 1)
            for part in range(parts + 1):
                x, y = round(x0 + (x1 - x0) * part / parts), round(y0 + (y1 - y0) * part / parts)
                cell = y // 4, x // 2
                bit = (0x40, 0x80)[x % 2] if y % 4 == 3 else 1 << (y % 4 + 3 * (x % 2))
                before = ord(cells[cell][0]) if cell in cells else 0x2800
                cells[cell] = chr(before | bit), number
    for number, few in enumerate(dots):
        for x, y in (place(*point) for point in few):
            cells[y // 4, x // 2] = "x", number
    text = Text(no_wrap=True)
    for row in range(height):
        at = {0: high, height // 2: (low + high) / 2, height - 1: low}.get(row)
        text.append(f"{'' if at is None else f'{at:.4g}':>8} │")
        for column in range(width):
            character, number = cells.get((row, column), (" ", 0))
            text.append(character, COLORS[number % len(COLORS)])
        text.append("\n")
    text.append(f"{'':>8} └{'─' * width}\n{'':10}step {left:g}")
    text.append(f"{right:g}".rjust(width - len(f"step {left:g}")))
    return text


def _picture(
    curves: Sequence[tuple[str, Sequence[tuple[float, float]]]],
    dots: Sequence[Sequence[tuple[float, float]]],
    key: str,
    file: Path,
) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("--png needs matplotlib; pip install matplotlib") from None
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for number, (label, points) in enumerate(curves):
        axes.plot(*zip(*points, strict=True), label=label, color=f"C{number % 10}")
    for number, points in enumerate(filter(None, dots)):
        axes.plot(*zip(*points, strict=True), "x", color=f"C{number % 10}")
    axes.set(xlabel="step", ylabel=key.replace("_", " "))
    axes.legend(title="x: eval loss" if any(dots) else None, fontsize="small")
    try:
        figure.savefig(file, dpi=200, format=file.suffix[1:] or "png")
    except ValueError as error:  # a kind of file that it does not know
        raise UserError(f"--png: {error}") from None
