"""Typed configs: YAML plus `key=value` overrides; whatever is unknown or impossible is an error.

An experiment declares its config as `Section` classes; the docstring under a field is its help
text. Validation is pydantic's; this module turns its findings into one line that names the file
and the key, and adds the nearest valid name. What every run has is in `training.settings`.
"""

import copy
import json
import math
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from training.errors import LONGEST_NAME, UserError, nearest, reason

# Upper bounds, for slips that would otherwise fill the memory before anything is said of them.
MOST = 10**12  # steps, samples, tokens; all of C4 has 2 x 10^11
WIDEST = 2**20  # sizes of models and batches: weights of two such sizes take 4 TB
LARGEST = 1e15  # float32 ends at 3e38: two such numbers and a plan's factor can be multiplied
PositiveInt = Annotated[int, Field(gt=0, le=MOST)]
Count = Annotated[int, Field(ge=0, le=MOST)]
Size = Annotated[int, Field(gt=0, le=WIDEST)]
Layers = Annotated[int, Field(gt=0, le=10_000)]  # each is a module, built in milliseconds
PositiveFloat = Annotated[float, Field(gt=0, le=LARGEST)]
NonNegativeFloat = Annotated[float, Field(ge=0, le=LARGEST)]
Fraction01 = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """A part of a config: unknown keys and wrong types are errors, values do not change."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


SectionType = TypeVar("SectionType", bound=Section)


_CHARACTERS = 20_000_000  # of a text; constants.yaml has 1.1 kB for each of 10,000 studies at most


class _Loader(yaml.CSafeLoader):  # libyaml's, five times as fast
    """YAML whose keys occur once; floats include 1e-9 (YAML 1.1 wants 1.0e-9)."""

    def construct_mapping(self, node: yaml.Node, deep: bool = False) -> dict:
        known: set[str] = set()
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else []:
            if isinstance(key, yaml.ScalarNode):
                if key.value in known:
                    problem = f"key {key.value!r} occurs twice"
                    raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
                known.add(key.value)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"),
    list("-+0123456789."),
)


def parse_yaml(text: str, where: str) -> Any:
    """The value of a YAML text, in JSON's types; a UserError names `where` and the line number."""
    if len(text) > _CHARACTERS:
        raise UserError(f"{where}: more than {_CHARACTERS:,} characters")
    try:
        depth, opens, ends = 0, yaml.CollectionStartEvent, yaml.CollectionEndEvent
        for event in yaml.parse(text, _Loader):  # to load too many levels would end the process
            depth += isinstance(event, opens) - isinstance(event, ends)
            if (anchor := getattr(event, "anchor", None)) or depth > 100:
                problem = "an anchor or alias; write the value out" if anchor else "over 100 levels"
                raise yaml.constructor.ConstructorError(None, None, problem, event.start_mark)
        value = yaml.load(text, _Loader)
        json.dumps(value)  # neither dates and sets, nor numbers that are too long to be printed
        return value
    except yaml.YAMLError as error:
        problem = (getattr(error, "problem", None) or str(error).partition("\n")[0])[:200]
        if mark := getattr(error, "problem_mark", None):
            lines = text.rstrip().split("\n")
            number = min(mark.line + 1, len(lines))  # an open bracket is found after it
            where, problem = f"{where}, line {number}", f"{problem}: {lines[number - 1][:60]!r}"
        raise UserError(f"{where}: not valid YAML: {problem}") from None
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise UserError(f"{where}: cannot be read: {reason(error)}") from None


def read_yaml(path: Path) -> dict:
    """The mapping in a YAML file, see `parse_yaml`; UserError when it is missing or no mapping."""
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(_CHARACTERS + 1)
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
    """A copy of nested `data` with dotted keys set; a mapping is merged over the section there."""
    result = dict(data)  # sections without a change are shared
    for key, value in values.items():
        *parents, last = str(key).split(".", 30)
        node = result
        for parent in parents:
            section = node.get(parent, {})
            if not isinstance(section, dict):
                raise UserError(f"{key}: {parent!r} is a value, not a section")
            node[parent] = node = dict(section)
        if isinstance(old := node.get(last), dict) and isinstance(value, Mapping):
            value = set_keys(old, value)
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


