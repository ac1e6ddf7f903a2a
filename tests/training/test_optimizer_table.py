"""The table of the optimisers that the loop knows."""

from param_groups.families import OPTIMIZER_FAMILY
from tests.training.test_optimizers import CASES, REFERENCES
from training.optim.optimizers import DEFAULTS, OPTIMIZERS


def test_the_table_has_the_optimisers_whose_exponents_are_known():
    assert OPTIMIZERS.keys() == OPTIMIZER_FAMILY.keys()
    assert {name for name, _ in CASES} == {*OPTIMIZERS} - {"muon"} == set(REFERENCES)
    accepted = {key for kind in OPTIMIZERS.values() for key in kind.numbers}
    assert accepted == DEFAULTS.keys()
