"""Which rule do the numbers of anybody's optimiser follow, tensor by tensor?

    param-groups audit FILE.py                      build(width) -> (model, optimizer)
    param-groups audit FILE.py --depths 2 4 8       build(width, depth), at the first width
    param-groups audit FILE.py --save numbers.json  what it reads, for later
    param-groups audit FILE.py --against numbers.json   for CI: any change is a line and exit code 1

`build` makes a freshly initialised model and its optimiser, or a list of optimisers. Initial size,
rate, epsilon and decay per step of every tensor are read at two sizes or more; their powers of the
size are compared with those of one rate for all tensors and of Everett et al., Table 1, in both
forms of multipliers, and the nearest rule is named. Multipliers of the forward pass are not read.

Exit code: 0 where everything follows one rule, 1 where a tensor deviates (or has changed), 2 for a
mistake in the command or the file. Deviations are also a tensor in no optimiser or in two, a block
unlike the others, and a hidden matrix with another optimiser than the rest.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from param_groups.check.command import load_function
from param_groups.families import OPTIMIZER_FAMILY, SHIFT
from param_groups.roles import PlanError
from param_groups.rows import align
from param_groups.rules import exponents
from param_groups.rules.wrappers import MUON_CONVENTIONS

NUMBERS = ("init", "lr", "eps", "decay")
EXACT, DRAWN = 0.02, 0.15  # tolerances of a power: of numbers, of the size of random tensors
# torch.optim.Muon multiplies its rate by one of these; None is its default.
_TORCHS = {None: "original", "match_rms_adamw": "match_rms", "spectral_unclamped": "spectral"}


@dataclass(frozen=True)
class Reading:
    """What one tensor of one model has; `init` is the root mean square of its values, `decay` the
    fraction that a step removes, `optimizer` "" where none holds the tensor."""

    shape: tuple[int, ...]
    table: bool  # rows of an embedding
    optimizer: str
    init: float
    lr: float
    eps: float
    decay: float


def read(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Reading]:
    """The numbers of every tensor of a model, by name."""
    held: dict[int, list[tuple[str, dict[str, Any]]]] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for param in group["params"]:
                held.setdefault(id(param), []).append((_kind(optimizer, group), group))
    readings = {}
    for name, param in model.named_parameters():
        owners = held.get(id(param), [])
        group = owners[0][1] if owners else {"lr": 0.0}
        lr = float(group["lr"]) * _shape_factor(optimizers, group, param)
        eps = group.get("eps", 0.0)
        readings[name] = Reading(
            shape=tuple(param.shape),
            table=isinstance(model.get_submodule(name.rpartition(".")[0]), nn.Embedding),
            optimizer=" and ".join(kind for kind, _ in owners),
            init=float(param.detach().double().square().mean().sqrt()),
            lr=lr,
            eps=float(eps if isinstance(eps, (int, float)) else 0.0),
            decay=float(group["lr"]) * float(group.get("weight_decay", 0.0)),
        )
    return readings


def _kind(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> str:
    """The group's own word for its rule (a plan's, Dion's, nanochat's, Muon's), or the class."""
    word = next((group[key] for key in ("optimizer", "algorithm", "kind") if key in group), None)
    if word is None and "use_muon" in group:
        word = "muon" if group["use_muon"] else "adam"
    name = str(word or type(optimizer).__name__).lower()
    if name in OPTIMIZER_FAMILY:
        return name
    return next((kind for kind in ("muon", "adafactor", "adam", "sgd") if kind in name), name)


def _shape_factor(
    optimizers: Sequence[torch.optim.Optimizer], group: Mapping[str, Any], param: torch.Tensor
) -> float:
    """What torch.optim.Muon multiplies a rate by; 1 for all others."""
    owner = next((o for o in optimizers if any(g is group for g in o.param_groups)), None)
    if type(owner).__name__ != "Muon" or not type(owner).__module__.startswith("torch.optim"):
        return 1.0
    rows, columns = param.shape
    return MUON_CONVENTIONS[_TORCHS[group.get("adjust_lr_fn")]](columns, rows)


# Rules


def kind_of(name: str, small: Reading, large: Reading) -> str:
    """The layer type, from the axes that grow; bare rows of tokens or positions are embeddings."""
    grows = [b > a for a, b in zip(small.shape, large.shape, strict=True)]
    if len(grows) < 2:
        return "vector" if any(grows) else "constant"
    if sum(grows) != 1:
        return "hidden" if any(grows) else "constant"
    rows = small.table or (grows[-1] and "weight" not in name)
    return "readout" if any(grows[1:]) and not rows else "embedding"  # (out, in, ...)


