"""Which rule do the numbers of anybody's optimiser follow, tensor by tensor?

    param-groups audit FILE.py                      build(width) -> (model, optimizer)
    param-groups audit FILE.py                      task(width, seed) -> Check, as `check` has it
    param-groups audit FILE.py --rule mup           the rule that is meant
    param-groups audit FILE.py --depths 2 4 8       build(width, depth), at the first width
    param-groups audit FILE.py --step               takes one step, too, and compares its size
    param-groups audit FILE.py --save numbers.json  what it reads, for later
    param-groups audit FILE.py --against numbers.json   for CI: any change is a line and exit code 1

`build` makes a freshly initialised model and its optimiser, or a list of optimisers. Initial size,
rate, epsilon and decay per step of every tensor are read at two sizes or more. Their powers of the
size are compared with those of one rate for all tensors and of the papers' rules, with all
multipliers absorbed, in the forward pass, or the readout's alone there. The nearest rule is named.
Which axes a tensor sums over is guessed from its layer, and read from use where a task has a batch.
A mistake may make one rule of another. So say with `--rule` which one is meant: mup, standard, or a
whole name as it is printed, with the place of the multipliers. Without, any known rule will do.
Multipliers of the forward pass are not read, nor are initial sizes of vectors and in a scan of the
depth. Frozen tensors are left out.

A deviation is a power that is not the rule's, a tensor in no optimiser or in two, a block unlike
the others, a tensor with another optimiser, and one without decay, or alone with it, among those of
its kind. Rates that fall by one factor from block to block (layer decay) are none.

What cannot be read is no agreement. A line "not read" names the key of a group, or the optimiser,
whose meaning is not known. Factors that a loop multiplies in are read (lr_scale, lr_mult, wd_mult
and their like). `--ignore KEY` says that a key changes no rate and no decay.

`--step` gives every tensor random gradients of three scales, steps once and compares the size of
the step with what rate, shape and optimiser say. It tells what no group says: a Muon's factor of
the shape, a clip after its orthogonalisation, the factor of a convolution.

Exit code: 0 where everything follows one rule; 1 where a tensor deviates, or has changed; 2 where
something is not read, and for a mistake in the command or the file.
"""

import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from param_groups.check import nearest
from param_groups.check.command import TASK, Ruled, function_of, load_module, parser_of
from param_groups.check.measuring import begun, pooled
from param_groups.check.nearest import Readings
from param_groups.check.reading import NUMBERS, Reading, not_read, read
from param_groups.check.steps import SCALES, first_step, judged_steps
from param_groups.check.theory import PlanExponents
from param_groups.check.written import write
from param_groups.exit_code import Verdict
from param_groups.roles import Layout, PlanError
from param_groups.rows import align


@dataclass(frozen=True)
class Audit:
    """What an audit has to say: the table of powers, the nearest rule's name, deviations, what is
    not read, and remarks that count for nothing."""

    table: str
    nearest: str
    deviations: list[str]
    unread: list[str]
    remarks: list[str]


# Verdicts


def audit(readings: Readings, *, depth: bool, rule: str = "") -> Audit:
    """The nearest rule, and what deviates from it.

    Args:
        readings: {size: `read` of the model of that size}, two sizes or more.
        depth: whether the sizes are depths; then rates of blocks and of all others have one power
            each, and initial values are not judged.
        rule: the rule that is meant, by its name or the begin of it; by default any of those known.
    """
    every = [(n, r) for found in readings.values() for n, r in found.items()]
    frozen = {n for n, _ in every} - {n for n, r in every if r.optimizer != "frozen"}
    judged = {n for n, r in every if r.lr or r.unread or not r.optimizer}
    still = {n for n, _ in every} - judged - frozen
    readings = {
        size: {n: one for n, one in found.items() if n not in frozen | still}
        for size, found in readings.items()
    }
    if not all(readings.values()):
        raise PlanError("no tensor trains: all are frozen, or their rates are 0")
    numbers, sizes = PlanExponents(nearest.plans_of(readings, depth=depth)), sorted(readings)
    first = readings[sizes[0]]
    kinds = {name: numbers.powers(name).kind for name in numbers.names}
    name, missed = nearest.nearest_rule(numbers, rule)
    lines = [(miss[0], _deviation(miss, readings)) for miss in missed]
    remarks = [f"frozen, not judged: {len(frozen)} tensors"] if frozen else []
    if still:
        remarks.append(f"rate 0, not judged: {len(still)} tensors, such as {min(still)}")
    whole = max(readings.values(), key=len)  # a deeper model has blocks that the first one lacks
    if depth:
        alike = {pooled(n): kind for n, kind in kinds.items()}
        kinds |= {n: alike[pooled(n)] for n in whole if pooled(n) in alike}
    odd, falls = _unlike(whole, readings, kinds)
    alone = dict.fromkeys(n for found in readings.values() for n in found if n not in kinds)
    odd += [(n, "not in the models of all sizes") for n in alone]
    table = [("tensor", "kind", "optimiser", *(f"{key}^" for key in NUMBERS))]
    for n in numbers.names:
        cells = []
        for key in NUMBERS:
            powers = nearest.powers_of([getattr(readings[size][n], key) for size in sizes], sizes)
            power = nearest.one_power(powers, 0.15 if key == "init" else nearest.EXACT)
            cells.append(_text(power and round(power, 1 if key == "init" else 2) + 0.0))
        table.append((pooled(n), kinds[n], first[n].optimizer or "none", *cells))
    deviations = _together(lines, numbers.names) + _together(odd, [*whole])
    unread = not_read(readings, numbers.family)
    return Audit(align([*dict.fromkeys(table)]), name, deviations, unread, remarks + falls)


