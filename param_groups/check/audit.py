"""Which rule do the numbers of anybody's optimiser follow, tensor by tensor?

    param-groups audit FILE.py                      build(width) -> (model, optimizer)
    param-groups audit FILE.py --depths 2 4 8       build(width, depth), at the first width
    param-groups audit FILE.py --step               takes one step, too, and compares its size
    param-groups audit FILE.py --save numbers.json  what it reads, for later
    param-groups audit FILE.py --against numbers.json   for CI: any change is a line and exit code 1

`build` makes a freshly initialised model and its optimiser, or a list of optimisers. Initial size,
rate, epsilon and decay per step of every tensor are read at two sizes or more. Their powers of the
size are compared with those of one rate for all tensors and of the papers' rules, with all
multipliers absorbed, in the forward pass, or the readout's alone there. The nearest rule is named.
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

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from torch import nn

from param_groups.check.command import load_function
from param_groups.check.measuring import pooled
from param_groups.check.papers import ONE, PAPERS, SHIFT, Promise, over_depth
from param_groups.check.reading import SCALES, Reading, first_step, judged_steps, read
from param_groups.check.theory import PlanExponents
from param_groups.contract import OPTIMIZER_FAMILY
from param_groups.exponents import ALIGNMENTS, HALF, LAYERS, PARAMETERIZATION_TABLE, ZERO
from param_groups.plan import Plan
from param_groups.roles import Layout, PlanError, Role, fans
from param_groups.rows import Row, align

NUMBERS = ("init", "lr", "eps", "decay")
EXACT, DRAWN = 0.02, 0.1  # tolerances of a power: of numbers, of fans that a model may round
Multipliers = Mapping[str, Fraction]  # {kind: a}, a multiplier that goes as size^(-a)
Readings = Mapping[int, Mapping[str, Reading]]  # {size: what `read` gives}


@dataclass(frozen=True)
class Audit:
    """What an audit has to say: the table of powers, the nearest rule's name, deviations, what is
    not read, and remarks that count for nothing."""

    table: str
    nearest: str
    deviations: list[str]
    unread: list[str]
    remarks: list[str]


# Rules


@dataclass(frozen=True)
class Form:
    """A rule with some of its multipliers, size^(-kept), in the forward pass."""

    name: str
    rule: Promise
    kept: Multipliers


def rules(size: str, family: str) -> list[Form]:
    """The rules that are known, the plainest first."""
    return _over_width(family) if size == "width" else _over_depth(family)


def _over_width(family: str) -> list[Form]:
    zeros = dict.fromkeys(LAYERS, ZERO)
    even = Promise("", "width", family, zeros, zeros)
    drawn = replace(even, start={**zeros, "hidden": HALF, "readout": HALF})
    forms = [
        Form("one rate, one initial size", even, {}),
        Form("one rate, standard initial values", drawn, {}),
    ]
    tables = []
    for alignment in (*ALIGNMENTS, "global"):
        for name, table in PARAMETERIZATION_TABLE.items():
            a = {layer: table[layer].a for layer in LAYERS}
            start = {layer: table[layer].scale for layer in LAYERS}
            step = {layer: SHIFT[family] * a[layer] for layer in LAYERS}
            fields = {"parameterization": name, "alignment": alignment}
            rule = PAPERS["everett"](fields, "width", family)
            rule = rule or replace(even, start=start, step=step)
            tables.append(Form(f"{name}, {alignment} alignment", rule, a))
    forms += [replace(one, kept={}) for one in tables]
    forward = ", multipliers in the forward pass"
    forms += [replace(one, name=one.name + forward) for one in tables]
    # The library mup, nanoGPT-mup, Cerebras, Megatron and Granite: a = 1, b = 0, c = 0 for Adam.
    last = ", the readout's multiplier in the forward pass (as microsoft/mup)"
    mups = [one for one in tables if one.name.startswith("mup, ")]
    forms += [replace(one, name=one.name + last, kept={"readout": ONE}) for one in mups]
    if family == "adafactor":
        return forms
    for strategy in ("neural_tangent", "hybrid", "maximal_update"):
        for init in ("vit", "bart"):
            rule = PAPERS["dinan"]({"strategy": strategy, "s": None, "init": init}, "width", family)
            forms += [Form(f"dinan, {strategy}, {init}", rule, {})] if rule else []
    if rule := PAPERS["bordelon"]({"alpha_attention": 1}, "width", family):
        forms += [Form("bordelon", rule, {}), Form("bordelon" + forward, rule, rule.multiplier)]
    return forms


def _over_depth(family: str) -> list[Form]:
    forms = []
    for alpha in (HALF, ONE) if family == "sgd" else (ONE, HALF):
        power = -over_depth(alpha, family).step["hidden"]
        name = f"rates in blocks as depth^({power})" if power else "no power of the depth in rates"
        forms.append(Form(name, over_depth(alpha, family), {}))
        rule = PAPERS["bordelon"]({"alpha_depth": alpha}, "depth", family)
        if rule and power and family != "adafactor":
            name = f"rates of all tensors as depth^({power}), multipliers in the forward pass"
            forms.append(Form(name, rule, rule.multiplier))
    return forms


# A plan of what was read


def plans_of(readings: Readings, *, depth: bool) -> dict[int, Plan]:
    """Rows of the tensors that all sizes have, with the role that says which axes sum."""
    sizes = sorted(readings)
    first, last = readings[sizes[0]], readings[sizes[-1]]
    names = [n for n in first if all(n in readings[size] for size in sizes)]
    counts = [Counter(map(pooled, readings[size])) for size in (sizes[0], sizes[-1])]
    blocks = {name for name, n in counts[1].items() if n > counts[0][name]}
    kinds = Counter(r.optimizer for r in first.values() if r.optimizer in OPTIMIZER_FAMILY)
    usual = next((kind for kind, _ in kinds.most_common() if kind != "muon"), "adam")
    plans = {}
    for size in sizes:
        rows = []
        for name in names:
            one = readings[size][name]
            if depth:
                role = Role.MLP_IN if pooled(name) in blocks else Role.TOKEN_EMBEDDING
            elif len(one.shape) < 2:
                grows = last[name].shape > first[name].shape
                role = Role.HIDDEN_BIAS if grows else Role.READOUT_BIAS
            else:
                role = Role.TOKEN_EMBEDDING if one.table else Role.HIDDEN
            ins, outs = 1, (one.shape or (1,))[-1]
            if len(one.shape) > 1 and not one.table:
                layout = Layout.TRANSPOSED if one.transposed else Layout.LINEAR
                ins, outs = fans(name, one.shape, layout)
            decay = one.decay / one.lr if one.lr else 0.0
            rows.append(
                Row(
                    name=name,
                    shape=one.shape,
                    role=role,
                    fan_in=ins,
                    fan_out=outs,
                    tied_to=(),
                    init_mean=0.0,
                    init_std=one.init,
                    init_distribution="normal",
                    multiplier=1.0,
                    lr=one.lr,
                    eps=one.eps,
                    weight_decay=decay,
                    optimizer=one.optimizer.partition(" and ")[0],
                )
            )
        rule = {"depth" if depth else "width": size, "optimizer": usual}
        plans[size] = Plan(tuple(rows), rule, 1.0, 0.0, 0.0, "per_group")
    return plans


# Verdicts


def audit(readings: Readings, *, depth: bool) -> Audit:
    """The nearest rule, and what deviates from it.

    Args:
        readings: {size: `read` of the model of that size}, two sizes or more.
        depth: whether the sizes are depths; then rates of blocks and of all others have one power
            each, and initial values are not judged.
    """
    frozen = {n for found in readings.values() for n, r in found.items() if r.optimizer == "frozen"}
    readings = {
        size: {n: one for n, one in found.items() if n not in frozen}
        for size, found in readings.items()
    }
    numbers, sizes = PlanExponents(plans_of(readings, depth=depth)), sorted(readings)
    first, tensors = readings[sizes[0]], [_powers(n, numbers) for n in numbers.names]
    kinds = {one.name: one.kind for one in tensors}
    forms = rules(numbers.size, numbers.family)
    if any(one.muon for one in tensors):  # of which these papers say nothing
        forms = [one for one in forms if not one.name.startswith(("dinan", "bordelon"))]
    missed = []
    for form in forms:
        same = [one.kept for one in forms if _trains_alike(one.rule, form.rule)]
        eps = _fewest(tensors, "eps", _epsilons(form, same))
        decay = _fewest(tensors, "decay", _decays(form, same, depth))
        missed.append([*_misses(form, tensors), *eps, *decay])
    weights = [sum(9 if number == "lr" else 1 for _, number, _, _ in some) for some in missed]
    best = weights.index(min(weights))
    lines = [
        (n, f"{number} goes as size^{_text(power)}, expected size^{_text(aim)}")
        for n, number, power, aim in missed[best]
    ]
    remarks = [f"frozen, not judged: {len(frozen)} tensors"] if frozen else []
    odd, falls = _unlike(readings, kinds)
    lines += odd
    if not depth:
        everywhere = set(numbers.names)
        others = dict.fromkeys(n for found in readings.values() for n in found)
        lines += [(n, "not in the models of all sizes") for n in others if n not in everywhere]
    table = [("tensor", "kind", "optimiser", *(f"{key}^" for key in NUMBERS))]
    for n in numbers.names:
        values = {key: [getattr(readings[s][n], key) for s in sizes] for key in NUMBERS}
        cells = [_text(_power(v, sizes, 1 if k == "init" else 2)) for k, v in values.items()]
        table.append((pooled(n), kinds[n], first[n].optimizer or "none", *cells))
    return Audit(
        table=align([*dict.fromkeys(table)]),
        nearest=forms[best].name,
        deviations=_together(lines, numbers.names),
        unread=_not_read(readings, numbers),
        remarks=remarks + falls,
    )


Miss = tuple[str, str, float, float]  # (tensor, number, power, the expected one)


@dataclass(frozen=True)
class Powers:
    """A tensor's powers between neighbouring sizes; None where a number is zero at one of them.
    `noise`: how far the power of its initial size may be off by chance."""

    name: str
    kind: str
    muon: bool
    square: bool  # epsilon is added to the square of the gradient
    noise: float
    init: list[float | None]
    lr: list[float | None]
    eps: list[float | None]
    decay: list[float | None]


def _powers(name: str, numbers: PlanExponents) -> Powers:
    pairs = [numbers.powers(name, pair) for pair in numbers.pairs]
    rows = [numbers.plans[size][name] for size in numbers.sizes]
    muon, square = numbers.by_muon(name), 2 if rows[0].optimizer == "adafactor" else 1
    steps = [one.step and one.step - (muon and numbers.size != "depth") for one in pairs]
    signed = lambda values, by: [None if one is None else by * float(one) + 0.0 for one in values]
    # Of N random numbers the logarithm of their size is known within sqrt(1 / 2N).
    closest = min(large / small for small, large in numbers.pairs)
    noise = 4 / math.sqrt(min(math.prod(row.shape) for row in rows)) / math.log(closest)
    judged = len(rows[0].shape) > 1 and numbers.size != "depth"
    return Powers(
        name,
        pairs[0].kind,
        muon,
        square == 2,
        DRAWN + noise,
        init=signed([one.start for one in pairs], -1) if judged else [],
        lr=signed(steps, -1),
        eps=signed([one.epsilon for one in pairs], square),
        decay=signed([one.decay for one in pairs], 1),
    )


def _off(given: Sequence[float | None], aim: float, tolerance: float) -> float | None:
    """The power that is not the expected one, nan if there is none; None where all is well."""
    if given.count(None) == len(given):
        return None
    values = [math.nan if one is None else one for one in given]
    if all(abs(value - aim) <= tolerance for value in values):
        return None
    return values[0] if max(values) - min(values) <= 2 * tolerance else math.nan


def _trains_alike(one: Promise, other: Promise) -> bool:
    """Whether two rules are one once their multipliers are absorbed."""
    numbers = [
        [rule.start[k] for k in LAYERS] + [rule.step[k] for k in LAYERS] for rule in (one, other)
    ]
    return numbers[0] == numbers[1]


def _misses(form: Form, tensors: Sequence[Powers]) -> Iterator[Miss]:
    """Initial sizes of matrices and rates that do not follow a rule."""
    shift = SHIFT[form.rule.family]
    for one in tensors:
        kept = form.kept.get(one.kind, ZERO)
        step = form.rule.step.get(one.kind, ZERO) - shift * kept
        aim = 0.0 if one.muon else float(-step)  # the spectral norm of Muon's update stays
        if (power := _off(one.lr, aim, EXACT)) is not None:
            yield one.name, "lr", power, aim
        aim = float(kept - form.rule.start.get(one.kind, ZERO))
        power = _off(one.init, aim, one.noise)
        if power is not None and one.kind != "constant":
            yield one.name, "init", round(power, 1) + 0.0, aim


def _epsilons(form: Form, homes: Sequence[Multipliers]) -> Iterator[Callable[[Powers], Fraction]]:
    """Powers that epsilon may have: none, before multipliers were absorbed or after; or those of
    the gradient (Everett et al., section 4.3)."""
    kept = lambda one: form.kept.get(one.kind, ZERO)
    yield lambda one: ZERO
    for home in homes:
        yield lambda one, home=home: home.get(one.kind, ZERO) - kept(one)
    yield lambda one: form.rule.gradient(one.kind) - kept(one)


def _decays(
    form: Form, homes: Sequence[Multipliers], depth: bool
) -> Iterator[Callable[[Powers], float | Fraction]]:
    """Powers that the decay per step may have: none; -1/2 or -1 in what sums over the width (Fan et
    al. 2025; Qiu et al. 2025); those of the rates, of now or before they were absorbed."""
    yield lambda one: ZERO
    for power in () if depth else (-HALF, -ONE):
        yield lambda one, power=power: power if one.kind in ("hidden", "readout") else ZERO
    shift = SHIFT[form.rule.family]
    for home in (form.kept, *homes):
        moved = lambda one, home=home: home.get(one.kind, ZERO) - form.kept.get(one.kind, ZERO)
        yield lambda one, moved=moved: 0 if one.muon else (one.lr[0] or 0) + shift * moved(one)


def _fewest(
    tensors: Sequence[Powers], key: str, aims: Iterable[Callable[[Powers], float | Fraction]]
) -> list[Miss]:
    """What deviates from the powers that fit best."""
    found: list[list[Miss]] = []
    for aim in aims:
        found.append([])
        for one in tensors:
            twice = 2 if key == "eps" and one.square else 1
            power = _off(getattr(one, key), expected := float(aim(one)) * twice, EXACT)
            if power is not None:
                found[-1].append((one.name, key, power, expected))
    return min(found, key=len)


def _unlike(
    readings: Readings, kinds: Mapping[str, str]
) -> tuple[list[tuple[str, str]], list[str]]:
    """(lines of tensors in no optimiser or in several, or unlike others of their block or kind;
    remarks on rates that fall from block to block). Of one block are tensors of one name but for a
    number, one kind and one shape at every size."""
    sizes = sorted(readings)
    first, lines, falls = readings[sizes[0]], [], {}
    pools: dict[tuple[object, ...], list[str]] = {}
    for name, one in first.items():
        if not one.optimizer:
            lines.append((name, "no optimiser holds it"))
        elif " and " in one.optimizer:
            lines.append((name, f"two optimisers hold it ({one.optimizer})"))
        if not one.optimizer or name not in kinds:
            continue
        shapes = tuple(readings[size][name].shape for size in sizes)
        pools.setdefault((pooled(name), kinds[name], shapes), []).append(name)
        # Norms and biases are of one kind by shape, and trainers tell them apart by name.
        last = name.rpartition(".")[2] if len(one.shape) < 2 else one.table
        pools.setdefault((kinds[name], last), []).append(name)
        if kinds[name] in ("hidden", "readout"):
            pools.setdefault((kinds[name],), []).append(name)
    for pool, members in pools.items():
        keys = {1: ("optimizer",), 2: ("eps", "decay"), 3: ("lr", "eps", "decay")}[len(pool)]
        for key in keys:
            values = {n: getattr(first[n], key) for n in members}
            if len(pool) == 2:  # some have one, others none; by Muon and by Adam are not alike
                values = {n: "some" if value else "none" for n, value in values.items()}
                same = Counter(first[n].optimizer for n in members).most_common(1)[0][0]
                values = {n: v for n, v in values.items() if first[n].optimizer == same}
            elif key != "optimizer" and (share := _geometric([*values.values()])):
                falls[f"{key} times {share:.4g} from block to block"] = None
                continue
            common = Counter(values.values()).most_common(1)[0][0]
            for n, value in values.items():
                if value != common:
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


def _not_read(readings: Readings, numbers: PlanExponents) -> list[str]:
    """What the numbers may lack, with the tensors that it concerns."""
    found: dict[str, dict[str, None]] = {}
    for tensors in readings.values():
        for name, one in tensors.items():
            kind = one.optimizer.partition(" and ")[0]
            family = OPTIMIZER_FAMILY.get(kind, "spectral")
            mixed = f"{kind} beside {numbers.family}: rules are for one family of optimisers"
            doubts = [mixed] if family not in ("spectral", numbers.family) else []
            for doubt in (*one.unread, *doubts):
                found.setdefault(doubt, {})[name] = None
    return [
        f"{doubt} ({len(names)} tensors, such as {next(iter(names))})"
        for doubt, names in found.items()
    ]


def _together(lines: Iterable[tuple[str, str]], names: Sequence[str]) -> list[str]:
    """Lines that hold for a tensor of all blocks, once."""
    blocks = Counter(map(pooled, names))
    found = list(dict.fromkeys(lines))
    alike = Counter((pooled(name), text) for name, text in found)
    whole = [(pooled(n) if alike[pooled(n), t] == blocks[pooled(n)] else n, t) for n, t in found]
    return [f"{name}: {text}" for name, text in dict.fromkeys(whole)]


def _power(values: Sequence[float], sizes: Sequence[int], digits: int) -> float | None:
    """p in value = size^p; None for zeros, nan where it is no power between all sizes."""
    if not all(values):
        return None if not any(values) else math.nan
    pairs = zip(values, values[1:], sizes, sizes[1:], strict=False)
    steps = [math.log(large / small) / math.log(b / a) for small, large, a, b in pairs]
    straight = max(steps) - min(steps) < (0.3 if digits == 1 else 2 * EXACT)
    return round(steps[0], digits) + 0.0 if straight else math.nan


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
            for key, value in old[name].items():
                now = new[name][key]
                same = value == now
                if isinstance(value, float) and isinstance(now, float):
                    same = math.isclose(value, now, rel_tol=0.05 if key == "init" else 1e-6)
                if not same:
                    lines.append(f"{name} at {size}: {key} {_text(value)} -> {_text(now)}")
    return lines


def main(
    argv: Sequence[str], load: Callable[[Path, str, str], Callable[..., Any]] = load_function
) -> None:
    """`param-groups audit ...`; see the module for its exit codes."""
    parser = argparse.ArgumentParser(
        prog="param-groups audit",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", type=Path, help="FILE.py with build(width[, depth])")
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--depths", type=int, nargs="+", help="scan the depth at the first width")
    parser.add_argument("--step", action="store_true", help="take a step and compare its size")
    parser.add_argument("--ignore", nargs="+", default=[], metavar="KEY", help="keys of groups")
    parser.add_argument("--save", type=Path, help="write the numbers that are read")
    parser.add_argument("--against", type=Path, help="compare with saved numbers instead of rules")
    args = parser.parse_args(argv)
    build = load(args.file, f"build(width{', depth' * bool(args.depths)})", "(model, optimizer)")
    sizes = sorted(set(args.depths or args.widths))
    if len(sizes) < 2 or sizes[0] < 1:
        raise PlanError("--widths and --depths: give two different sizes or more")

    def built(size: int) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
        torch.manual_seed(0)
        pair = build(args.widths[0], size) if args.depths else build(size)
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], nn.Module)):
            raise PlanError(f"{args.file}: build returns (model, optimizer), got {pair!r:.60}")
        return pair[0], [*pair[1]] if isinstance(pair[1], (list, tuple)) else [pair[1]]

    readings: Readings = {size: read(*built(size), args.ignore) for size in sizes}
    lines: list[str] = []
    if args.step:
        steps = {(size, s): first_step(*built(size), s) for size in sizes for s in SCALES}
        readings, found = judged_steps(readings, steps)
        lines = _together(found, [*readings[sizes[0]]])
    saved = {str(s): {n: asdict(r) for n, r in found.items()} for s, found in readings.items()}
    saved = json.loads(json.dumps(saved))
    if args.save:
        args.save.write_text(json.dumps(saved, indent=1) + "\n", encoding="utf-8")
    result = audit(readings, depth=bool(args.depths))
    if args.against:
        try:
            before = json.loads(args.against.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise PlanError(f"--against {args.against}: no saved numbers ({error})") from None
        lines += changes(before, saved)
        print("\n".join([*lines, f"{len(lines)} changes against {args.against}"]))
    else:
        lines += result.deviations
        print(f"{result.table}\n\nnearest rule: {result.nearest}")
        print("\n".join([*result.remarks, *(f"deviates: {line}" for line in lines)]))
        if lines or not result.unread:
            print(f"{len(lines)} deviations" if lines else "every tensor follows it")
    for line in result.unread:
        print(f"not read: {line}")
    if lines or result.unread:
        raise SystemExit(2 if result.unread else 1)
