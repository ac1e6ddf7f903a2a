"""Sweep files: what they may say, and the grid of runs that they mean."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from sweeps.request import Around, FileConfig, Keys, LoadedFile, Missing, open_file
from sweeps.rules import Confirm, Coordinates, Extend, Rule, Transfer
from training import runs
from training.config import PositiveFloat, PositiveInt, Section, shifted
from training.errors import UserError
from training.settings import RunConfig

# Combinations of a grid: these open in two seconds and 120 MB. The papers' largest sweep has 784;
# more is a slip, or several files.
MOST = 10_000
Exponent = Annotated[float, Field(ge=-1000, le=1000)]  # of two, as floats have them


class Log2Range(Section):
    """Powers of two from 2^low to 2^high."""

    log2: tuple[Exponent, Exponent]
    """Lowest and highest exponent, both included."""
    step: Annotated[float, Field(ge=0.001, allow_inf_nan=False)] = 1.0
    """Distance between exponents; 0.5 is a factor sqrt(2)."""

    @model_validator(mode="after")
    def _low_comes_first(self) -> Log2Range:
        if self.log2[0] > self.log2[1]:
            raise ValueError(f"log2 {list(self.log2)}: the lowest exponent comes first")
        if len(self) > MOST:  # before any of them is made
            raise ValueError(f"log2 {list(self.log2)}: {len(self):,} values; at most {MOST:,}")
        return self

    def __len__(self) -> int:
        low, high = self.log2
        return math.floor((high - low) / self.step + 1e-9) + 1

    def values(self) -> list[float]:
        """The powers, rising."""
        return [2.0 ** (self.log2[0] + i * self.step) for i in range(len(self))]


class Multiples(Section):
    """Multiples of the best value that another sweep found."""

    around: Around
    """Where that value comes from."""
    steps: Annotated[list[Exponent], Field(min_length=1)]
    """Exponents of two to multiply it by; [-1, 0, 1] are half of it, itself and twice it."""


def _are_plain(values: list[Any]) -> list[Any]:
    if any(isinstance(value, (Mapping, list)) for value in values):
        raise PydanticCustomError(
            "plain", "expected numbers or words (what sets several keys is a curve's `set`)"
        )
    return values


Values = Annotated[list[Any], Field(min_length=1), AfterValidator(_are_plain)]


def _axis_kind(value: Any) -> str:
    """Which kind of axis a file means, so that what is wrong with it is said of that kind alone."""
    if isinstance(value, Mapping):
        return "Multiples" if {"around", "steps"} & value.keys() else "Log2Range"
    return type(value).__name__ if isinstance(value, (Log2Range, Multiples)) else "list[Any]"


Axis = Annotated[
    Annotated[Values, Tag("list[Any]")]
    | Annotated[Log2Range, Tag("Log2Range")]
    | Annotated[Multiples, Tag("Multiples")],
    Discriminator(_axis_kind),
]


class Horizon(Section):
    """A length that grows with the model, in place of training.steps."""

    tokens_per_parameter: PositiveFloat
    """Training tokens per non-embedding parameter; 20 is compute-optimal (Hoffmann et al.)."""
    warmup_fraction: Annotated[float, Field(ge=0, le=1)] | None = None
    """Warm-up as a share of the steps; by default the config's own number of steps."""

    @property
    def keys(self) -> list[str]:
        """The config keys that it decides."""
        warmup = [] if self.warmup_fraction is None else ["schedule.warmup_steps"]
        return ["training.steps", *warmup]

    def describe(self) -> str:
        """The horizon in words, as results.csv has it."""
        plural = "s" if self.tokens_per_parameter != 1 else ""
        return f"{self.tokens_per_parameter:g} token{plural} per parameter"


class Curve(Section):
    """One line of a figure: its own settings and grid."""

    set: Keys = {}
    """Config keys of this curve."""
    grid: dict[str, Axis] = {}
    """Keys to cross, added to the sweep's grid or replacing a key of it."""
    horizon: Horizon | None = None
    """Length of the runs; by default what the config says."""
    constants: bool = False
    """Take the constants that the search named in `constants` found for such a run."""
    constants_of: dict[str, Any] = {}
    """Look the constants up as if the run had these values, such as {optimizer.name: adam}."""


class MoreSeeds(Section):
    """Other seeds where the grid has certain values."""

    where: dict[str, Values]
    """Grid key -> values it applies to."""
    seeds: Annotated[list[int], Field(min_length=1)]
    """The seeds there."""


class Adjust(Section):
    """Other settings where the grid has certain values, such as a micro-batch for wide models."""

    where: dict[str, Values]
    """Grid key -> values it applies to."""
    set: Keys = {}
    """Config keys there."""
    gpus: PositiveInt | None = None
    """GPUs of those runs, where a model does not fit one."""
    processes: PositiveInt | None = None
    """Processes of those runs."""


