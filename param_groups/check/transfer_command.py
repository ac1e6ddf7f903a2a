"""Does the best learning rate of your model stay as it grows?

    param-groups transfer FILE.py --widths 128 256 512 --lr 2^-9:2^-5 --steps 500 --seeds 2

FILE is that of the coordinate check: task(width, seed) returns a param_groups.check.Check with
model, plan, batches and loss. Every width is trained over a grid of rates (factors of 2, or
--lr LOW:HIGH:OCTAVES), which grows where the best rate is at an edge. `--lr` is the plan's global
rate; all tensors keep the plan's ratios and its decay. With plan=None and an optimizer it is the
largest rate of the groups at the smallest width, to which all rates at all widths keep their ratio;
initial values are then the model's own. --fresh further seeds judge the best rates. The loss of a
run is the mean of its last tenth of steps, so batches should not repeat.

Runs are kept in OUT/runs.jsonl as they end: the same command goes on where it was stopped. Writes
transfer.csv, transfer.json and, with matplotlib, transfer.png. Exit code: 0 the best rate stays,
1 it moves, 2 undecided, or a mistake of yours.
"""

import argparse
import hashlib
import itertools
import json
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from param_groups.check import command, transfer
from param_groups.check.judging import judge_optimizers
from param_groups.check.measuring import Check, begun
from param_groups.check.reading import read
from param_groups.check.transfer import MOVES, STAYS, Answer, Grid, Run
from param_groups.check.written import results_in, write, write_table
from param_groups.exit_code import Verdict
from param_groups.roles import PlanError, choose
from param_groups.rows import align
from param_groups.schedules import SHAPES, factor

POINTS = 40  # of a kept loss curve, each the mean of as many steps as the others
EXIT = {STAYS: 0, MOVES: 1}


def main(argv: Sequence[str]) -> None:
    """`param-groups transfer ...`; see the module for its exit codes."""
    parser = command.parser_of("param-groups transfer", __doc__)
    add = parser.add_argument
    add("file", type=Path, metavar="FILE.py")
    add("--widths", type=int, nargs="+", required=True, help="two or more, the first is the base")
    add("--lr", required=True, metavar="LOW:HIGH[:OCTAVES]", help="the grid, such as 2^-9:2^-5")
    add("--steps", type=int, default=500, help="optimiser steps of a run (default 500)")
    add("--seeds", type=int, default=2, help="that choose the best rates (default 2)")
    add("--fresh", type=int, default=2, help="further ones that judge them (default 2)")
    add("--schedule", default="cosine", help=f"{', '.join(SHAPES)} (default cosine)")
    add("--warmup", type=float, default=0.1, help="its share of the steps (default 0.1)")
    add("--effect", type=float, default=transfer.EFFECT, help="power at which words part (1/4)")
    add("--workers", type=int, help="runs side by side (default: one per core, one on a GPU)")
    add("--out", type=Path, help="folder of the results (default transfer/NAME)")
    args = parser.parse_args(argv)
    grid = _grid(args)
    command.task_of(args.file)  # a mistake in the file, before processes start
    out: Path = args.out or Path("transfer") / args.file.stem
    settings = {
        "file": _digest(args.file),
        "widths": sorted(args.widths)[:2],  # of the global rate, and of a trace
        **{key: getattr(args, key) for key in ("steps", "schedule", "warmup")},
    }
    with results_in(out):
        curves = Runs(out, settings)
        _train_all(args, grid, curves)
    answer = transfer.answer(grid, curves.losses, args.effect)
    collapse = _collapse(grid, answer, curves)
    places = _write(out, grid, settings, answer, collapse, curves)
    print("\n".join(["", table(answer), "", summary(answer, collapse), *places]))
    raise Verdict(EXIT.get(answer.verdict, 2))


