"""A condition of a command line, such as --where 'model.width<=256': a key, a sign and a value."""

import operator
import re
from collections.abc import Callable
from typing import Any

SIGNS: dict[str, Callable[[Any, Any], Any]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
    "=": operator.eq,
}
_CONDITION = re.compile(rf"([\w.]+)\s*({'|'.join(SIGNS)})\s*([^<>=\s].*)", re.DOTALL)


def parse(text: str, error: type[ValueError]) -> tuple[str, str, str]:
    """The key, the sign and the value's text; `error` for a text without one of them."""
    parts = _CONDITION.fullmatch(text.strip())
    if parts is None:
        raise error(
            f"--where {text!r}: expected a key, one of {' '.join(SIGNS)} and a value, such as "
            "'model.width<=256'"
        )
    return parts[1], parts[2], parts[3]
