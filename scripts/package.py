"""Wheel and source archive of param_groups for an index, where a README stands alone.

    python scripts/package.py https://github.com/OWNER/NAME --ref v0.1.0 --out dist
    python scripts/package.py --notes 0.1.0      # what CHANGELOG.md says of a version

Adds the address to the metadata and makes the README's links absolute, in a copy: the tree stays as
it is. Needs flit_core alone.
"""

import argparse
import os
import posixpath
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# [text](target) and ![text](target), but for addresses and places on the same page.
LINK = re.compile(r"(!?\[[^\]]*\]\()(?![a-z]+:|#)([^)\s]+)\)")


def relinked(text: str, folder: str, link: Callable[[str], str]) -> str:
    """A page of `folder` whose relative links are what `link` makes of their paths in the tree."""

    def one(found: re.Match[str]) -> str:
        path, mark, place = found[2].partition("#")
        return f"{found[1]}{link(posixpath.normpath(posixpath.join(folder, path)))}{mark}{place})"

    return LINK.sub(one, text)


def prepare(folder: Path, url: str, ref: str) -> None:
    """The files of the package with absolute links and addresses, in an empty folder."""
    listed = ["git", "ls-files", "param_groups", "pyproject.toml", "LICENSE"]
    names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in names.split():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    readme = folder / "param_groups" / "README.md"
    text = readme.read_text(encoding="utf-8")
    text = relinked(text, "param_groups", lambda path: f"{url}/blob/{ref}/{path}")
    readme.write_text(text, encoding="utf-8")
    addresses = {
        "Homepage": url,
        "Changes": f"{url}/blob/{ref}/CHANGELOG.md",
        "Issues": f"{url}/issues",
    }
    lines = "".join(f'{name} = "{address}"\n' for name, address in addresses.items())
    project = folder / "pyproject.toml"
    with project.open("a", encoding="utf-8") as file:
        file.write(f"\n[project.urls]\n{lines}")


def notes(version: str) -> str:
    """What CHANGELOG.md says of a version; KeyError if it says nothing."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    parts = re.split(r"^## (.+)\n", text, flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))[version].strip()


def main() -> None:
    raw = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("url", nargs="?", default="", help="of the repository, https://...")
    parser.add_argument("--notes", metavar="VERSION", help="print these and stop")
    parser.add_argument("--ref", default="main", help="the tag that links lead to")
    parser.add_argument("--out", type=Path, default=Path("dist"))
    args = parser.parse_args()
    if args.notes is not None:
        try:
            print(notes(args.notes))
        except KeyError:
            parser.error(f"CHANGELOG.md has no section {args.notes}")
        return
    if not re.fullmatch(r"https://[^\s/]+/[^\s]+[^\s/]", args.url):
        parser.error(f"{args.url}: expected the address of a repository, https://HOST/OWNER/NAME")
    from flit_core import buildapi

    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        prepare(Path(name), args.url, args.ref)
        os.chdir(name)
        for build in (buildapi.build_wheel, buildapi.build_sdist):
            print(out / build(str(out)))
        os.chdir(out)


if __name__ == "__main__":
    main()