# Which of several validation errors to show. An unknown key is usually a misspelt missing key, and
# one of our own checks says more than the error of another union member.
_TELLING = {"extra_forbidden": 0, "value_error": 1}


def validate(kind: type[SectionType], data: Mapping[str, Any], where: str) -> SectionType:
    """A config of class `kind`; UserError names `where`, the key and the nearest valid one.

    Strict in JSON's sense: no number is read from a string, no bool from a number; lists are
    tuples and integers are floats where a field wants them.
    """
    try:
        return kind.model_validate_json(json.dumps(data))
    except ValidationError as error:
        problem = min(error.errors(), key=lambda item: _TELLING.get(item["type"], 2))
        raise UserError(f"{where}: {_explain(kind, problem, data)}") from None


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
        elif isinstance(item.discriminator, str):
            yield from _leaves_of_union(get_args(inner), item.discriminator, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", item


def _leaves_of_union(kinds: Sequence[type[Section]], tag: str, prefix: str) -> Iterator:
    """The keys of sections of which a config has one; those of several as the first has them."""
    items: dict[str, Any] = {}
    for kind in kinds:
        items |= {key: item for key, item in leaves(kind, prefix) if key not in items}
    choice = copy.copy(items[f"{prefix}{tag}"])
    choice.annotation = Union[tuple(kind.model_fields[tag].annotation for kind in kinds)]  # noqa: UP007
    yield from {**items, f"{prefix}{tag}": choice}.items()


def describe(kind: type[Section]) -> str:
    """All keys of a config with type, default and meaning, for `--help`."""
    lines = []
    for key, item in leaves(kind):
        shown = "none" if item.default is None else item.default
        default = "required" if item.is_required() else f"default {shown}"
        lines.append(f"  {key} ({_type_name(item.annotation)}, {default})")
        lines.append(textwrap.indent(textwrap.dedent(item.description or ""), "      "))
    return "\n".join(lines)


def _type_name(annotation: Any) -> str:
    """A field's type as users know it, without its bounds."""
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


def _explain(kind: type[Section], problem: Mapping[str, Any], beside: Any) -> str:
    """One pydantic finding in a config as a sentence."""
    # pydantic names the alternatives of a union as parts of the location; users did not write them
    sections = {section.__name__ for section in Section.__subclasses__()}
    parts = [p for p in map(str, problem["loc"]) if p not in sections and "[" not in p]
    field = kind.model_fields.get(parts[0]) if parts else None
    tag = field.discriminator if field else None
    if tag and problem["type"].startswith("union_tag"):
        known = problem.get("ctx", {}).get("expected_tags")
        if known is None:
            return f"key '{parts[0]}.{tag}' is missing; give it a value"
        got = json.dumps(problem["input"].get(tag), default=str)[:80]
        return f"{parts[0]}.{tag}: expected one of {known}, got {got}"
    if tag and len(parts) > 1:
        del parts[1]
    key = ".".join(parts)[:LONGEST_NAME]
    if problem["type"] == "extra_forbidden":
        valid = _valid_beside(kind, parts)
        if key in valid:  # of another kind of section than what stands beside it
            for part in parts[:-1]:
                beside = beside.get(part, {}) if isinstance(beside, Mapping) else {}
            others = ", ".join(name for name in map(str, beside) if name != parts[-1])
            return f"key {key!r} does not go with {others or 'no other'}; leave it or them out"
        return f"unknown key {key!r}{nearest(key, valid)}"
    if problem["type"] == "missing":
        return f"key {key!r} is missing; give it a value"
    if problem["type"] == "value_error":
        return problem["msg"].removeprefix("Value error, ")
    expected = problem["msg"].replace("Input should be", "expected")
    expected = expected.replace("a valid array", "a list")
    return f"{key or 'config'}: {expected}, got {json.dumps(problem['input'], default=str)[:80]}"
