"""The contract of an experiment: what `load_experiment` finds, and what it refuses."""

import pytest

from training.errors import UserError
from training.experiment import load_experiment


def test_an_unknown_experiment_is_refused_with_the_nearest_name():
    with pytest.raises(UserError) as caught:
        load_experiment("nanolm", "sweep.yaml")
    assert str(caught.value) == (
        "sweep.yaml: experiment 'nanolm' has no train.py here; did you mean 'nanolm_c4'?; run from "
        "the repository's root and give the folder's name"
    )


@pytest.mark.parametrize("content", ["", "EXPERIMENT = 'a name'\n"])
def test_a_train_file_without_an_experiment_is_named(tmp_path, monkeypatch, content):
    name = "bare_" + tmp_path.name.replace("-", "_")
    (tmp_path / name).mkdir()
    file = tmp_path / name / "train.py"
    file.write_text(content)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UserError, match=f"{file} has no EXPERIMENT; add one that is a training"):
        load_experiment(name)


def test_a_failing_import_inside_a_train_file_keeps_its_own_error(tmp_path, monkeypatch):
    name = "failing_" + tmp_path.name.replace("-", "_")
    (tmp_path / name).mkdir()
    (tmp_path / name / "train.py").write_text("import no_such_package\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        load_experiment(name)