class SweepConfig(FileConfig):
    """A sweep file."""

    grid: dict[str, Axis] = {}
    """Keys to cross in every curve."""
    constants: str | None = None
    """Search file, relative to the sweep file, whose constants curves may take."""
    constants_preset: str | None = None
    """Preset of that search; by default this sweep's own."""
    curves: Annotated[dict[str, Curve], Field(min_length=1)]
    """Curves by name."""
    seeds: Annotated[list[int], Field(min_length=1)] = [0]
    """Seeds of every point."""
    more_seeds: list[MoreSeeds] = []
    """Exceptions to `seeds`; the first that applies counts."""
    adjust: list[Adjust] = []
    """Exceptions to `set`; every one that applies counts, the last one most."""
    extend: Extend | None = None
    """Follow optima past the edge of the grid."""
    transfer: Transfer | None = None
    """Run one cell's optimum in another; needs `extend`."""
    confirm: Confirm | None = None
    """Climb to an optimum over several keys, and confirm it by its neighbours."""
    metrics: bool = False
    """Also write metrics.csv, what every run logged, for figures against steps or epochs."""
    observations: bool = False
    """Also write observations.csv, observed_kernels.csv and observed_attention.csv: what finished
    runs with training.observe_every observed."""

    @model_validator(mode="after")
    def _parts_agree(self) -> SweepConfig:
        parts = (self._rule_problems(), self._grid_problems(), self._curve_problems())
        for problem in itertools.chain(*parts):  # of later ones none is looked for
            raise ValueError(problem)
        return self

    def _rule_problems(self) -> Iterator[str]:
        if self.confirm and self.extend:
            yield "confirm and extend both follow an optimum; keep one"
        if self.transfer and not self.extend:
            yield "transfer needs extend, which says whose optimum is meant"
        seeds = {*self.seeds, *(seed for rule in self.more_seeds for seed in rule.seeds)}
        for seed in sorted(seeds & {*self.extend.seeds}) if self.extend else ():
            yield (
                f"extend.seeds: {seed} is a seed of the grid; a seed that has chosen a value "
                "cannot judge it, name others"
            )
        for key, (name, grid) in itertools.product(self.searched, self.grids.items()):
            if key not in grid:
                yield f"the rule's key {key!r} is not in the grid of {name!r}"
            for value in _axis(grid.get(key, [])):
                if type(value) not in (int, float) or value <= 0:
                    yield f"{key} {value!r} in a grid: a rule follows numbers above 0 only"

    def _grid_problems(self) -> Iterator[str]:
        """Parts of the file that name grid values which no curve has."""
        named = [("more_seeds.where", rule.where) for rule in self.more_seeds]
        named += [("adjust.where", rule.where) for rule in self.adjust]
        for place in ("source", "target") if self.transfer else ():
            values = getattr(self.transfer, place)
            for key in sorted(values.keys() & self.searched):
                yield f"transfer.{place}: {key} is what extend searches; name others"
            named.append((f"transfer.{place}", {key: [value] for key, value in values.items()}))
        for place, where in named:
            for key, wanted in where.items():
                axes = [grid[key] for grid in self.grids.values() if key in grid]
                known = list(dict.fromkeys(value for axis in axes for value in _axis(axis)))
                if any(isinstance(axis, Multiples) for axis in axes):
                    yield f"{place}: {key!r} has no fixed values; use another key"
                for value in [value for value in wanted if value not in known]:
                    yield f"{place}: {key} {value} is in no curve's grid: {known}"

    def _curve_problems(self) -> Iterator[str]:
        """Names and constants of curves that mean nothing, and keys that have two sources."""
        for name, curve in self.curves.items():
            grid = self.grids[name]
            if not re.fullmatch(r"\w[\w.-]{0,99}", name):
                yield f"curves: {name!r} names folders; expected letters, digits, _, - and . only"
            if curve.constants and self.constants is None:
                yield f"curve {name!r} takes constants; `constants` must name a search"
            # A curve's grid may cross what the sweep sets for all curves.
            parts = [("set", self.set, self.grid), (f"curves.{name}.set", curve.set, grid)]
            parts += [("adjust.set", rule.set, grid) for rule in self.adjust]
            for place, keys, crossed in parts:
                for key in sorted(crossed.keys() & keys):
                    yield f"{place}: {key} is a key of the grid, too; take it out of one"
                if "seed" in {**keys, **crossed}:
                    yield "seed goes into seeds, not into set or grid"
            lengths = curve.horizon.keys if curve.horizon else ()
            for key in sorted({**grid, **curve.set}.keys() & lengths):
                yield f"curve {name!r}: its horizon decides {key}; take that out of set or grid"

    @property
    def grids(self) -> dict[str, dict[str, Any]]:
        """The grid of every curve: the sweep's, with what the curve replaces or adds."""
        return {name: {**self.grid, **curve.grid} for name, curve in self.curves.items()}

    @property
    def searched(self) -> tuple[str, ...]:
        """The keys whose values results decide."""
        if self.confirm:
            return tuple(self.confirm.keys)
        return (self.extend.key,) if self.extend else ()


