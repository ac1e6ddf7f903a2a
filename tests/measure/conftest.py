"""Little documents, and an experiment in a package of its own whose runs are observed."""

import importlib
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from training import config as configs


class Toy(SimpleNamespace):
    """All of the experiment's train.py, with a folder of runs."""

    settings = {
        "optimizer": {"name": "adam", "lr": 0.02},
        "schedule": {"name": "constant"},
        "training": {"steps": 5, "batch_size": 4, "observe_every": 2, "observe_samples": 3},
        "checkpoint": {"every": 2, "minutes": None, "final": True},
    }

    def __init__(self, train, root):
        name = train.__name__.partition(".")[0]
        super().__init__(**vars(train), folder=root / "results" / name / "single")

    def config(self, **changes):
        """The settings with changed keys, whose dots are written `__`."""
        keys = {key.replace("__", "."): value for key, value in changes.items()}
        data = configs.set_keys(self.settings, keys)
        if not data["training"]["observe_every"]:
            del data["training"]["observe_samples"]
        return configs.validate(self.Config, data, "toy")

    def train(self, name, **changes):
        summary = self.run(self.config(**changes), self.folder / name)
        assert summary["status"] == "finished"
        return self.folder / name


@pytest.fixture(scope="session")
def package(tmp_path_factory):
    """Makes the toy with its runs under a given folder."""
    root = tmp_path_factory.mktemp("package")
    name = "observed_" + root.name.replace("-", "_")
    (root / name).mkdir()
    (root / name / "__init__.py").write_text("")
    shutil.copy(Path(__file__).with_name("observed_toy.py"), root / name / "train.py")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(root))
        yield partial(Toy, importlib.import_module(f"{name}.train"))


@pytest.fixture
def toy(package, tmp_path):
    return package(tmp_path)


@pytest.fixture(scope="session")
def run(package, tmp_path_factory):
    """A finished run, to look at."""
    return package(tmp_path_factory.mktemp("run")).train("run")
