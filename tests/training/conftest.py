"""Runs of the toy that are trained once."""

import shutil

import pytest

from tests.run_folders import dies_after
from tests.training import toy_run as toy


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    """A run that nothing has interrupted, which tests leave alone."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert toy.train(folder)["status"] == "finished"
    return folder


@pytest.fixture(scope="session")
def died(tmp_path_factory):
    """A run that died after step 5, which tests leave alone."""
    folder = tmp_path_factory.mktemp("died") / "run"
    dies_after(5, toy.train, folder)
    return folder


@pytest.fixture
def run(died, tmp_path):
    """A copy of it in tmp_path / "run"."""
    return shutil.copytree(died, tmp_path / "run")
