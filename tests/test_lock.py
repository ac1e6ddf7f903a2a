"""The lock file is whole, and scripts/environment.sh installs nothing but its files."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]


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