def _deviation(miss: nearest.Miss, readings: Readings) -> str:
    """How a number of a tensor deviates, in words."""
    name, number, power, aim = miss
    zero = [size for size, found in readings.items() if not vars(found[name])[number]]
    if math.isnan(power) and zero:
        frozen = readings[zero[0]][name].optimizer == "frozen"
        what = "frozen" if frozen else f"{number} is 0"
        return f"{what} at {', '.join(map(str, zero))} alone"
    goes = "has no power of the size" if math.isnan(power) else f"goes as size^{_text(power)}"
    return f"{number} {goes}, expected size^{_text(aim)}"


def _unlike(
    model: Mapping[str, Reading], readings: Readings, kinds: Mapping[str, str]
) -> tuple[list[tuple[str, str]], list[str]]:
    """(lines of tensors in no optimiser or in several, or unlike others of their block or kind;
    remarks on rates that fall from block to block). Of one block are tensors of one name but for a
    number, one kind and one shape at every size."""
    lines = []
    falls: dict[str, None] = {}
    pools: dict[tuple[object, ...], list[str]] = {}
    for name, one in model.items():
        if not one.optimizer:
            lines.append((name, "no optimiser holds it"))
        elif " and " in one.optimizer:
            lines.append((name, f"two optimisers hold it ({one.optimizer})"))
        if not one.optimizer or name not in kinds:
            continue
        kind = kinds[name]
        shapes = dict.fromkeys(found[name].shape for found in readings.values() if name in found)
        pools.setdefault((pooled(name), kind, tuple(shapes)), []).append(name)
        # Norms and biases are of one kind by shape, and trainers tell them apart by name.
        last = name.rpartition(".")[2] if len(one.shape) < 2 else one.layout == Layout.TABLE
        pools.setdefault((kind, last), []).append(name)
        if kind in ("hidden", "readout") and len(one.shape) > 1:  # not a block's vectors
            pools.setdefault((kind,), []).append(name)
    seen = set()
    for pool, members in sorted(pools.items(), key=lambda one: len(one[0])):
        keys = {1: ("optimizer",), 2: ("eps", "decay"), 3: ("lr", "eps", "decay")}[len(pool)]
        for key in keys:
            values = {n: getattr(model[n], key) for n in members}
            if len(pool) == 2:  # some have one, others none; by Muon and by Adam are not alike
                values = {n: "some" if value else "none" for n, value in values.items()}
                same = Counter(model[n].optimizer for n in members).most_common(1)[0][0]
                values = {n: v for n, v in values.items() if model[n].optimizer == same}
            elif any((n, key) in seen for n in members):
                continue
            elif key != "optimizer" and (share := _geometric([*values.values()])):
                falls[f"{key} times {share:.4g} from block to block"] = None
                continue
            common = Counter(values.values()).most_common(1)[0][0]
            for n, value in values.items():
                if value != common:
                    seen.add((n, key))
                    text = f"{key} {_text(value)}, where similar tensors have {_text(common)}"
                    lines.append((n, text))
    return lines, [f"{line} (layer decay)" for line in falls]


def _geometric(values: Sequence[float]) -> float | None:
    """The one factor between three numbers or more; None if it is 1 or there is none."""
    if len(values) < 3 or not all(values):
        return None
    shares = [b / a for a, b in itertools.pairwise(values)]
    even = max(shares) - min(shares) < 1e-6 * shares[0]
    return shares[0] if even and abs(shares[0] - 1) > 1e-6 else None


def _together(lines: Iterable[tuple[str, str]], names: Sequence[str]) -> list[str]:
    """Lines that hold for a tensor of all blocks, once."""
    blocks = Counter(map(pooled, names))
    found = list(dict.fromkeys(lines))
    alike = Counter((pooled(name), text) for name, text in found)
    whole = [(pooled(n) if alike[pooled(n), t] == blocks[pooled(n)] else n, t) for n, t in found]
    return [f"{name}: {text}" for name, text in dict.fromkeys(whole)]


def _text(value: object) -> str:
    if isinstance(value, (float, Fraction)):
        return "no power" if math.isnan(value) else f"{float(value):.4g}"
    return "-" if value is None else str(value)


