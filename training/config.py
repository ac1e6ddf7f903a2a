"""Typed configs: YAML plus `key=value` overrides; whatever is unknown or impossible is an error.

An experiment declares its config as `Section` classes; the docstring under a field is its help
text. Validation is pydantic's; this module turns its findings into one line that names the file
and the key, and adds the nearest valid name.
"""

from __future__ import annotations

import json
import math
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)

from training.errors import UserError, nearest

PositiveInt = Annotated[int, Field(gt=0)]
Count = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction01 = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """A part of a config: unknown keys and wrong types are errors, values do not change."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True
    )


SectionType = TypeVar("SectionType", bound=Section)


def default_epsilon(optimizer: str) -> float:
    """Everett et al., App. C; Adafactor adds it to g^2."""
    return 1e-30 if optimizer == "adafactor" else 1e-9


class OptimizerConfig(Section):
    """The update rule and its global numbers; the plan derives every tensor's own."""

    name: Literal["sgd", "adam", "adam_param_scaling", "adafactor", "adam_atan2"] = "adam"
    """Update rule."""
    lr: PositiveFloat
    """Global learning rate, multiplied by each role's factor."""
    beta1: Fraction01 = 0.9
    """Decay of the first moment (Adam family)."""
    beta2: Fraction01 = 0.98
    """Decay of the second moment (Adam family); NanoDO's default."""
    eps: NonNegativeFloat | None = None
    """Global epsilon, multiplied by each role's factor; by default 1e-9, 1e-30 for adafactor."""
    momentum: Fraction01 = 0.9
    """Heavy-ball momentum (sgd)."""
    atan2_lambda: PositiveFloat = 8.0
    """Stretch of the arctangent in adam_atan2 (Everett et al., C.3)."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay; its meaning is `decay_mode`."""
    decay_mode: Literal["independent", "global", "per_group"] = "independent"
    """One step removes: wd (independent), lr*wd (global), or the tensor's own lr*wd (per_group)."""
    clip_norm: PositiveFloat | None = None
    """Largest L2 norm of the whole gradient; none by default."""

    @property
    def epsilon(self) -> float:
        """`eps`, or the optimiser's own."""
        return default_epsilon(self.name) if self.eps is None else self.eps


class ScheduleConfig(Section):
    """One factor in [0, 1] on every group's rate."""

    name: Literal["cosine", "linear", "constant"] = "cosine"
    """Shape after the warm-up."""
    warmup_steps: Count = 0
    """Steps of linear warm-up from 0."""
    steps: PositiveInt | None = None
    """Length of the whole schedule, by default training.steps; a run may end before."""
    floor: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Final factor, as a fraction of each group's peak rate."""
    min_lr: NonNegativeFloat = 0.0
    """Final rate in units of optimizer.lr, in place of floor: floor = min_lr / lr."""


class LoopConfig(Section):
    """Length, batching, evaluation and precision of a run."""

    steps: PositiveInt
    """Optimiser steps."""
    batch_size: PositiveInt
    """Samples per optimiser step, over all processes and micro-batches."""
    micro_batch_size: PositiveInt | None = None
    """Samples per forward pass of one process; by default the process's whole share."""
    log_every: PositiveInt = 10
    """Steps between lines of metrics.jsonl."""
    eval_every: Count = 0
    """Steps between evaluations; 0 evaluates at the end only."""
    eval_batch_size: PositiveInt = 64
    """Samples per forward pass of an evaluation, per process."""
    eval_samples: PositiveInt | None = None
    """Validation samples to use, from the first on; all by default."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """bf16 runs the forward pass under autocast; weights and optimiser state stay float32."""
    compile: bool = False
    """torch.compile the model."""
    data_workers: Count = 0
    """Data-loading processes; they change nothing but speed."""
    gradient_scale: bool = False
    """Log, for each role of tensors, the RMS of its clipped gradient over its epsilon."""
    skip_overflow: bool = False
    """Skip a step whose loss or gradient is not finite, and log it, as fp16 training does."""
    divergence_factor: Annotated[float, Field(gt=1)] = 3.0
    """A run has diverged when its loss is NaN or exceeds this multiple of its first loss."""
    probe_every: Count = 0
    """Steps between probes of every tensor and dense layer, from the first on; 0 for none."""
    probe_samples: PositiveInt = 8
    """Validation samples that a probe's forward pass sees, from the first on; of a decoder's text
    full rows, without pads, as far as there are any."""


class ObservedLoopConfig(LoopConfig):
    """The loop of an experiment whose model `measure.representations` can observe."""

    observe_every: Count = 0
    """Steps between observations of the representations, from step 0 on; 0 for none."""
    observe_samples: PositiveInt = 8
    """Validation samples that an observation sees, from the first on; of a decoder's text full
    rows, without pads."""

    @model_validator(mode="after")
    def _samples_are_observed(self) -> ObservedLoopConfig:
        if "observe_samples" in self.model_fields_set and not self.observe_every:
            raise ValueError(
                f"training.observe_samples {self.observe_samples} is given, but nothing is "
                "observed; set training.observe_every or leave it out"
            )
        return self

    @model_serializer(mode="wrap")
    def _observed(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Keys of observations only where there are any: without, a run is what it always was."""
        own = () if self.observe_every else ("observe_every", "observe_samples")
        return {key: value for key, value in dump(self).items() if key not in own}


