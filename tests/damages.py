"""The table of damaged files, `damages.txt`: what happens to a file, and what its reader says."""

import gzip
import random
import re
import shutil
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Damage:
    """A row of the table."""

    name: str
    change: str
    words: str

    def __str__(self):
        return f"{self.name} {self.change}"

    def do(self, folder):
        """Does to a file of the folder what the row says; its path."""
        path = folder / self.name
        if self.change in ("gone", "emptied"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
            if self.change == "emptied":
                path.mkdir()
        else:
            was = path.read_bytes() if path.exists() else b""
            names = {"was": was, "flip": flip, "gzip": gzip, "random": random}
            content = eval(self.change, names)
            assert content != was
            path.write_bytes(content)
        return path

    def follows(self, start, line):
        """Whether a line is the start and then the row's words."""
        return re.match(".*".join(map(re.escape, (start + self.words).split("..."))), line)


def flip(content, place):
    place %= len(content)
    return content[:place] + bytes([content[place] ^ 0x40]) + content[place + 1 :]


def of(reader):
    """The rows of a reader's section."""
    text = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8")
    section = text.split(f"## {reader}\n")[1].partition("\n## ")[0]
    # What is no prose must be a row, and there must be some: none can be lost by its form.
    rows = [line.split(" | ") for line in section.strip().split("\n\n", 1)[1].splitlines()]
    assert all(len(row) == 3 and all(row) for row in rows), f"{reader}: a row has three fields"
    return [Damage(*row) for row in rows]


def named(reader, name, change):
    """The row of a reader's section with this file and change."""
    (row,) = [row for row in of(reader) if (row.name, row.change) == (name, change)]
    return row