GridValues = tuple[tuple[str, Any], ...]  # by key
CellKey = tuple[str, GridValues]  # a curve and grid values


@dataclass(frozen=True)
class Point:
    """One run of a sweep: where it is in the grid and what that makes its config."""

    curve: str
    values: GridValues
    seed: int
    config: RunConfig
    run: str
    cell: CellKey = ("", ())
    """The curve and the values that the searched keys vary within."""
    place: Coordinates = ()
    """The values of the searched keys."""
    constants: bool | str = False  # of a search: True, or "near_edge" if it ended there

    @property
    def key(self) -> str:
        """What it is known by among the points of its sweep."""
        return self.run


@dataclass
class Sweep(LoadedFile):
    """A sweep file with its experiment and the points of its grid."""

    config: SweepConfig
    points: list[Point] = field(default_factory=list)
    left_out: list[Point] = field(default_factory=list)
    """Points of the grid that --where leaves out."""

    @property
    def rule(self) -> Rule | None:
        """How its cells are searched; None runs what the file names."""
        return self.config.confirm or self.config.extend

    def _adjustments(self, values: Mapping[str, Any]) -> list[Adjust]:
        return [rule for rule in self.config.adjust if _applies(rule, values)]

    def settings(self, curve: str, values: Mapping[str, Any]) -> dict[str, Any]:
        """The config keys that the sweep, a curve and its grid values set, as adjusted there."""
        settings = {**self.config.set, **self.config.curves[curve].set, **values}
        for rule in self._adjustments(values):
            settings |= rule.set
        return settings

    def point(self, curve: str, values: Mapping[str, Any], seed: int) -> Point:
        """The point at some grid values, with all that a search or the model's size decides.

        Raises UserError if they make no valid config.
        """
        rule, name = self.config.curves[curve], f"curve {curve!r}"
        # Powers of two and multiples are floats; a number of layers has to be an integer.
        whole = {k: int(v) for k, v in values.items() if isinstance(v, float) and v.is_integer()}
        settings = {**self.settings(curve, values), **whole, "seed": seed}
        taken: bool | str = rule.constants
        if rule.constants:
            try:
                like = self.keys({**settings, **rule.constants_of})
                search, preset = str(self.config.constants), self.config.constants_preset
                constants, taken = self.sources.constants(search, like, preset)
                self.refuse_overrides(constants, f"the constants of {search}")
                if crossed := sorted(constants.keys() & values.keys()):
                    raise UserError(
                        f"{self.path}, {name}: {crossed[0]} is a key of its grid and of the "
                        f"constants of {search}; take it out of the grid"
                    )
                settings |= constants
            except Missing as missing:
                self.sources.assume(missing, f"{name} is counted with the config's own constants")
        if rule.horizon:
            config = self.validated(name, {**settings, "schedule.warmup_steps": 0})
            parameters = self.experiment.parameters(config)["non_embedding"]
            tokens = rule.horizon.tokens_per_parameter * parameters
            steps = max(1, round(tokens / self.experiment.tokens_per_step(config)))
            settings["training.steps"] = steps
            if rule.horizon.warmup_fraction is not None:
                warmup = round(rule.horizon.warmup_fraction * steps)
                settings["schedule.warmup_steps"] = warmup
        config = self.validated(name, settings)
        searched = self.config.searched
        cell = curve, tuple(item for item in values.items() if item[0] not in searched)
        place = tuple(values[key] for key in searched)
        run = runs.run_id(config, curve)
        return Point(curve, tuple(values.items()), seed, config, run, cell, place, taken)

    def grid(self, curve: str) -> list[dict[str, Any]]:
        """Every combination of a curve's grid values, the last key varying fastest."""
        grid = self.config.grids[curve]
        fixed = {key: axis for key, axis in grid.items() if not isinstance(axis, Multiples)}
        combinations = grid_values(fixed, str(self.path))
        for key, axis in grid.items():
            if isinstance(axis, Multiples):
                combinations = [
                    {**values, key: value}
                    for values in combinations
                    for value in self._multiples(curve, values, key, axis)
                ]
        return [{key: values[key] for key in grid} for values in combinations]

    def _multiples(
        self, curve: str, values: Mapping[str, Any], key: str, axis: Multiples
    ) -> list[float]:
        settings = self.keys(self.settings(curve, values))
        try:
            centre = self.sources.best(axis.around, settings, key)
        except Missing as missing:
            centre = settings.get(key) or 1.0  # not in its file, or no key at all
            self.sources.assume(missing, f"curve {curve!r} is counted around {key} {centre:g}")
        return [shifted(centre, step) for step in sorted(axis.steps)]

    def is_fresh(self, point: Point) -> bool:
        """Whether a point's seed judges an optimum that it did not help to choose."""
        extend = self.config.extend
        return extend is not None and point.seed in extend.seeds

    def seeds(self, values: Mapping[str, Any]) -> list[int]:
        """The seeds at some grid values."""
        fitting = (rule.seeds for rule in self.config.more_seeds if _applies(rule, values))
        return list(dict.fromkeys(next(fitting, self.config.seeds)))

    def at(
        self, cell: CellKey, place: Coordinates, seeds: Sequence[int] | None = None
    ) -> list[Point]:
        """One point per seed at a place of a cell, by default the grid's own seeds there.

        Raises UserError if they make no valid config, or none that is meant.
        """
        curve, fixed = cell
        every = {**dict(fixed), **dict(zip(self.config.searched, place, strict=True))}
        values = {key: every[key] for key in self.config.grids[curve]}
        chosen = self.seeds(values) if seeds is None else dict.fromkeys(seeds)
        points = [self.point(curve, values, seed) for seed in chosen]
        selected = [point for point in points if self.is_meant(point.config)]
        if points and not selected:
            raise UserError(f"left out by --where {' '.join(c.text for c in self.where)}")
        return selected


