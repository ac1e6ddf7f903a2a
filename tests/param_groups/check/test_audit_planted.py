"""The audit under planted mistakes, and every shipped rule under every decay: no word is wrong."""

import dataclasses
import functools

import pytest
import torch

from param_groups.check import audit
from param_groups.check.reading import read
from tests.param_groups.check import planted
from training.optim import optimizers

pytestmark = pytest.mark.xdist_group("planted")
THOROUGH = pytest.mark.thorough
HALVES = (0, pytest.param(1, marks=THOROUGH))
SUBJECTS = planted.subjects(0)
WRONG, RIGHT = 400, 0  # the right ones are the product below


@functools.cache
def built(subject, size):
    """The model with its drawn values, and the right plan."""
    model, made = subject.build(size)
    draw = torch.Generator().manual_seed(0)
    values = {}
    for row in made.rows:
        values[row.name] = row.init_mean + row.init_std * torch.randn(row.shape, generator=draw)
    model.load_state_dict(values, strict=False)
    return model, made


def audited(subject, case=None, rule=""):
    """What the audit says of the optimiser over a plan's groups, right or planted."""
    readings = {}
    for size in subject.sizes:
        model, right = built(subject, size)
        made = case.plan(size) if case else right
        groups = made.groups(model, check=False, several=True)
        found = read(model, [optimizers.build(str(subject.make(size).optimizer), groups)])
        for row, old in zip(made.rows, right.rows, strict=True):  # of tensors that start otherwise
            scale = (row.init_std + abs(row.init_mean)) / (old.init_std + abs(old.init_mean) or 1)
            one = found[row.name]
            found[row.name] = dataclasses.replace(one, init=one.init * scale)
        readings[size] = found
    return audit.audit(readings, depth=subject.size == "depth", rule=rule)


def refused(subject, mode):
    """Decays that `plan` refuses: they hold the rate's power twice."""
    own = subject.label.startswith(("everett mup decay", "completep"))
    return own and mode == "per_group"


# Every decay, absorbed and not, so that two that follow each other are of two decays.
WAYS = [(*planted.DECAYS[(k + k // 4) % 4], k < 4) for k in range(8)]


@pytest.mark.thorough
@pytest.mark.parametrize("part", [0, *(pytest.param(n, marks=THOROUGH) for n in (1, 2, 3))])
@pytest.mark.parametrize("place", range(len(SUBJECTS)), ids=lambda at: SUBJECTS[at].label)
def test_every_shipped_rule_audits_clean_under_every_decay(place, part):
    """In two of eight ways, absorbed and not; the next rule has others, and the parts have all."""
    subject = SUBJECTS[place]
    for wd, mode, absorb in WAYS[(place + part) % 4 :: 4]:
        if not refused(subject, mode):
            decay = (wd / 10 if subject.label.startswith("dinan") else wd, mode)
            result = audited(dataclasses.replace(subject, decay=decay, absorb=absorb))
            assert not result.deviations and not result.unread, (absorb, mode)


def invisible(case):
    """Numbers that the audit does not judge, as its help says; "" where it does."""
    if case.number == "start" and (case.kind in ("vector", "bias") or case.subject.size == "depth"):
        return "initial sizes of vectors, and in a scan of the depth"
    return ""


@functools.cache
def right_name(subject):
    """The rule by which the right plan goes."""
    return audited(subject).nearest


@pytest.mark.parametrize("half", HALVES)
def test_planted_mistakes_deviate_from_the_rule_that_is_meant(half):
    cases = [c for c in planted.cases(1, WRONG, RIGHT) if not invisible(c)][half::2]
    assert len(cases) > 150
    result = {case: audited(case.subject, case, right_name(case.subject)) for case in cases}
    missed = [f"{case}: {one.nearest}" for case, one in result.items() if not one.deviations]
    assert not missed, "\n".join(missed)


def test_a_mistake_that_makes_another_rule_is_told_by_the_rule_that_is_meant(capsys):
    """muP with a constant rate is what one has without a plan."""
    subject = next(one for one in SUBJECTS if one.label.startswith("everett mup adam full"))
    cases = [planted.Case(subject, k, "rate", 1.0) for k in ("query", "hidden", "readout")]
    values = audited(subject).nearest
    one = planted.Case(subject, "readout", "rate", 1.0)
    assert values == "mup, full alignment" and len(cases) == 3
    for case in cases:
        assert audited(subject, case, "mup").deviations, str(case)
    assert audited(subject, one).nearest != values  # which is another's, and no deviation of it