def rules(family: str) -> dict[str, dict[str, tuple[float, float]]]:
    """Powers of the width in (init, rate) of each layer type, by rule, the plainest first."""
    plain = {"one rate, one initial size": dict.fromkeys(exponents.LAYERS, (0.0, 0.0))}
    starts = dict(zip(exponents.LAYERS, (0.0, -0.5, -0.5), strict=True))
    plain["one rate, standard initial values"] = {k: (std, 0.0) for k, std in starts.items()}
    shift = SHIFT[family]
    for form in ("", ", multipliers in the forward pass"):
        for alignment, aligned in exponents.ALIGNMENTS.items():
            for name, table in exponents.PARAMETERIZATION_TABLE.items():
                c = exponents.solve(name, family, aligned).c
                plain[f"{name}, {alignment} alignment{form}"] = {
                    layer: (
                        float(-table[layer].b - (0 if form else table[layer].a)),
                        float(-c[layer] - (0 if form else shift * table[layer].a)),
                    )
                    for layer in exponents.LAYERS
                }
    return plain


_DEPTH = {
    "no power of the depth in rates": {"hidden": (0.0, 0.0), "embedding": (0.0, 0.0)},
    "rates in blocks as depth^(-1/2)": {"hidden": (0.0, -0.5), "embedding": (0.0, 0.0)},
}


def power(values: Sequence[float], sizes: Sequence[int], tolerance: float) -> float | None:
    """p in value = size^p; None for zeros, nan where it is no power between all sizes."""
    if not all(values):
        return None if not any(values) else math.nan
    steps = [
        math.log(large / small) / math.log(b / a)
        for small, large, a, b in zip(values, values[1:], sizes, sizes[1:], strict=False)
    ]
    return round(steps[0], 2) + 0.0 if max(steps) - min(steps) < 2 * tolerance else math.nan


def audit(readings: Mapping[int, Mapping[str, Reading]], *, depth: bool) -> tuple[str, list[str]]:
    """The table of powers with the nearest rule, and a line for each tensor that deviates.

    Args:
        readings: {size: `read` of the model of that size}, two sizes or more.
        depth: whether the sizes are depths; then rates of blocks and of all others have one power
            each, and initial values are not judged.
    """
    sizes = sorted(readings)
    first, last = readings[sizes[0]], readings[sizes[-1]]
    names = [name for name in first if all(name in readings[size] for size in sizes)]
    kinds = {n: kind_of(n, first[n], last[n]) for n in names}
    if depth:
        kinds = {n: "hidden" if _pooled(n) != n else "embedding" for n in names}
    powers = {
        n: {
            k: power([getattr(readings[s][n], k) for s in sizes], sizes, _tolerance(k))
            for k in NUMBERS
        }
        for n in names
    }
    for given in powers.values():  # of random tensors more digits say nothing
        given["init"] = given["init"] and round(given["init"], 1) + 0.0
    by_adam = Counter(r.optimizer for r in first.values() if r.optimizer in OPTIMIZER_FAMILY)
    family = OPTIMIZER_FAMILY[next((k for k, _ in by_adam.most_common() if k != "muon"), "adam")]

    def misses(rule: Mapping[str, tuple[float, float]]) -> list[tuple[str, str, float]]:
        """(name, number, expected power) where a tensor does not follow a rule."""
        found = []
        for n in names:
            kind = {"vector": "embedding"}.get(kinds[n], kinds[n])
            init, lr = rule.get(kind, (0.0, 0.0))
            lr = 0.0 if first[n].optimizer == "muon" else lr  # its update's spectral norm stays
            drawn = kinds[n] == kind != "constant" and not depth and powers[n]["init"] is not None
            found += [(n, "lr", lr)] if first[n].optimizer else []
            found += [(n, "init", init)] if drawn else []
        return [one for one in found if not _near(powers[one[0]][one[1]], one[2], one[1])]

    known = _DEPTH if depth else rules(family)
    nearest = min(
        known, key=lambda rule: sum(9 if m[1] == "lr" else 1 for m in misses(known[rule]))
    )
    rates = {n: powers[n]["lr"] or 0.0 for n in names if first[n].optimizer != "muon"}
    sums = {n: -0.5 for n in names if kinds[n] in ("hidden", "readout")}
    decays = [
        [(n, "decay", aim.get(n, 0.0)) for n in names if powers[n]["decay"] is not None]
        for aim in ({}, sums, rates)
    ]
    missed = [
        [one for one in d if not _near(powers[one[0]]["decay"], one[2], "lr")] for d in decays
    ]
    lines = [
        (n, f"{number} goes as size^{_text(powers[n][number])}, expected size^{expected:g}")
        for n, number, expected in [*misses(known[nearest]), *min(missed, key=len)]
    ]
    lines += _unlike(first, kinds, powers)
    if not depth:
        everywhere = set(names)
        others = dict.fromkeys(n for found in readings.values() for n in found)
        lines += [(n, "not in the models of all sizes") for n in others if n not in everywhere]
    table = [("tensor", "kind", "optimiser", *(f"{key}^" for key in NUMBERS))]
    for n in names:
        cells = [_text(powers[n][key]) for key in NUMBERS]
        table.append((_pooled(n), kinds[n], first[n].optimizer or "none", *cells))
    return align([*dict.fromkeys(table)]) + f"\n\nnearest rule: {nearest}", _together(lines, names)


