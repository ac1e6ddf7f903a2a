"""The parts of `bash scripts/download.sh` that are written in Python.

python -m scripts.download c4|cifar5m|imagenet|bart [--shards N] [--archives FOLDER] [--text FOLDER]
"""

import argparse
import os
import re
import shutil
from pathlib import Path

from training.data.text import C4_NAME, C4_PATH, C4_REVISION, FETCHED
from training.errors import UserError, one_line_errors
from training.files import sha256, write_bytes, write_text, writing

DATA = Path("data")
LOCAL = r"http://(127\.0\.0\.1|localhost)(:\d+)?(/[^@]*)?"  # no user, whose @ would name a host
AGAIN = "give the same command again"
C4_FILES = {"validation": 8, "train": 1024}
PART_IMAGES = 1_000_448  # Nakkiran et al. (2021), of each part of CIFAR-5M
BART_SYMBOLS = 50_265  # vocab_size of bart_large.yaml, the special symbols among them
# Russakovsky et al. (2015), Table 2; MD5 and names of the archives are torchvision's.
IMAGENET = {"train": 1_281_167, "val": 50_000}
IMAGENET_CLASSES = 1000
IMAGENET_PAGE = "https://image-net.org/challenges/LSVRC/2012/2012-downloads.php"


def c4(options: argparse.Namespace) -> None:
    """Fetches C4 at C4_REVISION. The hub names a file by its SHA-256, which is compared.

    SHA256SUMS keeps these names, so that a later command asks for what is missing alone.
    """
    os.environ["HF_HUB_DISABLE_XET"] = "1"  # its addresses would be asked unseen
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url, utils

    def safe(address: str, whence: str) -> None:  # the hub's SHA-256s come from there, too
        if not re.fullmatch(rf"https://.*|{LOCAL}", address):
            raise UserError(f"{whence}: {address} given; expected https://, as http can be forged")

    safe(os.environ.get("HF_ENDPOINT", "https://"), "HF_ENDPOINT")
    client = utils.get_session()  # all others look, too, at where the hub redirects to
    asks = [*client.event_hooks["request"], lambda one: safe(str(one.url), "the hub's redirect")]
    made = {"event_hooks": {"request": asks}, "follow_redirects": True, "timeout": None}
    utils.set_client_factory(lambda: type(client)(**made))
    folder, place = FETCHED / C4_REVISION, {"repo_type": "dataset", "revision": C4_REVISION}
    sums = folder / "SHA256SUMS"
    lines = sums.read_text(encoding="utf-8", errors="replace").splitlines() if sums.exists() else []
    parts = [line.split("  ", 1) for line in lines]
    if any(len(part) != 2 for part in parts):
        raise UserError(f"{sums}: not a list of SHA-256s; delete it and {AGAIN}")
    known = {name: digest for digest, name in parts}
    for split, count in {**C4_FILES, "train": options.shards}.items():
        for number in range(count):
            name = f"{C4_NAME}/c4-{split}.{number:05d}-of-{C4_FILES[split]:05d}.json.gz"
            if name not in known or not (folder / name).exists():
                try:
                    metadata = get_hf_file_metadata(hf_hub_url(C4_PATH, name, **place))
                    hf_hub_download(C4_PATH, name, local_dir=folder, **place)
                except UserError:
                    raise
                except Exception as error:  # of the hub's library, of its client, of this disk
                    reason = str(error).strip().partition("\n")[0]
                    raise UserError(
                        f"{name}: did not come from the hub ({type(error).__name__}: {reason}); "
                        f"{AGAIN}, which goes on where it stopped"
                    ) from None
                known[name] = str(metadata.etag)
            if sha256(folder / name) != known[name]:
                raise UserError(f"{folder / name}: not the hub's SHA-256; delete it and {AGAIN}")
            write_text(sums, "".join(f"{known[name]}  {name}\n" for name in sorted(known)))


def cifar5m(options: argparse.Namespace) -> None:
    """Unpacks each part into the config's data.cache_dir, and counts its images."""
    from vit_cifar5m.data import PART_NAMES, PARTS, open_part

    for number in range(PARTS):
        names = [DATA / "cifar5m" / name.format(number) for name in PART_NAMES]
        path = next(name for name in names if name.exists())
        _, labels = open_part(path, DATA / "cache/cifar5m")
        _check_count(path, len(labels), PART_IMAGES)


def _check_count(path: Path, found: int, expected: int) -> None:
    if found != expected:
        raise UserError(f"{path}: {found} images, expected {expected}; delete it and {AGAIN}")


def imagenet(options: argparse.Namespace) -> None:
    """Unpacks train/ and val/ from the archives, whose MD5 torchvision compares."""
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
    partial = folder / ".partial"
    for split in splits:
        print(f"{folder / split}: from {needed[split]}, whose MD5 is compared first", flush=True)
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


def bart(options: argparse.Namespace) -> None:
    """Binarises the user's text with GPT-2's BPE, and checks that corpus and dictionary agree."""
    from bart_span_denoise import bpe, corpora, data
    from bart_span_denoise.config import DataConfig

    encoder, vocab, dictionary = (DATA / "gpt2" / name for name in bpe.FILES)
    symbols = bpe.load_dictionary(dictionary, dictionary.name)
    if len(symbols) != BART_SYMBOLS:
        raise UserError(
            f"{dictionary}: {len(symbols)} symbols, expected BART's {BART_SYMBOLS}; delete it and "
            f"{AGAIN}"
        )
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
            bpe_encoder=str(encoder),
            bpe_vocab=str(vocab),
            bpe_dictionary=str(dictionary),
            max_validation_tokens=20_000_000,  # 5 times what bart_large.yaml evaluates on
        )
        for stale in DATA.glob(f".{folder.name}.*.tmp"):  # of a command that was killed
            shutil.rmtree(stale)
        with writing(folder):
            data.binarise(text, folder, os.cpu_count() or 1)
    elif options.text is not None:
        print(f"{folder}: is there already; --text is read once it is deleted or renamed")
    if bpe.load_dictionary(folder / dictionary.name, dictionary.name) != symbols:
        raise UserError(
            f"{folder / dictionary.name}: not BART's dictionary, {dictionary}; rename {folder}, "
            "and make it with that one (fairseq-preprocess --srcdict) or with --text FOLDER"
        )
    for file in (encoder, vocab):
        if not (folder / file.name).exists():
            write_bytes(folder / file.name, file.read_bytes())
    for stem in data.STEMS.values():
        corpora.check(folder / stem, BART_SYMBOLS)


def main(arguments: list[str] | None = None) -> None:
    """Makes or checks one data set; exit code 2 and one line for a mistake."""
    parser = argparse.ArgumentParser(prog="python -m scripts.download", description=__doc__)
    data_sets = {"c4": c4, "cifar5m": cifar5m, "imagenet": imagenet, "bart": bart}
    parser.add_argument("name", choices=data_sets)
    parser.add_argument("--shards", type=int, default=48, help="training files of C4")
    parser.add_argument(
        "--archives", default=DATA / "archives", help="folder of ImageNet's three archives"
    )
    parser.add_argument("--text", help="file or folder of text that becomes BART's corpus")
    options = parser.parse_args(arguments)
    with one_line_errors(OSError):
        data_sets[options.name](options)


if __name__ == "__main__":
    main()
