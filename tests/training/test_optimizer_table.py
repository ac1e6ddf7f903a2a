"""The table of the optimisers that the loop knows."""

import pytest

from param_groups.families import OPTIMIZER_FAMILY
from tests.training.test_optimizers import CASES, REFERENCES, group, parameter
from training.errors import UserError
from training.optim.optimizers import DEFAULTS, OPTIMIZERS, build


def test_what_cannot_be_built_is_one_line():
    with pytest.raises(UserError) as caught:
        build("adam_atan", [group([parameter([1.0])])])
    assert str(caught.value) == (
        f"unknown optimizer 'adam_atan'; did you mean 'adam_atan2'? Known: {', '.join(OPTIMIZERS)}"
    )
    with pytest.raises(UserError, match="fused=True: adafactor has no fused kernel"):
        build("adafactor", [group([parameter([1.0])])], fused=True)


def test_the_table_has_the_optimisers_whose_exponents_are_known():
    assert OPTIMIZERS.keys() == OPTIMIZER_FAMILY.keys()
    assert {name for name, _ in CASES} == {*OPTIMIZERS} - {"muon"} == set(REFERENCES)
    accepted = {key for kind in OPTIMIZERS.values() for key in kind.numbers}
    assert accepted == DEFAULTS.keys()
