"""Configs: what is read, what is refused and in which words."""

import resource
from pathlib import Path
from typing import Annotated, Literal

import pytest
import yaml
from pydantic import Field

from nanolm_c4.config import Config
from training import config
from training.config import load, parse_overrides, parse_yaml, set_keys, validate
from training.errors import UserError
from training.runs import flat
from training.settings import OptimizerConfig

LAPTOP = "nanolm_c4/configs/laptop.yaml"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"lr": 1, "lrr": 2}, ["unknown key 'lrr'", "did you mean 'lr'"]),
        ({}, ["'lr' is missing"]),
        ({"lrr": 1}, ["unknown key 'lrr'"]),  # the misspelling, not the missing key it causes
        ({"lr": "0.1"}, ["lr: expected", '"0.1"']),
        ({"lr": True}, ["lr: expected", "true"]),
        ({"lr": -1}, ["lr: expected", "greater than 0", "-1"]),
        ({"lr": float("inf")}, ["lr: expected a finite number"]),
        ({"lr": float("nan")}, ["lr: expected a finite number"]),
        ({"lr": 1, "beta1": 1}, ["beta1: expected", "less than 1"]),
        ({"lr": 1, "name": "adamw"}, ["name: expected 'sgd', 'adam'", "adamw"]),
        ({"lr": 1, "clip_norm": 0}, ["clip_norm: expected"]),
        ({"lr": 1, "eps": -1}, ["eps: expected"]),
    ],
)
def test_bad_values_are_one_line_that_names_file_and_key(data, words):
    with pytest.raises(UserError) as caught:
        validate(OptimizerConfig, data, "some.yaml")
    message = str(caught.value)
    assert message.startswith("some.yaml: ") and "\n" not in message
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *[("1e-9", 1e-9), ("2E+3", 2000.0), ("1.5e-3", 1.5e-3), ("-1e2", -100.0), ("1_0", 10)],
        *((word, word) for word in ("e5", "1e", "abc", "0x1e-9")),
    ],
)
def test_exponents_without_a_dot_are_numbers_and_other_words_stay_words(text, value):
    assert parse_yaml(text, "here") == value


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: 1\na: 2\n", "line 2: not valid YAML: key 'a' occurs twice"),
        ("a: [1,\nb: 2\n", "line 2: not valid YAML: did not find expected ',' or ']': 'b: 2'"),
        ("x: &x 1", "line 1: not valid YAML: an anchor or alias; write the value out"),
        ("x: [*x]", "line 1: not valid YAML: an anchor or alias; write the value out"),
        ("seed: !!int foo", "cannot be read: ValueError: invalid literal for int()"),
        ("seed: !!timestamp foo", "cannot be read: AttributeError"),
        ("seed: !!bool xyz", "cannot be read: KeyError: 'xyz'"),
        ("a: !!python/object/apply:os.system ['true']", "could not determine a constructor"),
        ("seed: 2001-01-01", "cannot be read: TypeError: Object of type date is not JSON"),
        ("!!map 3", "expected a mapping node"),
        ("? [a]\n: 1", "found unhashable key"),
        ("seed: " + "9" * 5000, "cannot be read: ValueError: Exceeds the limit"),
        ("seed: 0x" + "f" * 5000, "cannot be read: ValueError: Exceeds the limit"),
        ("[" * 101 + "]" * 101, "line 1: not valid YAML: over 100 levels"),
        pytest.param("x" * 20_000_001, "more than 20,000,000 characters", id="long"),
    ],
)
def test_what_yaml_could_do_and_a_config_may_not_is_one_line(text, words):
    with pytest.raises(UserError) as caught:
        parse_yaml(text, "x.yaml")
    line = str(caught.value)
    assert line.startswith("x.yaml") and words in line and "\n" not in line


def test_a_file_without_end_is_not_read_to_its_end():
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (64 << 30, hard))  # in case it is
    try:
        with pytest.raises(UserError, match="/dev/zero: more than 20,000,000 characters"):
            config.read_yaml(Path("/dev/zero"))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@pytest.mark.parametrize("content", [None, "- 1\n- 2\n", b"\xff\xfe\x00"])
def test_files_that_are_no_config(tmp_path, content):
    path = tmp_path / "x.yaml"
    if isinstance(content, str):
        path.write_text(content)
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match="x.yaml"):
        config.read_yaml(path)


def test_overrides_reach_nested_keys_and_keep_types():
    loaded = load(Config, LAPTOP, ["optimizer.eps=1e-12", "model.width=128", "data.path=null"])
    assert loaded.optimizer.eps == 1e-12
    assert loaded.model.width == 128
    assert loaded.data.path is None