def _applies(rule: MoreSeeds | Adjust, values: Mapping[str, Any]) -> bool:
    return all(values.get(key) in wanted for key, wanted in rule.where.items())


def load_sweep(
    path: Path,
    results: Path = runs.RESULTS,
    preset: str | None = None,
    *,
    curves: Sequence[str] = (),
    **options: Any,
) -> Sweep:
    """A sweep file, its experiment and its grid; UserError for anything that cannot run.

    `curves` chooses some of its curves; other options are those of `open_file`.
    """
    sweep = Sweep(**open_file(SweepConfig, path, results, preset, **options))
    config = sweep.config
    for name in curves:
        if name not in config.curves:
            names = ", ".join(config.curves)
            raise UserError(f"--curves: {path} has no curve {name!r}; it has {names}")
    sweep.refuse_overrides(["seed"], "seeds")
    sweep.refuse_overrides(config.grid, "its grid")
    for rule in config.adjust:
        sweep.refuse_overrides(rule.set, "adjust")
    points: dict[str, Point] = {}
    left_out: dict[str, Point] = {}
    for name, curve in config.curves.items():
        if name not in (curves or config.curves):
            continue
        length = curve.horizon.keys if curve.horizon else []
        sweep.refuse_overrides([*curve.set, *curve.grid, *length], f"curve {name!r}")
        for values in sweep.grid(name):
            for seed in sweep.seeds(values):
                point = sweep.point(name, values, seed)
                meant = points if sweep.is_meant(point.config) else left_out
                known = meant.setdefault(point.run, point).values
                if known != point.values:
                    raise UserError(
                        f"{path}, curve {name!r}: grid: {_words(known, point.values)} and "
                        f"{_words(point.values, known)} are the same run; keep one of them"
                    )
    if sweep.where and not points:
        raise UserError(f"--where: no run of {path} matches; --dry-run without it lists them all")
    sweep.points, sweep.left_out = list(points.values()), list(left_out.values())
    return sweep


def _words(values: GridValues, other: GridValues) -> str:
    """The values in which two combinations differ."""
    return " ".join(f"{key}={value}" for key, value in values if (key, value) not in other)


def grid_values(grid: Mapping[str, Values | Log2Range], where: str = "") -> list[dict[str, Any]]:
    """Every combination of a grid's values, the last key varying fastest; UserError, naming the
    file, for more than MOST."""
    if math.prod(map(len, grid.values())) > MOST:  # before they are made
        raise UserError(
            f"{where}: grid: more than {MOST:,} combinations of {', '.join(grid)}; give fewer "
            "values, or several files"
        )
    axes = map(_axis, grid.values())
    return [dict(zip(grid, combination, strict=True)) for combination in itertools.product(*axes)]


def _axis(values: Any) -> list[Any]:
    """The values of an axis; none of one that follows another sweep."""
    if isinstance(values, Multiples):
        return []
    return values.values() if isinstance(values, Log2Range) else values
