"""What the repository promises of its own files: the lock, the package, the site, SECURITY.md."""

import importlib
import os
import re
import shutil
import socket
import subprocess
import sys
import tarfile
import zipfile

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import param_groups
from tests.test_imports import MODULES, imports
from tests.tracked import ROOT


def entries(name):
    """The requirement lines of a file, each with what is continued below it."""
    text = (ROOT / name).read_text().replace("\\\n", " ")
    lines = (re.sub(r"(^|\s)#.*", "", line).strip() for line in text.splitlines())
    return [line for line in lines if line]


def locked():
    found = {}
    for line in entries("requirements.lock"):
        requirement = Requirement(line.split("--hash")[0].strip())
        found.setdefault(canonicalize_name(requirement.name), []).append((requirement, line))
    return found


def test_every_requirement_is_locked_at_its_version():
    lock = locked()
    for line in entries("requirements.txt"):
        wanted = Requirement(line)
        versions = {str(found.specifier) for found, _ in lock[canonicalize_name(wanted.name)]}
        assert versions == {str(wanted.specifier)}, f"{wanted}: run bash scripts/lock.sh"


def test_every_locked_file_has_a_hash_and_no_address():
    lock = locked()
    assert len(lock) > 100
    for requirements in lock.values():
        for requirement, line in requirements:
            assert re.fullmatch(r"==[^*,]+", str(requirement.specifier)), line
            assert requirement.url is None
            assert re.search(r"--hash=sha256:[0-9a-f]{64}( |$)", line), requirement
    assert "://" not in (ROOT / "requirements.lock").read_text()


SOURCE = "antlr4-python3-runtime"  # published without a wheel


@pytest.mark.parametrize("uv", ["works", "fails"])
def test_only_hashed_wheels_are_installed_and_one_source_with_the_locked_setuptools(tmp_path, uv):
    assert SOURCE in locked() and "setuptools" in locked()
    for name in ("scripts/environment.sh", "requirements.lock"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    commands = tmp_path / ".venv/bin"
    commands.mkdir(parents=True)
    (commands / "activate").write_text("")
    for name in ("python", "uv"):
        (commands / name).write_text(
            f'#!/bin/sh\necho {name} "$@" >>"{tmp_path}/calls"\n'
            f'case "$*" in *first.lock*) cat .venv/first.lock >>"{tmp_path}/first";; esac\n'
            + "exit 1\n"
            * (name == "uv" and uv == "fails")
        )
        (commands / name).chmod(0o755)
    script = ["bash", "-euo", "pipefail", "-c", ". scripts/environment.sh"]
    env = {key: value for key, value in os.environ.items() if key != "UV_TORCH_BACKEND"}
    subprocess.run(script, cwd=tmp_path, env=env, check=True)
    calls = [line for line in (tmp_path / "calls").read_text().splitlines() if "install" in line]
    assert [call.split(" -r ")[1] for call in calls] == [
        *[".venv/first.lock", "requirements.lock"] * (1 if uv == "works" else 2)
    ]
    assert all("--require-hashes" in call and "--only-binary :all:" in call for call in calls)
    for call in calls:
        exceptions = re.findall(r"--no-binary (\S+)", call)
        assert exceptions == ([] if "first.lock" in call else [SOURCE])
    if uv == "works":
        assert f"--no-build-isolation-package {SOURCE} " in calls[-1]
    else:
        assert calls[-1].startswith("python") and " --no-build-isolation " in calls[-1]
    first = (tmp_path / "first").read_text()
    for name in ("uv", "setuptools"):
        [(_, line)] = locked()[name]
        assert all(digest in first for digest in re.findall(r"sha256:\w+", line))


# What leaves the repository: the package for an index, and the pages of the site


URL = "https://example.org/owner/name"


@pytest.fixture
def script(monkeypatch):
    """Imports a script, as `python scripts/NAME.py` does."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))

    def load(name):
        for known in ("package", name):
            sys.modules.pop(known, None)
        return importlib.import_module(name)

    yield load
    sys.modules.pop("package", None)


def test_the_package_has_an_address_and_no_relative_link(script, tmp_path, monkeypatch, capsys):
    pytest.importorskip("flit_core")
    package = script("package")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["package", URL, "--ref", "v9", "--out", str(tmp_path)])
    package.main()
    wheel, archive = map(str.strip, capsys.readouterr().out.splitlines())
    with zipfile.ZipFile(wheel) as file:
        (name,) = (one for one in file.namelist() if one.endswith("METADATA"))
        metadata = file.read(name).decode()
    head, _, text = metadata.partition("\n\n")
    assert f"Version: {param_groups.__version__}" in head and f"Homepage, {URL}" in head
    extras = set(re.findall("Provides-Extra: (.+)", head))
    assert extras == {"check", "models"}  # nothing for folders that a wheel does not have
    links = [link for link in re.findall(r"\]\(([^)]+)\)", text) if not link.startswith("#")]
    assert links and all(link.startswith("https://") for link in links)
    local = [link.removeprefix(f"{URL}/blob/v9/").partition("#")[0] for link in links]
    assert all((ROOT / path).exists() for path in local if "://" not in path)
    with tarfile.open(archive) as file:
        assert any(one.endswith("param_groups/plan.py") for one in file.getnames())


def test_the_notes_of_a_version_are_the_changelogs(script, monkeypatch, capsys):
    package = script("package")
    assert package.notes(param_groups.__version__).startswith("- `param_groups`, installable")
    for words, said in ((["--notes", "9.9"], "no section 9.9"), (["name"], "address of a reposit")):
        monkeypatch.setattr(sys, "argv", ["package", *words])
        with pytest.raises(SystemExit):
            package.main()
        assert said in capsys.readouterr().err


@pytest.mark.parametrize("url", ["", URL])
def test_pages_of_the_site_link_to_each_other_or_to_the_repository(
    script, tmp_path, url, monkeypatch
):
    monkeypatch.setitem(sys.modules, "torch", None)  # requirements-docs.txt has none
    monkeypatch.delitem(sys.modules, "param_groups.model.trace", raising=False)
    site = script("site_pages")
    docs = tmp_path / "docs"
    docs.mkdir()
    site.prepare(docs, url)
    pages = sorted(docs.rglob("*.md"))
    for page in pages:
        for link in re.findall(r"\]\(([^)#\s]+)[)#]", page.read_text(encoding="utf-8")):
            assert "://" in link or (page.parent / link).exists(), (page, link)
    menu = yaml.safe_load((ROOT / "mkdocs.yml").read_text().replace("@SOURCE@", ""))["nav"]

    def leaves(part):
        if isinstance(part, str):
            return [part]
        values = part.values() if isinstance(part, dict) else part
        return [leaf for value in values for leaf in leaves(value)]

    assert {str(page.relative_to(docs)) for page in pages} == {*leaves(menu)}
    interface = (docs / "api.md").read_text()
    assert "::: param_groups.plan.plan\n" in interface and interface.count(":::") > 20
    for module in (tmp_path / "param_groups").rglob("*.py"):
        compile(module.read_text(), module, "exec")


# What SECURITY.md says of our own files: workflows, the image, and what is never called


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


def test_no_test_finds_a_host():
    with pytest.raises(OSError, match="offline"):
        socket.create_connection(("host.invalid", 443), 1)


def test_training_does_not_reach_fairseq():
    seen, left = set(), {"bart_span_denoise.train"}
    while left:
        seen |= (new := left)
        left = {name for one in new for name in imports(MODULES[one]) & MODULES.keys()} - seen
    assert "bart_span_denoise.data" in seen and FAIRSEQ not in seen