class CheckpointConfig(Section):
    """How a run survives; nothing here changes its numbers or makes it another run."""

    every: Count = 0
    """Steps between checkpoints; 0 leaves it to `minutes`."""
    minutes: PositiveFloat | None = 10.0
    """Longest time between checkpoints; null leaves it to `every`."""
    keep: PositiveInt = 2
    """Newest checkpoints to keep; a second one serves if the first is damaged."""
    final: bool = False
    """Keep a finished run's last checkpoint; by default a finished run keeps none."""
    resume: Literal["auto", "never"] = "auto"
    """Go on from the newest good checkpoint, or start an unfinished run anew and delete them."""


class RunConfig(Section):
    """What the training loop reads of an experiment's config; experiments add their own."""

    without_effect: ClassVar[tuple[str, ...]] = ("checkpoint", "training.data_workers")
    """Keys that say how or where a run is computed: no part of which run it is."""
    retired: ClassVar[Mapping[str, tuple[Any, str]]] = {}
    """section.key of earlier versions: the value that all runs now have, and what to do instead of
    another. It stays part of which run it is, or runs and tables made before would lose their
    names."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of the initial weights and, unless a data.seed is set, of the data order."""
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    training: LoopConfig
    checkpoint: CheckpointConfig = CheckpointConfig()

    @property
    def floor(self) -> float:
        """The schedule's final factor."""
        return self.schedule.min_lr / self.optimizer.lr or self.schedule.floor

    @model_validator(mode="after")
    def _floor_is_one_fraction(self) -> RunConfig:
        schedule, lr = self.schedule, self.optimizer.lr
        if schedule.floor and schedule.min_lr:
            raise ValueError("schedule.floor and schedule.min_lr say the same; keep one")
        if schedule.min_lr > lr:
            raise ValueError(
                f"schedule.min_lr {schedule.min_lr:g} is more than optimizer.lr {lr:g}; it is the "
                "rate that the schedule ends with"
            )
        return self

    @model_validator(mode="after")
    def _warmup_fits(self) -> RunConfig:
        planned = self.schedule.steps
        if planned is not None and planned < self.training.steps:
            raise ValueError(
                f"schedule.steps {planned} is less than training.steps {self.training.steps}; "
                "raise it or leave it out"
            )
        if self.schedule.warmup_steps > (planned or self.training.steps):
            raise ValueError(
                f"schedule.warmup_steps {self.schedule.warmup_steps} is more than training.steps "
                f"{self.training.steps}; lower it"
            )
        return self


