"""Any text is a config, or is refused in one line with exit code 2."""

import contextlib

import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nanolm_c4.config import Config
from training.config import leaves, load, read_yaml, set_keys
from training.errors import one_line_errors

LAPTOP = "nanolm_c4/configs/laptop.yaml"
KEYS = [key for key, _ in leaves(Config)]
FRAGMENTS = [
    *("a", "seed", "model", "optimizer.lr", "<<", "&a ", "*a", "! ", "!!int ", "!!bool ", "!!set "),
    *(": ", ":", "\n", "\n  ", "- ", "? ", ", ", "[", "]", "{", "}", "|\n", "#", "true", "null"),
    *("!!binary ", "!!timestamp ", "!!python/object/apply:os.system ", "1", "-1", "0x", "1e-9"),
    *(".inf", ".nan", "1:2:3", "2001-01-01", "9" * 5000, '"', "'", '"\\ud800"', "---\n", "...\n"),
    *("[" * 200, "- " * 200, "x" * 5000, "\t", "\x07", "é", "\u2028", "../" * 9),
]
ODD = [
    *(None, True, "", " ", "x" * 3000, "/dev/zero", "1e-3", [], {}, 0, -1, 2**31, 2**63, 10**40),
    *(0.5, 1e-320, 1e308, float("inf"), float("nan")),
]
VALUES = st.recursive(
    st.sampled_from(ODD) | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(KEYS), inner),
    max_leaves=20,
)
TEXTS = st.lists(st.sampled_from(FRAGMENTS), max_size=30).map("".join) | st.text(max_size=200)
WORDS = st.tuples(st.sampled_from(KEYS), TEXTS).map("=".join) | st.text(max_size=30)


@st.composite
def mutated(draw):
    """A shipped file some of whose keys have another value."""
    data = read_yaml(LAPTOP)
    for key in draw(st.lists(st.sampled_from(KEYS), min_size=1, max_size=3)):
        with contextlib.suppress(ValueError):  # a key below one that has a value already
            data = set_keys(data, {key: draw(VALUES)})
    return yaml.safe_dump(data, allow_unicode=True)


@settings(
    max_examples=60,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
@given(TEXTS | mutated(), st.lists(WORDS, max_size=2))
def test_any_text_is_a_config_or_one_line_with_exit_code_2(tmp_path_factory, text, overrides):
    path = tmp_path_factory.getbasetemp() / "x.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    outcome = None
    try:
        with one_line_errors():
            load(Config, path, overrides)
    except SystemExit as ended:
        outcome = ended.code
    assert outcome in (None, 2)
