"""The reference page of sweep and search files, from the models that validate them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sweeps.search_file import SearchConfig
from sweeps.sweep_file import SweepConfig

PAGE = Path(__file__).with_name("reference.md")
HEAD = """# Keys of sweep and search files

Written by `python -m sweeps reference` from the models that validate the files; a key that is not
here is an error. `presets`, which every file may have, maps a name to changes: `--preset NAME`
merges them over the file, where null takes a key away.
"""
_WORDS = {
    "integer": "whole number",
    "object": "mapping",
    "boolean": "true or false",
    "string": "text",
    "number": "number",
}
_BOUNDS = {
    "minimum": "at least",
    "exclusiveMinimum": "above",
    "maximum": "at most",
    "exclusiveMaximum": "below",
}


def page() -> str:
    """The whole page, in Markdown."""
    parts = [HEAD]
    for title, kind in (("A sweep file", SweepConfig), ("A search file", SearchConfig)):
        schema = kind.model_json_schema()
        parts += [f"## {title}\n", *_table(schema)]
        for name, section in schema.get("$defs", {}).items():
            said = f"\n### {name}\n\n{_line(section.get('description', ''))}\n"
            if said not in parts:  # both files have some of them
                parts += [said, *_table(section)]
    return "\n".join(parts) + "\n"


def _table(schema: Mapping[str, Any]) -> Iterator[str]:
    """One row per key: its type, its default and its meaning."""
    yield "| key | value | default | |\n|---|---|---|---|"
    for key, item in schema["properties"].items():
        default = "required" if key in schema.get("required", ()) else _default(item)
        yield f"| `{key}` | {_type(item)} | {default} | {_line(item.get('description', ''))} |"


def _default(item: Mapping[str, Any]) -> str:
    value = item.get("default")
    empty = value is None or value in ({}, []) or "$ref" in item
    return "" if empty else f"`{json.dumps(value)}`"


def _type(item: Mapping[str, Any]) -> str:
    """What a value may be, in words, with its bounds."""
    choices = item.get("anyOf") or item.get("oneOf")
    if choices:
        parts = [_type(part) for part in choices if part.get("type") != "null"]
        return " or ".join(dict.fromkeys(parts))
    if "$ref" in item:
        name = item["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "enum" in item:
        return ", ".join(map(str, item["enum"]))
    if "prefixItems" in item:
        return f"[{', '.join(_type(part) for part in item['prefixItems'])}]"
    kind, inner = item.get("type", ""), item.get("items") or item.get("additionalProperties")
    of = _type(inner) if isinstance(inner, Mapping) and inner else ""
    if kind == "array":
        return f"list of {of}s" if of in _WORDS.values() else f"list of {of}" if of else "list"
    words = _WORDS.get(kind, "anything") + (f" to {of}" if of else "")
    return ", ".join([words, *(f"{_BOUNDS[key]} {item[key]:g}" for key in _BOUNDS if key in item)])


def _line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def write() -> None:
    """Writes sweeps/reference.md."""
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)