def _near(value: float | None, expected: float, number: str) -> bool:
    return value is not None and abs(value - expected) <= _tolerance(number)


def _tolerance(number: str) -> float:
    return DRAWN if number == "init" else EXACT


def _unlike(
    readings: Mapping[str, Reading],
    kinds: Mapping[str, str],
    powers: Mapping[str, Mapping[str, float | None]],
) -> Iterator[tuple[str, str]]:
    """Tensors in no optimiser or in several, or unlike others of their kind or block."""
    for name, reading in readings.items():
        if not reading.optimizer:
            yield name, "no optimiser holds it"
        elif " and " in reading.optimizer:
            yield name, f"two optimisers hold it ({reading.optimizer})"
    pools: dict[str, list[str]] = {}
    for name in readings:
        pools.setdefault(_pooled(name), []).append(name)
        pools.setdefault(f"kind {kinds.get(name)}", []).append(name)
    for pool, members in pools.items():
        for key in ("optimizer", "eps^") if pool.startswith("kind") else ("lr", "eps", "decay"):
            if pool in ("kind vector", "kind constant", "kind embedding") and key == "optimizer":
                continue
            values = {
                n: powers[n]["eps"] if key == "eps^" else getattr(readings[n], key)
                for n in members
                if readings[n].optimizer and n in powers
            }
            common = Counter(values.values()).most_common(1)[0][0] if values else None
            for n, value in values.items():
                if value != common and {value, common} - {None}:
                    yield n, f"{key} {_text(value)}, where similar tensors have {_text(common)}"


def _together(lines: Iterable[tuple[str, str]], names: Sequence[str]) -> list[str]:
    """Lines that hold for a tensor of all blocks, once."""
    blocks = Counter(map(_pooled, names))
    found = list(dict.fromkeys(lines))
    alike = Counter((_pooled(name), text) for name, text in found)
    whole = [(_pooled(n) if alike[_pooled(n), t] == blocks[_pooled(n)] else n, t) for n, t in found]
    return [f"{name}: {text}" for name, text in dict.fromkeys(whole)]


def _pooled(name: str) -> str:
    return re.sub(r"(^|\.)\d+(?=\.)", r"\1*", name)


def _text(value: object) -> str:
    if isinstance(value, float):
        return "no power" if math.isnan(value) else f"{value:.4g}"
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
    parser.add_argument("--save", type=Path, help="write the numbers that are read")
    parser.add_argument("--against", type=Path, help="compare with saved numbers instead of rules")
    args = parser.parse_args(argv)
    build = load(args.file, f"build(width{', depth' * bool(args.depths)})", "(model, optimizer)")
    sizes = sorted(set(args.depths or args.widths))
    if len(sizes) < 2 or sizes[0] < 1:
        raise PlanError("--widths and --depths: give two different sizes or more")
    readings = {}
    for size in sizes:
        torch.manual_seed(0)
        built = build(args.widths[0], size) if args.depths else build(size)
        if not (isinstance(built, tuple) and len(built) == 2 and isinstance(built[0], nn.Module)):
            raise PlanError(f"{args.file}: build returns (model, optimizer), got {built!r:.60}")
        optimizers = built[1] if isinstance(built[1], (list, tuple)) else [built[1]]
        readings[size] = read(built[0], optimizers)
    saved = {str(s): {n: asdict(r) for n, r in found.items()} for s, found in readings.items()}
    saved = json.loads(json.dumps(saved))
    if args.save:
        args.save.write_text(json.dumps(saved, indent=1) + "\n", encoding="utf-8")
    if args.against:
        try:
            before = json.loads(args.against.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise PlanError(f"--against {args.against}: no saved numbers ({error})") from None
        lines = changes(before, saved)
        print("\n".join([*lines, f"{len(lines)} changes against {args.against}"]))
    else:
        table, lines = audit(readings, depth=bool(args.depths))
        print("\n".join([table, *(f"deviates: {line}" for line in lines)]))
        print(f"{len(lines)} deviations" if lines else "every tensor follows it")
    if lines:
        raise SystemExit(1)