class _Loader(yaml.SafeLoader):
    """YAML whose floats include 1e-9 (YAML 1.1 wants 1.0e-9) and whose keys occur once."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        keys = [key.value for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key!r} occurs twice", node.start_mark
                )
        return super().construct_mapping(node, deep)


# Dates stay words: no config has one, and a number like 2001-01-01 is a slip.
_Loader.yaml_implicit_resolvers = {
    first: [entry for entry in entries if entry[0] != "tag:yaml.org,2002:timestamp"]
    for first, entries in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"),
    list("-+0123456789."),
)


def parse_yaml(text: str, where: str) -> Any:
    """The value of a YAML text; UserError in one line, naming `where` and the line."""
    try:
        return yaml.load(text, _Loader)  # noqa: S506 - a SafeLoader
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise UserError(f"{where}{line}: not valid YAML: {problem}") from None


def read_yaml(path: Path) -> dict:
    """The mapping in a YAML file; UserError when it is missing or no mapping."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot read the file: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: not a text file") from None
    value = parse_yaml(text, str(path))
    if not isinstance(value, dict):
        raise UserError(f"{path}: expected a mapping of keys, got {type(value).__name__}")
    return value


def parse_overrides(overrides: Iterable[str]) -> dict[str, Any]:
    """`key=value` words as {dotted key: YAML value}."""
    parsed = {}
    for word in overrides:
        key, equals, value = word.partition("=")
        if not equals or not key:
            raise UserError(f"command line: expected key=value, got {word!r}")
        parsed[key] = parse_yaml(value, f"command line, {key}")
    return parsed


