"""Fetches what the paper-size configs read, checks it, and puts it where they look for it.

`bash scripts/download.sh` says of each data set how large it is and how long it takes; with names
it fetches them (`scripts.fetch`): what was cut off is continued, what is there is checked.

Only https is spoken, also where a server redirects to. `--mirror URL` asks URL/HOST/PATH in place
of https://HOST/PATH, which may be a proxy or a copy; http is accepted from this machine alone.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from scripts.fetch import AGAIN, PARTIAL, Fetcher, File, amount, noted, say, settle
from training.errors import UserError, nearest, one_line_errors
from training.files import locked, write_bytes, writing
from training.text import C4_NAME, C4_PATH, C4_REVISION, FETCHED

DATA = Path("data")

# What is published. Sizes and checksums are the publishers' unless another source is named; where
# there is none, the content is checked and its SHA-256 noted.
HUB = "https://huggingface.co"
# Card of the hub's c4: 326,778,635,540 bytes of `en`, 364,868,892 documents to train on and 364,608
# to validate on. Size and SHA-256 of each file are asked of the hub, at C4_REVISION. Dodge et al.
# (2021), Table 1: 156e9 words, so over 152e6 tokens a file; paper.yaml takes 6.6e9, of 44 files,
# the compute-optimal curves of four sweeps 77e9, of 507 (nanolm_c4.sh).
C4_FILES = {"validation": 8, "train": 1024}
C4_FILE, C4_VALIDATION, C4_SHARDS = 319_000_000, 330_000_000, 48
C4_FILE_TOKENS, C4_TOKENS, C4_ALL_TOKENS = 152_000_000, 6_620_000_000, 77_020_000_000
PATHS_AT_ONCE = 500  # that the hub is asked about; it answers for 1,000 at most
# The hub's pointer of this commit to spiece.model, the same file for all sizes of T5.
T5 = File(
    f"{HUB}/google-t5/t5-base/resolve/a9723ea7f1b39c1eae772870f3b547bf6ef7e6c1/spiece.model",
    DATA / "t5/spiece.model",
    791_656,
    "d60acb128cf7b7f2536e8f38a5b18a05535c9e14c7a355904270e15b0945ea86",
)
# github.com/preetum/cifar5m names the bucket and no checksums. Nakkiran et al. (2021): 1,000,448
# images a part, of 3,072 bytes and a label each.
CIFAR5M = "https://storage.googleapis.com/gresearch/cifar5m/part{}.npz"
PART_IMAGES = 1_000_448
# tensorflow_datasets/url_checksums/cifar10.txt; the authors' page has the MD5 of the same archive.
CIFAR10 = File(
    "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
    DATA / "cifar10/cifar-10-binary.tar.gz",
    170_052_171,
    "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
)
BATCH_IMAGES = 10_000
# OpenAI's own copies, with the checksums that tiktoken (openai_public.py, gpt2) compares. fairseq
# publishes none of dict.txt.
GPT2 = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main"
BPE = (
    File(
        f"{GPT2}/encoder.json",
        DATA / "gpt2/encoder.json",
        1_042_301,
        "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    ),
    File(
        f"{GPT2}/vocab.bpe",
        DATA / "gpt2/vocab.bpe",
        456_318,
        "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    ),
    File(
        "https://dl.fbaipublicfiles.com/fairseq/gpt2_bpe/dict.txt",
        DATA / "gpt2/dict.txt",
        600_000,
        exact=False,
        check=lambda path: _check_dictionary(path),
    ),
)
BART_SYMBOLS = 50_265  # vocab_size of bart_large.yaml, the special symbols among them
# Russakovsky et al. (2015), Table 2; MD5 and names of the archives are torchvision's.
IMAGENET = {"train": 1_281_167, "val": 50_000}
IMAGENET_CLASSES = 1000
IMAGENET_PAGE = "https://image-net.org/challenges/LSVRC/2012/2012-downloads.php"
IMAGENET_BYTES = 147_897_477_120 + 6_744_924_160


# The data sets


def _c4(fetcher: Fetcher, options: argparse.Namespace) -> None:
    folder = FETCHED / C4_REVISION
    wanted = {**C4_FILES, "train": options.shards}
    names = [
        f"{C4_NAME}/c4-{split}.{number:05d}-of-{C4_FILES[split]:05d}.json.gz"
        for split, count in wanted.items()
        for number in range(count)
    ]
    known = noted(folder / C4_NAME)
    unknown = [
        name for name in names if Path(name).name not in known or not (folder / name).exists()
    ]
    told = _on_hub(fetcher, unknown) if unknown else {}
    fetcher.fetch(T5)
    for name in names:
        size, digest = told.get(name, (0, None))
        url = f"{HUB}/datasets/{C4_PATH}/resolve/{C4_REVISION}/{name}"
        fetcher.fetch(File(url, folder / name, size, digest))


def _on_hub(fetcher: Fetcher, names: list[str]) -> dict[str, tuple[int, str]]:
    """Size and SHA-256 of files of C4 at C4_REVISION, as the hub has them."""
    url = f"{HUB}/api/datasets/{C4_PATH}/paths-info/{C4_REVISION}"
    answers = [
        fetcher.request("POST", url, data={"paths": names[first : first + PATHS_AT_ONCE]})
        for first in range(0, len(names), PATHS_AT_ONCE)
    ]
    try:
        large = {entry["path"]: entry["lfs"] for answer in answers for entry in answer.json()}
        return {name: (int(large[name]["size"]), str(large[name]["oid"])) for name in names}
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{url}: no size and SHA-256 of each of {len(names)} files came "
            f"({type(error).__name__}: {error}); {AGAIN}"
        ) from None


def _cifar5m(fetcher: Fetcher, options: argparse.Namespace) -> None:
    from vit_cifar5m.data import PART_NAMES, PARTS, open_part

    def check(path: Path) -> None:
        try:
            _, labels = open_part(path, DATA / "cache/cifar5m")  # the config's data.cache_dir
        except UserError as error:
            if not str(error).startswith(f"{path}:"):  # the cache's fault: the file is kept
                raise OSError(str(error)) from None
            raise
        _check_count(path, len(labels), PART_IMAGES)

    for number in range(PARTS):
        names = [DATA / "cifar5m" / name.format(number) for name in PART_NAMES]
        path = next((name for name in names if name.exists()), names[-1])
        fetcher.fetch(File(CIFAR5M.format(number), path, _part_bytes(), exact=False, check=check))


def _part_bytes() -> int:
    return PART_IMAGES * (3072 + 8)


def _check_count(path: Path, found: int, expected: int) -> None:
    if found != expected:
        raise UserError(
            f"{path}: {found} images, expected {expected}; delete it if it is still there, and "
            f"{AGAIN}"
        )


def _cifar10(fetcher: Fetcher, options: argparse.Namespace) -> None:
    from vit_cifar5m.data import BINARY_TEST, BINARY_TRAIN, open_batch

    fetcher.fetch(CIFAR10)
    batches, names = CIFAR10.path.parent / "cifar-10-batches-bin", (*BINARY_TRAIN, BINARY_TEST)
    with writing(batches), tarfile.open(CIFAR10.path) as archive:
        batches.mkdir(exist_ok=True)
        for name in names:  # each alone: one that was damaged and deleted comes again
            if not (batches / name).exists():
                member = f"{batches.name}/{name}"
                archive.extract(member, batches.parent / PARTIAL, filter="data")
                os.replace(batches.parent / PARTIAL / member, batches / name)

    def check(path: Path) -> None:
        _, labels = open_batch(batches, path.name)
        _check_count(path, len(labels), BATCH_IMAGES)

    for name in names:
        settle(File(CIFAR10.url, batches / name, 0, check=check), batches / name)


def _imagenet(fetcher: Fetcher, options: argparse.Namespace) -> None:
    from torchvision.datasets import imagenet as published

    from vit_imagenet.images import image_folder

    folder, archives = DATA / "imagenet", Path(options.archives).expanduser().resolve()
    splits = [split for split in IMAGENET if not (folder / split).is_dir()]
    needed = {
        key: archives / published.ARCHIVE_META[key][0]
        for key in (*splits, *(["devkit"] if "val" in splits else []))
    }
    missing = [path.name for path in needed.values() if not path.is_file()]
    if missing:
        raise UserError(
            f"{archives}: no {', '.join(missing)} there, which need a login: fetch by hand from "
            f"{IMAGENET_PAGE} into this folder, or name theirs with --archives"
        )
    partial = folder / PARTIAL
    for split in splits:
        say(f"{folder / split}: from {needed[split]}, whose MD5 is compared first")
        shutil.rmtree(partial, ignore_errors=True)  # of a command that was cut off
        try:
            with writing(partial):
                partial.mkdir(parents=True)
                if split == "train":
                    published.parse_train_archive(partial, str(needed["train"]))
                else:
                    published.parse_devkit_archive(partial, str(needed["devkit"]))
                    published.parse_val_archive(partial, str(needed["val"]))
        except RuntimeError as error:  # "The archive FILE is not present ... or is corrupted."
            file = str(error).partition(" is not ")[0].removeprefix("The archive ")
            raise UserError(
                f"{file}: its MD5 is not the published one; fetch it again from {IMAGENET_PAGE}"
            ) from None
        os.rename(partial / split, folder / split)
    shutil.rmtree(partial, ignore_errors=True)
    *images, classes = image_folder(str(folder))
    for split, files in zip(IMAGENET, images, strict=True):
        _check_count(folder / split, len(files), IMAGENET[split])
    if len(classes) != IMAGENET_CLASSES:
        raise UserError(f"{folder}: {len(classes)} classes, expected {IMAGENET_CLASSES}")


def _bart(fetcher: Fetcher, options: argparse.Namespace) -> None:
    from bart_span_denoise import bpe, corpora, data
    from bart_span_denoise.config import DataConfig

    for file in BPE:
        fetcher.fetch(file)
    encoder, vocab, dictionary = (str(file.path) for file in BPE)
    folder = DATA / "bart"
    if not folder.exists():
        if options.text is None:
            raise UserError(
                f"{folder}: no corpus there, and the paper's cannot be fetched: give your own text "
                "with --text FOLDER (.txt, .jsonl, .jsonl.gz, .json.gz, .parquet), or make the "
                "folder with fairseq-preprocess (bart_span_denoise/README.md)"
            )
        text = DataConfig(
            source="text",
            path=options.text,
            bpe_encoder=encoder,
            bpe_vocab=vocab,
            bpe_dictionary=dictionary,
            max_validation_tokens=20_000_000,  # 5 times what bart_large.yaml evaluates on
        )
        for stale in DATA.glob(f".{folder.name}.*.tmp"):  # of a command that was killed
            shutil.rmtree(stale)
        with writing(folder):
            data.binarise(text, folder, os.cpu_count() or 1)
    elif options.text is not None:
        say(f"{folder}: is there already; --text is read once it is deleted or renamed")
    own = folder / "dict.txt"
    if bpe.load_dictionary(own, own.name) != bpe.load_dictionary(dictionary, own.name):
        raise UserError(
            f"{own}: not BART's dictionary, {dictionary}; rename {folder}, and make it with that "
            "one (fairseq-preprocess --srcdict) or with --text FOLDER"
        )
    for file in BPE[:2]:
        if not (folder / file.path.name).exists():
            write_bytes(folder / file.path.name, file.path.read_bytes())
    for stem in data.STEMS.values():
        corpora.check(folder / stem, BART_SYMBOLS)


def _check_dictionary(path: Path) -> None:
    from bart_span_denoise.bpe import load_dictionary

    if len(symbols := load_dictionary(path, "dict.txt")) != BART_SYMBOLS:
        raise UserError(f"{path}: {len(symbols)} symbols, expected BART's {BART_SYMBOLS}")


@dataclass(frozen=True)
class DataSet:
    """What the command says of a data set before it fetches it."""

    what: str
    fetched: int
    """Bytes that are received."""
    kept: int
    """Bytes on the disk at most, with what is made of it."""
    folders: tuple[str, ...]
    """Below DATA: where these bytes lie, as patterns."""
    make: Callable[[Fetcher, argparse.Namespace], None]
    then: str


def _data_sets(shards: int) -> dict[str, DataSet]:
    c4 = shards * C4_FILE + C4_VALIDATION
    tokens = C4_TOKENS + (C4_ALL_TOKENS if shards * C4_FILE_TOKENS >= C4_ALL_TOKENS else 0)
    parts = 6 * _part_bytes()
    bpe = sum(file.size for file in BPE)
    return {
        "c4": DataSet(
            f"{shards} of C4's 1,024 English files (--shards 512 where the training horizon grows "
            "with the model), its validation, T5's tokeniser (nanolm_c4)",
            c4,
            c4 + 2 * tokens,
            ("c4", "t5", "cache/c4-*"),
            _c4,
            # 1.25 million tokens per second of a core, measured with a tokeniser of 8,000 pieces.
            f"bash scripts/nanolm_c4.sh prepare tokenises them, {tokens / 1.25e6 / 3600:.1f} h of "
            "a core; else the first run does",
        ),
        "cifar5m": DataSet(
            "CIFAR-5M's six npz files (vit_cifar5m)",
            parts,
            parts,
            ("cifar5m",),
            _cifar5m,
            "compressed ones are unpacked into data/cache, which takes as much again",
        ),
        "cifar10": DataSet(
            "CIFAR-10's binary version (vit_cifar5m, data.source=cifar10 data.path=data/cifar10)",
            CIFAR10.size,
            360_000_000,
            ("cifar10",),
            _cifar10,
            "unpacked in seconds",
        ),
        "imagenet": DataSet(
            "ImageNet's train/ and val/ from your archives, 155 GB behind a login (vit_imagenet)",
            0,
            IMAGENET_BYTES,
            ("imagenet",),
            _imagenet,
            "unpacked in about an hour at 200 MB/s of disk",
        ),
        "bart": DataSet(
            "GPT-2's BPE, and a corpus binarised from your text (bart_span_denoise)",
            bpe,
            bpe,
            ("gpt2",),
            _bart,
            # Measured on the World English Bible with a BPE of 8,000 symbols.
            "text becomes half its size in data/bart or somewhat more, 1.8 MB a second of a core",
        ),
    }


# Command


def _duration(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h" if seconds > 5400 else f"{max(1, round(seconds / 60))} min"


def _describe(name: str, data: DataSet) -> str:
    network = "nothing to fetch"
    if data.fetched:
        fast, slow = (_duration(8 * data.fetched / rate) for rate in (1e9, 1e8))
        network = f"{amount(data.fetched)} to fetch ({fast} at 1 Gbit/s, {slow} at 100 Mbit/s)"
    return f"{name}: {data.what}: {network}, up to {amount(data.kept)} of disk; {data.then}"


def _check_room(wanted: dict[str, DataSet]) -> None:
    """UserError if the disk cannot hold what is not there yet."""
    missing = 0
    for data in wanted.values():
        folders = (folder for pattern in data.folders for folder in DATA.glob(pattern))
        files = (file for folder in folders for file in folder.rglob("*") if file.is_file())
        missing += max(0, data.kept - sum(file.stat().st_size for file in files))
    free = shutil.disk_usage(DATA).free
    say(f"{DATA.resolve()}: {amount(free)} free, up to {amount(missing)} needed")
    if free < missing:
        raise UserError(
            f"{DATA.resolve()}: {amount(free)} free, but up to {amount(missing)} needed; free "
            f"some, or make {DATA} a link to a folder on a larger disk"
        )


def main(arguments: list[str] | None = None) -> None:
    """Says what there is, or fetches what is named; exit code 2 and one line for a mistake."""
    parser = argparse.ArgumentParser(prog="bash scripts/download.sh", description=__doc__)
    add = parser.add_argument
    add("names", nargs="*", metavar="NAME", help="c4, cifar5m, cifar10, imagenet, bart")
    add("--shards", type=int, default=C4_SHARDS, help="training files of C4 (48 of 1024)")
    add("--archives", default=str(DATA / "archives"), help="folder of ImageNet's three archives")
    add("--text", help="file or folder of text that becomes BART's corpus")
    add("--mirror", metavar="URL", help="where URL/HOST/PATH is a copy of https://HOST/PATH")
    options = parser.parse_args(arguments)
    with one_line_errors(OSError):
        if not 1 <= options.shards <= C4_FILES["train"]:
            raise UserError(f"--shards: {options.shards} given, expected 1 to {C4_FILES['train']}")
        known = _data_sets(options.shards)
        for name in options.names:
            if name not in known:
                raise UserError(
                    f"{name}: no such data; expected {', '.join(known)}{nearest(name, known)}"
                )
        wanted = {name: known[name] for name in options.names or known}
        for name, data in wanted.items():
            print(_describe(name, data), flush=True)
        if not options.names:
            return
        DATA.mkdir(exist_ok=True)
        _check_room(wanted)
        fetcher = Fetcher(options.mirror)
        with locked(DATA, "download"):
            for name, data in wanted.items():
                data.make(fetcher, options)
                print(f"{name}: whole and checked", flush=True)


if __name__ == "__main__":
    main()
