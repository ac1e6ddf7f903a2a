"""Any text as a config: it is read, or refused in one line with exit code 2. 10,000 of them.

    python -m benchmarks.config_fuzz --examples 10000 --json benchmarks/results/config_fuzz.json

Run configs of all experiments, sweep files and search files, from four kinds of input: fragments of
YAML in any order, structures of any values with tags and aliases, shipped files of which keys have
other values, and `key=value` words. Each is read in this process under a limit of time (CPU
seconds) and of memory (address space beyond what the process has). The exit code is 1 if one of
them broke a promise. tests/training/test_config_fuzz.py reads some of the same inputs.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import yaml
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from benchmarks import harness
from sweeps.study import SearchConfig
from sweeps.sweep_file import SweepConfig
from training.config import apply_preset, leaves, load, read_yaml, set_keys, validate
from training.errors import one_line_errors
from training.experiment import load_experiment

SECONDS, MEGABYTES = 2, 200
EXPERIMENTS = ("nanolm_c4", "bart_span_denoise", "vit_imagenet", "vit_cifar5m")
CONFIGS = {name: load_experiment(name).config for name in EXPERIMENTS}
FILES = {"sweep": SweepConfig, "search": SearchConfig}
OWN_KEYS = {name: [key for key, _ in leaves(kind)] for name, kind in {**CONFIGS, **FILES}.items()}
KEYS = sorted({key for keys in OWN_KEYS.values() for key in keys})
SHIPPED = {
    **{name: harness.ROOT / name / "configs/laptop.yaml" for name in EXPERIMENTS},
    "sweep": harness.ROOT / "nanolm_c4/sweeps/figure_12_adam.yaml",
    "search": harness.ROOT / "nanolm_c4/sweeps/constants.yaml",
}

# ------------------------------------------------------------------------------------------------
# Inputs

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
KEY_WORDS = st.sampled_from([*KEYS, *(key.partition(".")[0] for key in KEYS)]) | st.text(max_size=9)
VALUES = st.recursive(
    st.sampled_from(ODD) | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEY_WORDS, inner, max_size=4),
    max_leaves=20,
)


@st.composite
def bombs(draw) -> str:
    """Aliases of aliases: every level stands for several times the one before."""
    levels, width = draw(st.integers(1, 12)), draw(st.integers(0, 12))
    lines = ["a0: &a0 [1]"]
    for level in range(1, levels):
        inner = ", ".join([f"*a{level - 1}"] * width)
        value = draw(st.sampled_from([f"[{inner}]", f"{{<<: [{inner}]}}"]))
        lines.append(f"a{level}: &a{level} {value}")
    return "\n".join(lines)


def dumped(value) -> str:
    """A value as YAML, where YAML can say it."""
    try:
        return yaml.safe_dump(value, allow_unicode=True)
    except (yaml.YAMLError, ValueError):  # an integer too long to be printed
        return repr(value)[:100]


@st.composite
def mutated(draw, kind: str) -> str:
    """A shipped file some of whose keys have another value, or none."""
    data = read_yaml(SHIPPED[kind])
    keys = OWN_KEYS[kind]
    for key in draw(st.lists(st.sampled_from(keys), min_size=1, max_size=3)):
        with contextlib.suppress(ValueError):  # a key below one that has a value already
            data = set_keys(data, {key: draw(VALUES)})
    return dumped(data)


@st.composite
def inputs(draw) -> tuple[str, str, str, list[str]]:
    """(what is read, kind of input, its text, overrides)."""
    what = draw(st.sampled_from([*CONFIGS, *FILES]))
    kinds = ["fragments", "structure", "mutation"] + ["overrides"] * (what in CONFIGS)
    kind = draw(st.sampled_from(kinds))
    if kind == "fragments":
        fragments = st.lists(st.sampled_from(FRAGMENTS), max_size=30).map("".join)
        return what, kind, draw(fragments | bombs() | st.text(max_size=200)), []
    if kind == "structure":
        return what, kind, dumped(draw(st.dictionaries(KEY_WORDS, VALUES, max_size=6))), []
    if kind == "mutation":
        return what, kind, draw(mutated(what)), []
    texts = st.lists(st.sampled_from(FRAGMENTS), max_size=6).map("".join) | VALUES.map(dumped)
    keys = st.sampled_from(OWN_KEYS[what])
    word = st.tuples(keys | KEY_WORDS, texts).map("=".join) | st.text(max_size=30)
    return what, kind, SHIPPED[what].read_text(), draw(st.lists(word, min_size=1, max_size=3))


# ------------------------------------------------------------------------------------------------
# Outcomes


def read(what: str, text: str, overrides: list[str], folder: Path) -> str:
    """ "read" or "refused"; AssertionError if neither, in one line with exit code 2."""
    path = folder / "x.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors), one_line_errors(OSError):
            if what in CONFIGS:
                load(CONFIGS[what], path, overrides)
            else:
                validate(FILES[what], apply_preset(read_yaml(path), None, str(path)), str(path))
        return "read"
    except SystemExit as ended:
        line = errors.getvalue()
        assert ended.code == 2 and line.startswith("error: "), (ended.code, line)  # noqa: PT017
        assert line.count("\n") == 1 and line.endswith("\n") and len(line) < 3000, line
        return "refused"


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = harness.parser(__doc__)
    parser.add_argument("--examples", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


def main() -> None:
    options = parse()
    counts: Counter[tuple[str, str, str]] = Counter()
    broken: list[dict[str, object]] = []
    slowest = dict.fromkeys(("fragments", "structure", "mutation", "overrides"), 0.0)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()

    @settings(
        max_examples=options.examples,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(inputs())
    def fuzz(example: tuple[str, str, str, list[str]]) -> None:
        what, kind, text, overrides = example
        started = time.process_time()
        limits = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (used + (MEGABYTES << 20), limits[1]))
        signal.setitimer(signal.ITIMER_PROF, 10 * SECONDS)  # ends what would never end
        try:
            outcome = read(what, text, overrides, Path(folder))
        except BaseException as error:
            outcome = "broken"
            broken.append({"input": [what, text, overrides], "error": repr(error)[:300]})
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            resource.setrlimit(resource.RLIMIT_AS, limits)
        seconds = time.process_time() - started
        slowest[kind] = max(slowest[kind], seconds)
        if seconds > SECONDS:
            broken.append({"input": [what, text, overrides], "error": f"{seconds:.1f} s"})
        counts[kind, "config" if what in CONFIGS else what, outcome] += 1

    def too_long(*_: object) -> None:
        raise TimeoutError

    signal.signal(signal.SIGPROF, too_long)
    with tempfile.TemporaryDirectory() as folder:
        fuzz()
    rows = [
        {"input": kind, "file": what, "outcome": outcome, "examples": count}
        for (kind, what, outcome), count in sorted(counts.items())
    ]
    harness.show(options, "cpu", rows, slowest_seconds=slowest, broken=broken[:20])
    print(f"{sum(counts.values())} inputs, {len(broken)} broken", file=sys.stderr)
    raise SystemExit(1 if broken else 0)


if __name__ == "__main__":
    main()