def set_keys(data: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of nested `data` with dotted keys set."""
    result = json.loads(json.dumps(data))
    for key, value in values.items():
        *parents, last = key.split(".")
        node = result
        for parent in parents:
            node = node.setdefault(parent, {})
            if not isinstance(node, dict):
                raise UserError(f"{key}: {parent!r} is a value, not a section")
        node[last] = value
    return result


def shifted(value: float, step: float) -> float:
    """value * 2^step; quarter powers of two stay exactly that, however they were reached."""
    quarters = 4 * (math.log2(value) + step)
    near = abs(quarters - round(quarters)) < 1e-9
    return 2.0 ** (round(quarters) / 4) if near else value * 2.0**step


def apply_preset(data: Mapping[str, Any], name: str | None, where: str) -> dict[str, Any]:
    """`data` without its `presets`, the named one merged over it.

    Sections are merged key by key, any other value is replaced, and null takes a key away.
    Raises UserError for a preset that `data` does not have.
    """
    presets = data.get("presets") or {}
    rest = {key: value for key, value in data.items() if key != "presets"}
    if not isinstance(presets, Mapping):
        raise UserError(f"{where}: presets: expected a mapping of names to changes")
    if name is None:
        return rest
    if name not in presets:
        known = ", ".join(presets) or "none"
        raise UserError(f"{where}: no preset {name!r} in it; it has {known}")
    if not isinstance(presets[name], Mapping):
        raise UserError(f"{where}: presets.{name}: expected a mapping of keys to changes")
    return _merged(rest, presets[name])


def _merged(data: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(data)
    for key, value in changes.items():
        old = merged.get(key)
        if value is None:
            merged.pop(key, None)
        elif isinstance(value, Mapping) and isinstance(old, Mapping):
            merged[key] = _merged(old, value)
        else:
            merged[key] = value
    return merged


# Which of several findings to show. An unknown key is usually the misspelt form of a missing one,
# and a check of ours says more than the other alternative of a union.
_TELLING = {"extra_forbidden": 0, "value_error": 1}


def validate(kind: type[SectionType], data: Mapping[str, Any], where: str) -> SectionType:
    """A config of class `kind`; UserError names `where`, the key and the nearest valid one.

    Strict in JSON's sense: no number is read from a string, no bool from a number; lists are
    tuples and integers are floats where a field wants them.
    """
    data = _without_retired(kind, data, where)
    try:
        return kind.model_validate_json(json.dumps(data))
    except ValidationError as error:
        problem = min(error.errors(), key=lambda item: _TELLING.get(item["type"], 2))
        raise UserError(f"{where}: {_explain(kind, problem)}") from None


def _without_retired(
    kind: type[Section], data: Mapping[str, Any], where: str
) -> Mapping[str, Any]:
    """`data` without keys of earlier versions; UserError where one asks for what is gone."""
    for key, (value, instead) in getattr(kind, "retired", {}).items():
        section, name = key.split(".")
        given = data.get(section)
        if not isinstance(given, Mapping) or name not in given:
            continue
        if given[name] != value:
            raise UserError(f"{where}: {key}={json.dumps(given[name])} is gone; {instead}")
        data = {**data, section: {key: given[key] for key in given if key != name}}
    return data


def with_retired(kind: type[Section], data: Mapping[str, Any]) -> dict[str, Any]:
    """A resolved config's `data` with the keys of earlier versions, as it had them then."""
    data = dict(data)
    for key, (value, _) in getattr(kind, "retired", {}).items():
        section, name = key.split(".")
        if isinstance(data.get(section, {}), Mapping):  # a damaged file is for others to refuse
            data[section] = {name: value, **data.get(section, {})}
    return data


def load(kind: type[SectionType], path: Path | str, overrides: Sequence[str] = ()) -> SectionType:
    """The config in a YAML file with `key=value` overrides applied."""
    values = parse_overrides(overrides)
    data = set_keys(read_yaml(Path(path)), values)
    where = f"{path} with {' '.join(overrides)}" if overrides else str(path)
    return validate(kind, data, where)


def to_yaml(config: Section) -> str:
    """The resolved config: every field that decides the run, defaults included."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def leaves(kind: type[Section], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, pydantic field) of every value in a config class."""
    for name, item in kind.model_fields.items():
        inner = item.annotation
        if isinstance(inner, type) and issubclass(inner, Section):
            yield from leaves(inner, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", item


def describe(kind: type[Section]) -> str:
    """All keys of a config with type, default and meaning, for `--help`."""
    lines = []
    for key, item in leaves(kind):
        default = "required" if item.is_required() else f"default {_shown(item.default)}"
        lines.append(f"  {key} ({_type_name(item.annotation)}, {default})")
        lines.append(textwrap.indent(textwrap.dedent(item.description or ""), "      "))
    return "\n".join(lines)


def _shown(value: Any) -> str:
    return "none" if value is None else str(value)


def _type_name(annotation: Any) -> str:
    """A field's type in words, without its bounds."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type_name(parts[0])
    if origin is Literal:
        return ", ".join(map(str, parts))
    if origin in (Union, UnionType):
        return " or ".join(map(_type_name, parts))
    if origin is not None:
        return f"{origin.__name__}[{', '.join(map(_type_name, parts))}]"
    if annotation is type(None):
        return "none"
    return annotation.__name__ if isinstance(annotation, type) else str(annotation)


def _valid_beside(kind: type[Section], parts: Sequence[str]) -> list[str]:
    """The valid keys where an unknown one stands: its siblings, or at the top every key."""
    if len(parts) == 1:
        return [*kind.model_fields, *(name for name, _ in leaves(kind))]
    section = kind
    for part in parts[:-1]:
        if part in section.model_fields:
            section = _section_in(section.model_fields[part].annotation) or section
    return [".".join([*parts[:-1], name]) for name in section.model_fields]


def _section_in(annotation: Any) -> type[Section] | None:
    """The section class in an annotation such as Section, Section | None or dict[str, Section]."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    inner = (_section_in(argument) for argument in getattr(annotation, "__args__", ()))
    return next((section for section in inner if section), None)


def _explain(kind: type[Section], problem: Mapping[str, Any]) -> str:
    """One pydantic finding in words."""
    # pydantic names the alternatives of a union as parts of the location; users did not write them
    sections = {section.__name__ for section in Section.__subclasses__()}
    parts = [p for p in map(str, problem["loc"]) if p not in sections and "[" not in p]
    key = ".".join(parts)
    if problem["type"] == "extra_forbidden":
        valid = _valid_beside(kind, parts)
        return f"unknown key {key!r}{nearest(key, valid)}"
    if problem["type"] == "missing":
        return f"key {key!r} is missing; give it a value"
    if problem["type"] == "value_error":
        return problem["msg"].removeprefix("Value error, ")
    expected = problem["msg"].replace("Input should be", "expected")
    return f"{key or 'config'}: {expected}, got {json.dumps(problem['input'], default=str)[:80]}"
