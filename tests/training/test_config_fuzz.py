"""Any text is a config, or it is refused in one line."""

import resource
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from nanolm_c4.config import Config
from sweeps.sweep_file import SweepConfig
from tests.training.config_texts import inputs, read
from training.config import load, parse_yaml, read_yaml, validate
from training.errors import UserError
from training.experiment import load_experiment

LAPTOP = "nanolm_c4/configs/laptop.yaml"
NINES = ", ".join(["*a{}"] * 9)
BOMB = "a0: &a0 [1]\n" + "".join(
    f"a{n}: &a{n} [{NINES.replace('{}', str(n - 1))}]\n" for n in range(1, 12)
)


@settings(
    max_examples=60,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
@given(inputs())
def test_any_text_is_a_config_or_one_line_with_exit_code_2(example):
    what, text, overrides = example
    with tempfile.TemporaryDirectory() as folder:
        assert read(what, text, overrides, Path(folder)) in ("read", "refused")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("seed: !!int foo", "not what its tag says (invalid literal for int()"),
        ("seed: !!int ''", "not what its tag says"),
        ("seed: !!bool xyz", "not what its tag says ('xyz')"),
        ("seed: !!timestamp 2001-01-01", "could not determine a constructor for the tag"),
        ("seed: !!binary aGVsbG8=", "could not determine a constructor for the tag"),
        ("a: !!python/object/apply:os.system ['true']", "could not determine a constructor"),
        ("!!set {a}", "could not determine a constructor for the tag"),
        ("!!map 3", "expected a mapping node"),
        ("seed: " + "9" * 5000, "line 1: not valid YAML: a number of 5000 digits"),
        ("seed: 0x" + "f" * 5000, "a number of 5002 digits"),
        ("\nx: &x [*x]", "line 2: not valid YAML: aliases stand for over 10000 values"),
        ("&a {seed: *a}", "aliases stand for over"),
        (BOMB, "line 5: not valid YAML: aliases stand for over 10000 values"),
        ("a: &a {b: 1}\n" + "c: {<<: [" + "*a, " * 9999 + "*a]}", "more than 10000 values"),
        ("[" * 600 + "]" * 600, "nested more than 30 deep"),
        ("- " * 600, "nested more than 30 deep"),
        ("a: [" + "1, " * 20_000 + "1]", "more than 10000 values"),
        ("a: " + "x" * 200_000, "more than 200000 characters"),
        ('a: "\\0"', "a character that no file can hold"),
        ('a: "\\ud800"', "a character that no file can hold"),
        ("? [a]\n: 1", "found unhashable key"),
    ],
)
def test_what_yaml_could_do_and_a_config_may_not(text, words):
    with pytest.raises(UserError) as caught:
        parse_yaml(text, "x.yaml")
    line = str(caught.value)
    assert line.startswith("x.yaml") and words in line and "\n" not in line


def test_aliases_are_fine_while_they_stand_for_little():
    assert parse_yaml("a: &a [1, 2]\nb: *a\nc: {<<: {d: 3}, e: *a}", "x") == {
        "a": [1, 2],
        "b": [1, 2],
        "c": {"d": 3, "e": [1, 2]},
    }


def test_a_file_without_end_is_not_read_to_its_end():
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (64 << 30, hard))  # in case it is
    try:
        with pytest.raises(UserError, match="/dev/zero: more than 200000 characters"):
            read_yaml(Path("/dev/zero"))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@pytest.mark.parametrize(
    ("word", "bound"),
    [
        ("model.width=2147483648", "less than or equal to 1048576"),
        ("model.layers=2147483648", "less than or equal to 10000"),
        ("model.context=1e400", "valid integer"),
        ("model.vocab_size=1_000_000_000_000", "less than or equal to 1048576"),
        ("training.data_workers=1" + "0" * 30, "less than or equal to 1024"),
        ("training.batch_size=1000000000000", "less than or equal to 1048576"),
        ("training.steps=10000000000000", "less than or equal to 1000000000000"),
        ("optimizer.lr=1e300", "less than or equal to 1000000000000000"),
        ("optimizer.weight_decay=1e300", "less than or equal to 1000000000000000"),
        ("training.divergence_factor=.inf", "a finite number"),
    ],
)
def test_sizes_that_no_machine_has_are_refused_with_their_bound(word, bound):
    with pytest.raises(UserError, match=f"{word.partition('=')[0]}: expected .*{bound}"):
        load(Config, LAPTOP, [word])


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("optimizer.learning_rate=1", "optimizer.lr"),
        ("learning_rate=1", "optimizer.lr"),
        ("optimizer.wd=1", "optimizer.weight_decay"),
        ("training.epochs=1", "training.steps"),
    ],
)
def test_an_abbreviation_of_a_key_is_known(word, meant):
    with pytest.raises(UserError, match=f"did you mean '{meant}'"):
        load(Config, LAPTOP, [word])


def test_key_value_is_optional_in_the_usage(capsys):
    with pytest.raises(SystemExit):
        load_experiment("nanolm_c4").main([])
    assert capsys.readouterr().err.endswith("the following arguments are required: config\n")


def test_a_dotted_key_of_a_thousand_sections_is_one_line():
    with pytest.raises(UserError, match="unknown key"):
        load(Config, LAPTOP, [".".join(["a"] * 1000) + "=1"])
    with pytest.raises(UserError, match="unknown key"):
        validate(SweepConfig, {"x" * 5000: 1}, "s.yaml")
