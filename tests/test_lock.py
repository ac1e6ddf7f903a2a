"""The lock file is whole: every package of requirements.txt at its version, with hashes."""

import re
from pathlib import Path

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
