"""What leaves the repository: the package for an index, and the pages of the documentation site."""

import importlib
import re
import sys
import tarfile
import zipfile

import pytest
import yaml

import param_groups
from tests.tracked import ROOT

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
