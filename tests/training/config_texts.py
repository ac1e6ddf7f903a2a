"""Texts that somebody may take for a config: drawn by hypothesis, read as a command reads them."""

import contextlib
import io

import yaml
from hypothesis import strategies as st

from sweeps.sweep_file import SweepConfig
from training.config import apply_preset, leaves, load, read_yaml, set_keys, validate
from training.errors import one_line_errors
from training.experiment import load_experiment

NAMES = ("nanolm_c4", "bart_span_denoise", "vit_imagenet", "vit_cifar5m")
CONFIGS = {name: load_experiment(name).config for name in NAMES}
SHIPPED = {name: f"{name}/configs/laptop.yaml" for name in NAMES}
SHIPPED["sweep"] = "nanolm_c4/sweeps/figure_12_adam.yaml"
KEYS = {
    name: [key for key, _ in leaves(kind)]
    for name, kind in {**CONFIGS, "sweep": SweepConfig}.items()
}
FRAGMENTS = [
    *("a", "seed", "model", "optimizer", "lr", "width", "presets", "curves", "grid", "set", "<<"),
    *(": ", ":", "\n", "\n  ", "\n    ", "- ", "? ", ", ", "[", "]", "{", "}", "|\n", ">-\n", "#"),
    *("&a ", "*a", "&b ", "*b", "! ", "!!int ", "!!float ", "!!bool ", "!!str ", "!!set ", "!!x "),
    *("!!map ", "!!seq ", "!!binary ", "!!timestamp ", "!!python/object/apply:os.system "),
    *("1", "-1", "0x", "0b_", "1e-9", "1e999", ".inf", ".nan", "1:2:3", "2001-01-01", "9" * 5000),
    *("true", "null", "~", "=", "''", "'", '"', '"\\0"', '"\\ud800"', "---\n", "...\n"),
    *("[" * 200, "- " * 200, "k: 1\n" * 50, "x" * 5000, "\t", "\x07", "é", "\u2028", "../" * 9),
]
ODD = [
    *(None, True, "", " ", "\n", "x" * 3000, "../../..", "/dev/zero", "1e-3", "\u2028", [], {}),
    *(0, 1, 2, 64, -1, 2**31, 2**63, 10**40, 10**400),
    *(0.5, 1e-320, 1e308, float("inf"), float("nan")),
]
KEY_WORDS = st.sampled_from(sorted({key for keys in KEYS.values() for key in keys})) | st.text(
    max_size=9
)
VALUES = st.recursive(
    st.sampled_from(ODD) | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEY_WORDS, inner, max_size=4),
    max_leaves=20,
)


def dumped(value):
    """A value as YAML, where YAML can say it."""
    try:
        return yaml.safe_dump(value, allow_unicode=True)
    except (yaml.YAMLError, ValueError):  # an integer too long to be printed
        return repr(value)[:100]


@st.composite
def inputs(draw):
    """(what is read, its text, overrides): fragments, structures, other values, overrides."""
    what = draw(st.sampled_from(list(SHIPPED)))
    kinds = ["fragments", "structure", "values"] + ["overrides"] * (what in CONFIGS)
    kind = draw(st.sampled_from(kinds))
    if kind == "fragments":
        texts = st.lists(st.sampled_from(FRAGMENTS), max_size=30).map("".join)
        return what, draw(texts | st.text(max_size=200)), []
    if kind == "structure":
        return what, dumped(draw(st.dictionaries(KEY_WORDS, VALUES, max_size=6))), []
    data = read_yaml(SHIPPED[what])
    keys = st.sampled_from(KEYS[what])
    if kind == "values":
        for key in draw(st.lists(keys, min_size=1, max_size=3)):
            with contextlib.suppress(ValueError):  # a key below one that has a value already
                data = set_keys(data, {key: draw(VALUES)})
        return what, dumped(data), []
    texts = st.lists(st.sampled_from(FRAGMENTS), max_size=6).map("".join) | VALUES.map(dumped)
    word = st.tuples(keys | KEY_WORDS, texts).map("=".join) | st.text(max_size=30)
    return what, dumped(data), draw(st.lists(word, min_size=1, max_size=3))


def read(what, text, overrides, folder):
    """ "read" or "refused"; AssertionError if neither, in one line with exit code 2."""
    path = folder / "x.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors), one_line_errors(OSError):
            if what in CONFIGS:
                load(CONFIGS[what], path, overrides)
            else:
                validate(SweepConfig, apply_preset(read_yaml(path), None, str(path)), str(path))
        return "read"
    except SystemExit as ended:
        line = errors.getvalue()
        assert ended.code == 2 and line.startswith("error: "), (ended.code, line)  # noqa: PT017
        assert line.count("\n") == 1 and line.endswith("\n") and len(line) < 3000, line
        return "refused"
