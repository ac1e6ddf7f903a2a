"""The documentation site, made of what is written: READMEs, docstrings, claims and pictures.

    pip install -r requirements-docs.txt
    python scripts/site_pages.py [--url https://github.com/OWNER/NAME] [--out site]

Pages are copies of the repository's Markdown files; nothing is written here but lists of names.
A link to a file that is no page leads to --url, and without one becomes plain text. A warning is an
error.
"""

import argparse
import ast
import importlib
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from package import ROOT, relinked

sys.path.insert(0, str(ROOT))
param_groups = importlib.import_module("param_groups")


# Pictures of other hosts, and pages of workflows, which are no files of the repository.
BADGE = re.compile(r"^(\[!\[|!\[[^]]*\]\(https:).*\n", re.M)

# A command in a table is not cut inside a word: the table scrolls.
CSS = ".md-typeset td code { word-break: normal; overflow-wrap: normal; }\n"


def tracked(*patterns: str) -> list[str]:
    command, how = ["git", "ls-files", *patterns], {"capture_output": True, "text": True}
    return subprocess.run(command, cwd=ROOT, check=True, **how).stdout.split()


def api() -> str:
    """What `param_groups` exports, by mkdocstrings; read, as an import may want torch."""
    tree = ast.parse((ROOT / "param_groups" / "__init__.py").read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    places = {name.name: f"{node.module}.{name.name}" for node in imports for name in node.names}
    names = [f"::: {places[name]}" for name in param_groups.__all__]
    return "\n\n".join(["# param_groups: the interface", *names]) + "\n"


def examples(source: str) -> str:
    """A module whose docstrings have a section Examples, as mkdocstrings reads, from >>> on."""
    lines, inside = [], False
    for line in source.split("\n"):
        bare = line.lstrip()
        if bare.startswith(">>> ") and not inside:
            lines.append(f"{line[: -len(bare)]}Examples:")
            inside = True
        inside = inside and bare != '"""'
        lines.append(f"    {line}" if inside and bare else line)
    return "\n".join(lines)


def gallery(pictures: list[str]) -> str:
    """All shipped pictures by paper, each under its name."""
    lines, paper = ["# Figures"], ""
    for picture in sorted(pictures):
        folder = Path(picture).parent.name
        if folder == "figures":
            continue
        lines += [f"## {folder}"] * (folder != paper)
        name, paper = Path(picture).stem, folder
        lines += [f"### {name}", f"![{name}]({picture})"]
    return "\n\n".join(lines) + "\n"


def site_page(page: str, text: str, here: set[str], url: str) -> str:
    """A page whose links lead to other pages and pictures, to the repository, or nowhere."""
    up, away = "../" * page.count("/"), f"{url}/blob/main/"
    link = lambda path: (up if path in here else away) + path
    text = relinked(BADGE.sub("", text), str(Path(page).parent), link)
    return text if url else re.sub(r"\[([^\]]*)\]\(/blob/main/[^)]*\)", r"\1", text)


def prepare(folder: Path, url: str) -> None:
    """The pages and pictures, in an empty folder, and beside it the package that they tell of."""
    pictures = tracked("plots/figures/*.png")
    pages = [page for page in tracked("*.md") if not Path(ROOT / page).is_symlink()]
    here = {*pictures, *pages}
    for page in pages:
        text = site_page(page, (ROOT / page).read_text(encoding="utf-8"), here, url)
        (folder / page).parent.mkdir(parents=True, exist_ok=True)
        (folder / page).write_text(text, encoding="utf-8")
    for picture in pictures:
        (folder / picture).parent.mkdir(parents=True, exist_ok=True)
        (folder / picture).symlink_to(ROOT / picture)
    for module in tracked("param_groups/*.py"):
        file = folder.parent / module
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(examples((ROOT / module).read_text(encoding="utf-8")), encoding="utf-8")
    (folder / "site.css").write_text(CSS, encoding="utf-8")
    (folder / "api.md").write_text(api(), encoding="utf-8")
    (folder / "figures.md").write_text(gallery(pictures), encoding="utf-8")


def main() -> int:
    raw = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--url", default="", help="of the repository")
    parser.add_argument("--out", type=Path, default=Path("site"))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        docs = Path(name, "docs")
        docs.mkdir()
        prepare(docs, args.url.rstrip("/"))
        config = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
        extra = f"docs_dir: {docs}\nsite_dir: {args.out.resolve()}\n"
        extra += f"repo_url: {args.url}\n" * bool(args.url)
        Path(name, "mkdocs.yml").write_text(config.replace("@SOURCE@", name) + extra)
        command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", f"{name}/mkdocs.yml"]
        return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
