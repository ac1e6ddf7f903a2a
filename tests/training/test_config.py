"""Configs: what is read, what is refused and in which words."""

import resource
from pathlib import Path
from typing import Annotated, Literal

import pytest
import yaml
from pydantic import Field

from nanolm_c4.config import Config
from training import config
from training.config import load, parse_yaml, set_keys, validate
from training.errors import UserError
from training.runs import flat

LAPTOP = "nanolm_c4/configs/laptop.yaml"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *[("1e-9", 1e-9), ("2E+3", 2000.0), ("1.5e-3", 1.5e-3), ("-1e2", -100.0), ("1_0", 10)],
        *((word, word) for word in ("e5", "1e", "abc", "0x1e-9")),
    ],
)
def test_exponents_without_a_dot_are_numbers_and_other_words_stay_words(text, value):
    assert parse_yaml(text, "here") == value


def test_a_file_without_end_is_not_read_to_its_end():
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (64 << 30, hard))  # in case it is
    try:
        with pytest.raises(UserError, match="/dev/zero: more than 20,000,000 characters"):
            config.read_yaml(Path("/dev/zero"))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def test_overrides_reach_nested_keys_and_keep_types():
    loaded = load(Config, LAPTOP, ["optimizer.eps=1e-12", "model.width=128", "data.path=null"])
    assert loaded.optimizer.eps == 1e-12
    assert loaded.model.width == 128
    assert loaded.data.path is None


def test_a_mapping_is_merged_over_the_section_there():
    data = {"a": {"b": 1, "c": {"d": 2, "e": 3}}, "f": 4}
    changed = set_keys(data, {"a": {"c": {"d": None}, "g": {"h": 5}}, "f": {"i": 6}})
    assert changed == {"a": {"b": 1, "c": {"d": None, "e": 3}, "g": {"h": 5}}, "f": {"i": 6}}


def test_set_keys_leaves_its_argument_alone():
    data, values = {"a": {"b": {"c": 1}}, 1: 2}, {"a.b.c": 2, "m": {"x": 1}, "m.x": 2}
    assert set_keys(data, values) == {"a": {"b": {"c": 2}}, 1: 2, "m": {"x": 2}}
    assert data == {"a": {"b": {"c": 1}}, 1: 2} and values["m"] == {"x": 1}
    assert flat(data) == [("a.b.c", 1), ("1", 2)]


@pytest.mark.parametrize(("name", "eps"), [("adam", 1e-9), ("adafactor", 1e-30)])
def test_epsilon_defaults_to_the_optimisers_own(name, eps):
    assert load(Config, LAPTOP, [f"optimizer.name={name}"]).optimizer.epsilon == eps
    given = load(Config, LAPTOP, [f"optimizer.name={name}", "optimizer.eps=1e-3"])
    assert given.optimizer.epsilon == 1e-3


def test_observing_every_no_step_is_observing_nothing():
    every = "training.observe_every=0"
    assert load(Config, LAPTOP, [every]).model_dump() == load(Config, LAPTOP).model_dump()
    with pytest.raises(UserError, match="observe_samples 3 is given, but nothing is observed"):
        load(Config, LAPTOP, [every, "training.observe_samples=3"])


def test_the_saved_config_is_complete_and_reads_back():
    loaded = load(Config, LAPTOP)
    data = yaml.safe_load(config.to_yaml(loaded))
    assert validate(Config, data, "saved") == loaded
    # Left out: the other rule's keys, the second name of the width, what is not asked for.
    unset = {"model.heads", "model.tied", "training.observe_every", "training.observe_samples"}
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
