"""What SECURITY.md says of our own files: workflows, the image, and what is never called."""

import re

import pytest
import yaml

from tests.test_imports import MODULES, ROOT, imports

WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
INSTALLS = re.compile(r"pip install|scripts/test\.sh|\.ci/run")


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_named_by_commit_and_no_job_both_installs_and_writes(path):
    actions = re.findall(r"uses: (.*)", path.read_text())
    assert actions and all(re.fullmatch(r"[\w/-]+@[0-9a-f]{40} # v[\d.]+", one) for one in actions)
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {}
    for name, job in workflow["jobs"].items():
        rights = {*job["permissions"].values()}
        runs = "\n".join(step.get("run", "") for step in job["steps"])
        assert rights <= {"read"} or not INSTALLS.search(runs), name
        for step in job["steps"]:
            if "actions/checkout" in step.get("uses", ""):
                assert step["with"]["persist-credentials"] is False, name


def test_the_image_is_of_the_locked_environment_and_has_a_user():
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    runs = [line for line in lines if line.startswith("RUN")]
    assert runs[0] == "RUN bash scripts/environment.sh" and "--no-index --no-deps" in runs[1]
    assert not any("install" in line for line in runs[2:])
    assert [line for line in lines if line.startswith("USER")] == ["USER user"]


PROCESSES = "effective_theory.dinan.measure"  # whose own send each other arrays
FAIRSEQ = "bart_span_denoise.fairseq_interop"


@pytest.mark.parametrize("module", MODULES)
def test_no_module_unpickles_or_takes_code_from_a_hub(module):
    text = MODULES[module].read_text(encoding="utf-8")
    names = {name.partition(".")[0] for name in imports(MODULES[module])}
    known = {"pickle"} if module == PROCESSES else set()
    assert not {"pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"} & names - known
    for word in ("allow_pickle=True", "trust_remote_code", "weights_only=False", "yaml.unsafe"):
        assert word not in text
    for call in re.findall(r"torch\.load\(.*", text):
        assert module == FAIRSEQ and "weights_only=True" in call
    for call in re.findall(r"yaml\.(?:full_)?load\((.*)", text):
        assert re.search(r"yaml\.CSafeLoader|_Loader\)", call), call
    assert "fairseq" not in names | {*re.findall(r'import_module\("(fairseq)', text)} or (
        module == FAIRSEQ
    )


def test_training_does_not_reach_fairseq():
    seen, left = set(), {"bart_span_denoise.train"}
    while left:
        seen |= (new := left)
        left = {name for one in new for name in imports(MODULES[one]) & MODULES.keys()} - seen
    assert "bart_span_denoise.data" in seen and FAIRSEQ not in seen