def test_an_override_without_a_value_or_inside_of_one_is_an_error():
    for word in ("optimizer.lr", "=3", ""):
        with pytest.raises(UserError, match="expected key=value"):
            parse_overrides([word])
    with pytest.raises(UserError, match="'lr' is a value, not a section"):
        set_keys({"optimizer": {"lr": 1}}, {"optimizer.lr.x": 2})


def test_a_mapping_is_merged_over_the_section_there():
    data = {"a": {"b": 1, "c": {"d": 2, "e": 3}}, "f": 4}
    changed = set_keys(data, {"a": {"c": {"d": None}, "g": {"h": 5}}, "f": {"i": 6}})
    assert changed == {"a": {"b": 1, "c": {"d": None, "e": 3}, "g": {"h": 5}}, "f": {"i": 6}}


def test_set_keys_leaves_its_argument_alone():
    data, values = {"a": {"b": {"c": 1}}, 1: 2}, {"a.b.c": 2, "m": {"x": 1}, "m.x": 2}
    assert set_keys(data, values) == {"a": {"b": {"c": 2}}, 1: 2, "m": {"x": 2}}
    assert data == {"a": {"b": {"c": 1}}, 1: 2} and values["m"] == {"x": 1}
    assert flat(data) == [("a.b.c", 1), ("1", 2)]


@pytest.mark.parametrize(
    ("word", "words"),
    [
        *((f"seed={seed}", "seed: expected") for seed in ("-1", "9" * 23, "1.5")),
        ("model.width=2147483648", "model.width: expected less than or equal to 1048576"),
        ("model.layers=2147483648", "less than or equal to 10000"),
        ("model.context=1e400", "model.context: expected a valid integer"),
        ("training.data_workers=1" + "0" * 30, "less than or equal to 1024"),
        ("training.batch_size=1000000000000", "less than or equal to 1048576"),
        ("training.steps=10000000000000", "less than or equal to 1000000000000"),
        ("optimizer.lr=1e300", "less than or equal to 1000000000000000"),
        ("training.divergence_factor=.inf", "expected a finite number"),
        ("optimizer.learning_rate=1", "did you mean 'optimizer.lr'"),
        ("learning_rate=1", "did you mean 'optimizer.lr'"),
        ("optimizer.wd=1", "did you mean 'optimizer.weight_decay'"),
        ("training.epochs=1", "did you mean 'training.steps'"),
        (".".join(["a"] * 1000) + "=1", "unknown key"),
        ("model.width=100", "model.width 100 is not a multiple of model.head_dim 16"),
        ("data.source=local", "data.path is missing: the file or folder of the local source"),
        ("schedule.warmup_steps=151", "schedule.warmup_steps 151 is more than training.steps 150"),
    ],
)
def test_bounds_misspelt_keys_and_impossible_combinations_are_explained(word, words):
    with pytest.raises(UserError, match=words):
        load(Config, LAPTOP, [word])


@pytest.mark.parametrize(("name", "eps"), [("adam", 1e-9), ("adafactor", 1e-30)])
def test_epsilon_defaults_to_the_optimisers_own(name, eps):
    assert load(Config, LAPTOP, [f"optimizer.name={name}"]).optimizer.epsilon == eps
    given = load(Config, LAPTOP, [f"optimizer.name={name}", "optimizer.eps=1e-3"])
    assert given.optimizer.epsilon == 1e-3


def test_the_saved_config_is_complete_and_reads_back():
    loaded = load(Config, LAPTOP)
    data = yaml.safe_load(config.to_yaml(loaded))
    assert validate(Config, data, "saved") == loaded
    # Left out: the other rule's keys, the second name of the width, what is not asked for.
    unset = {"model.heads", "training.observe_every", "training.observe_samples"}
    unset |= {"training.eval_per_octave", "optimizer.min_dim_factored", "model.norms"}
    others = "alpha_attention alpha_depth base_depth beta0 gamma0 gamma_units"
    others += " embedding_exponent decay_exponent convention rate_exponent adam_factor"
    unset |= {f"prescription.{key}" for key in others.split()}
    for key, _ in config.leaves(Config):
        node = data
        for part in key.split(".") if key not in unset else ():
            node = node[part]


def test_help_writes_types_in_words_and_indents_what_they_mean():
    class Kinds(config.Section):
        rule: Literal["full", "none"] | Literal["global"] | None = None
        """What aligns,
        in two lines."""
        sizes: list[Annotated[int, Field(ge=0, lt=5)]] = [1]
        """Sizes."""

    assert config.describe(Kinds).splitlines()[-5:] == [
        "  rule (full, none or global or none, default none)",
        "      What aligns,",
        "      in two lines.",
        "  sizes (list[int], default [1])",
        "      Sizes.",
    ]