def _digest(file: Path) -> str:
    """A hash of FILE and of the modules beside it and below that have been imported for it."""
    folder = file.resolve().parent
    places = [Path(getattr(module, "__file__", None) or "") for module in [*sys.modules.values()]]
    paths = {place.resolve() for place in (file, *places) if place.is_file()}
    beside = {p.relative_to(folder): p for p in paths if p.is_relative_to(folder)}
    digest = hashlib.sha256()
    for name, path in sorted(beside.items()):
        if "site-packages" not in name.parts:  # of an environment there
            digest.update(f"{name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()


def _grid(args: argparse.Namespace) -> Grid:
    """The grid that the options ask for; PlanError for one that cannot be trained."""
    choose("schedule", args.schedule, SHAPES)
    if len(set(args.widths)) < max(2, len(args.widths)) or min(args.widths) < 1:
        raise PlanError("--widths: give two or more different widths, such as 128 256 512")
    if args.steps < POINTS:
        raise PlanError(f"--steps {args.steps}: expected at least {POINTS}")
    if args.seeds < 1 or args.fresh < 0 or (args.workers is not None and args.workers < 1):
        raise PlanError("--seeds and --workers: at least 1; --fresh: at least 0")
    if not 0 <= args.warmup < 1 or not 0 < args.effect < math.inf:
        raise PlanError("--warmup is a share in [0, 1), --effect a power above 0")
    low, high, *rest = args.lr.split(":") if args.lr.count(":") in (1, 2) else ("", "")
    try:
        first, last, step = _octave(low), _octave(high), float(*rest) if rest else 1.0
    except ValueError:
        raise PlanError(f"--lr {args.lr}: expected LOW:HIGH, such as 2^-9:2^-5") from None
    count = (last - first) / step if step > 0 else -1.0
    if count < 2 - 1e-9:
        raise PlanError(f"--lr {args.lr}: expected three rates or more, from low to high")
    octaves = tuple(first + step * i for i in range(math.floor(count + 1e-9) + 1))
    seeds = tuple(range(args.seeds)), tuple(range(args.seeds, args.seeds + args.fresh))
    return Grid(tuple(sorted(args.widths)), octaves, step, *seeds)


def _octave(text: str) -> float:
    """log2 of a rate, a number or 2^x."""
    base, power, exponent = text.partition("^")
    return float(exponent) if power and float(base) == 2 else math.log2(float(text))


# Runs


class Runs:
    """Finished runs of one folder, by what was run; a line of runs.jsonl each.

    Raises PlanError for a folder with runs of another file or other settings, or with a line that
    is no run.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self.curves: dict[Run, list[float]] = {}
        self.path, self.head = folder / "runs.jsonl", json.dumps(settings)
        if self.path.exists():
            text = self.path.read_text(encoding="utf-8", errors="replace")  # judged line by line
            head, *lines = text.split("\n")
            if head != self.head:
                raise PlanError(
                    f"{self.path}: its runs are of another file or of other settings, such as the "
                    "smallest widths; give another --out, or delete the folder"
                )
            # What comes after the last line end was cut off by a stop.
            for number, line in enumerate(lines[:-1], 2):
                try:
                    width, octave, seed, curve = json.loads(line)
                    losses = zip(curve, range(POINTS + 1), strict=True)
                    self.curves[Run(width, octave, seed)] = [float(value) for value, _ in losses]
                except (ValueError, TypeError, RecursionError):
                    raise PlanError(
                        f"{self.path}, line {number}: expected a run, [width, log2 of the rate, "
                        "seed, losses]; delete the line, and the run is trained again"
                    ) from None
            write(self.path, "\n".join([self.head, *lines[:-1], ""]))

    def keep(self, run: Run, curve: list[float]) -> None:
        """Writes a finished run down."""
        adds = self.path.exists()
        head = "" if adds else f"{self.head}\n"
        write(self.path, f"{head}{json.dumps([*run, curve])}\n", adds)
        self.curves[run] = curve

    @property
    def losses(self) -> dict[Run, float]:
        """Run -> its loss, infinite where it diverged."""
        return {run: curve[-1] for run, curve in self.curves.items()}


def _train_all(args: argparse.Namespace, grid: Grid, curves: Runs) -> None:
    """Trains what is wanted until nothing is, with a line of progress on stderr."""
    cores = os.cpu_count() or 1
    workers = args.workers or (1 if torch.cuda.is_available() else cores)
    threads = max(1, cores // workers)
    began, done = time.monotonic(), 0
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        try:
            while runs := transfer.wanted(grid, curves.losses):
                jobs = {pool.submit(train, args, run, threads): run for run in runs}
                for future in as_completed(jobs):
                    curves.keep(jobs[future], _result(future, args.file, jobs[future]))
                    done += 1
                    left = len(jobs) - sum(run in curves.curves for run in runs)
                    seconds = (time.monotonic() - began) / done * left
                    _progress(len(curves.curves), len(curves.curves) + left, seconds)
        except BaseException as stop:
            pool.shutdown(wait=False, cancel_futures=True)
            if isinstance(stop, KeyboardInterrupt):
                kept = f"{len(curves.curves)} runs are kept; the same command goes on"
                raise PlanError(f"stopped: {kept}") from None
            raise


def _result(future: Future[list[float]], file: Path, run: Run) -> list[float]:
    """What a run returned; PlanError with what stopped it."""
    try:
        return future.result()
    except PlanError:
        raise
    except BrokenProcessPool:
        raise PlanError(
            f"{file}: a process that trains has ended without a word (memory, or the file exits); "
            "finished runs are kept, the same command goes on"
        ) from None
    except Exception as error:
        where = f"task({run.width}, {run.seed}) at rate {2**run.octave:.3g}"
        raise PlanError(f"{file}: {where}: {type(error).__name__}: {error}") from error


def _progress(done: int, whole: int, seconds: float) -> None:
    """How far the runs are that are known to be wanted."""
    filled = round(20 * done / whole)
    bar = f"[{'#' * filled}{'-' * (20 - filled)}] {done}/{whole} runs, {seconds / 60:.1f} min left"
    terminal = sys.stderr.isatty()
    if terminal or done == whole or done % 10 == 0:
        print(f"\r{bar}  " if terminal else bar, end="" if terminal else "\n", file=sys.stderr)


def train(args: argparse.Namespace, run: Run, threads: int) -> list[float]:
    """Trains one run; the loss in POINTS equal parts of it, then that of its last tenth.

    A run whose loss is not finite ends there, and all later losses are infinite.
    """
    torch.set_num_threads(threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    task = command.Ruled(command.task_of(args.file), args.widths)

    def built(width: int) -> Check:  # with initial values and dropout that follow the seed
        torch.manual_seed(run.seed)
        check = task(width, run.seed)
        if check.plan is None and check.optimizer is None:
            raise PlanError(f"{args.file}: the check has neither a plan nor an optimizer")
        if check.plan is not None and check.optimizer is not None:  # whose global rate `--lr` is
            held = {width: read(check.model, [check.optimizer], now=True)}
            for one in judge_optimizers({width: check.plan}, held, factor=1.0):
                raise PlanError(
                    f"{args.file}: {one.name}: {one.quantity} is {one.note}; build the optimizer "
                    "over plan.groups(model)"
                )
        return check

    smallest = min(args.widths)
    base = built(smallest) if run.width != smallest else None
    check = built(run.width)  # the last, as it leaves the generator where the seed puts it
    model = check.model.to(device)
    optimizer = begun(check, run.seed, decays=True)
    set_rate(optimizer, check, 2.0**run.octave / global_rate(base or check))
    peaks = [group["lr"] for group in optimizer.param_groups]
    warmup = round(args.warmup * args.steps)
    losses: list[float] = []
    model.train()
    for step in range(args.steps):
        # The first update has the rate of step 1: one at rate 0 would train nothing.
        part = factor(args.schedule, step + 1, warmup_steps=warmup, total_steps=args.steps + 1)
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * part
        batch = check.batches[step % len(check.batches)]
        optimizer.zero_grad()
        loss = check.loss(model, tree_map_only(torch.Tensor, lambda t: t.to(device), batch))
        losses.append(float(loss.detach()))
        if not math.isfinite(losses[-1]):
            return [math.inf] * (POINTS + 1)
        torch.autograd.backward(loss)
        if check.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), check.clip_norm)
        optimizer.step()
    edges = [round(len(losses) * i / POINTS) for i in range(POINTS + 1)]
    parts = [losses[a:b] for a, b in itertools.pairwise(edges)]
    return [sum(part) / len(part) for part in (*parts, losses[-max(1, len(losses) // 10) :])]


def global_rate(base: Check) -> float:
    """The rate that `--lr` stands for: the plan's, or an optimizer's largest at the base width."""
    rates = [base.plan.lr] if base.plan is not None else []
    if not rates and base.optimizer is not None:
        rates = [float(group["lr"]) for group in base.optimizer.param_groups]
    if not max(rates) > 0:
        raise PlanError("the check's rates are 0, so that they have no ratios to keep")
    return max(rates)


def set_rate(optimizer: torch.optim.Optimizer, check: Check, ratio: float) -> None:
    """Multiplies the global rate; every tensor keeps its own ratio and its meaning of decay."""
    for group in optimizer.param_groups:
        group["lr"] *= ratio
        if check.plan is not None and check.plan.decay_mode == "independent":
            group["weight_decay"] = group.get("weight_decay", 0.0) / ratio  # a share per step


# What is said


def table(answer: Answer) -> str:
    """A line per width."""
    base = answer.at[0].width
    lines = [("width", "best lr", "loss", f"at {base}'s lr", "price")]
    for one in answer.at:
        if one.best is None:
            lines.append((str(one.width), "every run diverged", "-", "-", "-"))
            continue
        error = f" ± {one.best.error:.2f}" if math.isfinite(one.best.error) else ""
        place = " (at the edge)" if one.best.at_edge else error
        price = f"{one.price:+.4f}" + (f" ± {one.error:.4f}" if math.isfinite(one.error) else "")
        cells = (f"2^{math.log2(one.best.value):.2f}{place}", f"{one.lowest:.4f}")
        at_base = f"{one.at_base:.4f}"
        lines.append((str(one.width), *cells, at_base, "0" if one.width == base else price))
    return align(lines)


def summary(answer: Answer, collapse: tuple[float, float] | None) -> str:
    """The power, what the base's rate costs, whether curves agree, the verdict."""
    lines = []
    if answer.power is not None:
        error = f"95 % ± {answer.reach:.2f}" if math.isfinite(answer.reach) else "error unknown"
        lines.append(f"best rate goes as width^({answer.power.exponent:+.2f}) ({error})")
    if collapse is not None:
        seeds = "?" if math.isnan(collapse[1]) else f"{collapse[1]:.4f}"
        lines.append(f"loss curves of one scale differ by {collapse[0]:.4f} (seeds alone: {seeds})")
    advice = f": {answer.advice}" if answer.advice else ""
    return "\n".join([*lines, f"verdict: {answer.verdict}{advice}"])


def _collapse(grid: Grid, answer: Answer, runs: Runs) -> tuple[float, float] | None:
    """`transfer.collapse` of the curves at every width's best grid rate; None where one is lost."""
    curves = {}
    for one in answer.at:
        of = [runs.curves.get(Run(one.width, one.octave, seed), [math.inf]) for seed in grid.seeds]
        if not all(math.isfinite(value) for curve in of for value in curve):
            return None
        curves[one.width] = [curve[:-1] for curve in of]
    return transfer.collapse(curves)


def _write(
    out: Path,
    grid: Grid,
    settings: Mapping[str, Any],
    answer: Answer,
    collapse: tuple[float, float] | None,
    runs: Runs,
) -> list[str]:
    """The runs as a table, the answer as JSON, the picture; lines with their places."""
    header = ("width", "lr", "seed", "chooses", "loss")
    rows = (
        (run.width, 2.0**run.octave, run.seed, run.seed in grid.seeds, loss)
        for run, loss in sorted(runs.losses.items())
    )
    write_table(out / "transfer.csv", header, rows)
    made = {"settings": settings, "torch": torch.__version__, "collapse": collapse}
    write(out / "transfer.json", command.as_json({**made, **asdict(answer)}))
    drawn = command.picture("draw_transfer", out / "transfer.png", answer)
    return [f"table: {out / 'transfer.csv'}", drawn]