# Command


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """What differs between two saved readings, a line each; initial sizes within a twentieth."""
    lines = []
    for size in [*dict.fromkeys([*before, *after])]:
        old, new = before.get(size, {}), after.get(size, {})
        for name in dict.fromkeys([*old, *new]):
            if name not in old or name not in new:
                lines.append(f"{name} at {size}: {'added' if name in new else 'gone'}")
                continue
            for key in dict.fromkeys([*old[name], *new[name]]):
                value, now = old[name].get(key), new[name].get(key)
                same = value == now
                if isinstance(value, float) and isinstance(now, float):
                    same = math.isclose(value, now, rel_tol=0.05 if key == "init" else 1e-6)
                if not same:
                    lines.append(f"{name} at {size}: {key} {_text(value)} -> {_text(now)}")
    return lines


def _nested(value: object, depth: int) -> bool:
    """Whether a value is a dict of dicts, so many deep."""
    inside = isinstance(value, dict) and [*value.values()]
    return inside is not False and (depth == 1 or all(_nested(one, depth - 1) for one in inside))


def main(argv: Sequence[str]) -> None:
    """`param-groups audit ...`; see the module for its exit codes."""
    parser = parser_of("param-groups audit", __doc__)
    add = parser.add_argument
    add("file", type=Path, help="FILE.py with build(width[, depth])")
    add("--widths", type=int, nargs="+", default=[64, 128, 256])
    add("--depths", type=int, nargs="+", help="scan the depth at the first width")
    add("--rule", default="", metavar="NAME", help="that is meant, such as mup")
    add("--step", action="store_true", help="take a step and compare its size")
    add("--ignore", nargs="+", default=[], metavar="KEY", help="keys of groups")
    add("--save", type=Path, help="write the numbers that are read")
    add("--against", type=Path, help="compare with saved numbers instead of rules")
    args = parser.parse_args(argv)
    sizes = sorted(set(args.depths or args.widths))
    if len(sizes) < 2 or sizes[0] < 1:
        raise PlanError("--widths and --depths: give two different sizes or more")
    signature = f"build(width{', depth' * bool(args.depths)})", "(model, optimizer)"
    module = load_module(args.file)
    layouts: dict[str, Layout] = {}  # of a trace, from use
    build: Callable[..., Any]
    if hasattr(module, "task") and not (hasattr(module, "build") or args.depths):
        task = Ruled(function_of(module, args.file, *TASK), args.widths)
        layouts = {r.name: Layout(r.layout) for r in task.trace().readings if r.layout}

        def build(width: int, *_: int) -> tuple[nn.Module, torch.optim.Optimizer]:
            check = task(width, 0)
            return check.model, begun(check, 0, decays=True)  # as its plan draws it
    else:
        build = function_of(module, args.file, *signature)

    def built(size: int) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
        torch.manual_seed(0)
        pair = build(args.widths[0], size) if args.depths else build(size)
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], nn.Module)):
            raise PlanError(
                f"{args.file}: build returns (model, optimizer), got {type(pair).__name__}"
            )
        lazy = [n for n, p in pair[0].named_parameters() if isinstance(p, UninitializedParameter)]
        if lazy:
            raise PlanError(f"{lazy[0]!r} has no shape yet (lazy); run a batch through it first")
        found = [*pair[1]] if isinstance(pair[1], (list, tuple)) else [pair[1]]
        for optimizer in found:
            groups = getattr(optimizer, "param_groups", None) or [()]
            if not all(isinstance(group, dict) and "params" in group for group in groups):
                kind = type(optimizer).__name__
                raise PlanError(f"{args.file}: {kind} is no optimiser: no param_groups")
        return pair[0], found

    readings: Readings = {
        size: {
            name: replace(one, layout=layouts[name]) if name in layouts and one.shape[1:] else one
            for name, one in read(*built(size), args.ignore).items()
        }
        for size in sizes
    }
    lines: list[str] = []
    if args.step:
        steps = {(size, s): first_step(*built(size), s) for size in sizes for s in SCALES}
        readings, found = judged_steps(readings, steps)
        lines = _together(found, [*readings[sizes[0]]])
    saved = {str(s): {n: asdict(r) for n, r in found.items()} for s, found in readings.items()}
    saved = json.loads(json.dumps(saved))
    if args.save:
        write(args.save, json.dumps(saved, indent=1) + "\n")
    result = audit(readings, depth=bool(args.depths), rule=args.rule)
    if args.against:
        try:
            before = json.loads(args.against.read_text(encoding="utf-8"))
            if not _nested(before, 3):
                raise ValueError("expected {size: {tensor: {number: value}}}, as --save writes it")
        except (OSError, ValueError, RecursionError) as error:
            raise PlanError(f"--against {args.against}: no saved numbers ({error})") from None
        lines += changes(before, saved)
        print("\n".join([*lines, f"{len(lines)} changes against {args.against}"]))
    else:
        lines += result.deviations
        print(f"{result.table}\n\nnearest rule: {result.nearest}")
        for line in [*result.remarks, *(f"deviates: {line}" for line in lines)]:
            print(line)
        if lines or not result.unread:
            meant = "; whether it is the rule you mean is not judged: --rule NAME"
            whole = "every tensor follows it" + ("" if args.rule else meant)
            print(f"{len(lines)} deviations" if lines else whole)
    for line in result.unread:
        print(f"not read: {line}")
    if lines or result.unread:
        raise Verdict(2 if result.unread else 1)
