"""scripts/download.sh: files come whole or not at all, and the paper-size configs find them."""

import errno
import gzip
import hashlib
import io
import json
import os
import shutil
import tarfile
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import parse_qs

import numpy as np
import pytest

from scripts import download, fetch
from scripts.fetch import Fetcher, File
from tests.text_files import as_txt, error_line
from training.config import load
from training.errors import UserError
from training.text import C4_REVISION, embedded_file, read_embedded, split_sentences

ROOT = Path(__file__).resolve().parents[1]
CONTENT = bytes(range(256)) * 40
URL = "https://host.example/data/file.bin"


class Server(ThreadingHTTPServer):
    """Serves `contents` (HOST/PATH: bytes) below its address, with the `faults` that are left."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.contents, self.faults, self.asked = {}, [], []
        self.url = f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def do_POST(self):
        """The hub's sizes and checksums of files."""
        asked = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())["paths"]
        assert len(asked) <= 2, "the hub has a limit too"
        rows = [
            {
                "path": name,
                "lfs": {"size": len(content), "oid": hashlib.sha256(content).hexdigest()},
            }
            for path, content in self.server.contents.items()
            if (name := path.partition(C4_REVISION + "/")[2]) in asked
        ]
        self.answer(200, json.dumps(rows).encode())

    def do_GET(self):
        server, span = self.server, self.headers.get("Range")
        server.asked.append(span)
        fault = server.faults.pop(0) if server.faults else ""
        content = server.contents.get(self.path.lstrip("/").removeprefix("moved/"))
        if content and "gzip" in self.headers.get("Accept-Encoding", "gzip"):
            content = gzip.compress(content)
        start = int(span[len("bytes=") : -1]) if span and "no ranges" not in fault else None
        if fault.isdecimal() or content is None:
            self.answer(int(fault or 404), b"")
        elif fault.startswith("to "):
            self.answer(302, b"", Location=fault[3:].format(path=self.path))
        elif "web page" in fault:
            self.answer(200, b"<html>log in</html>", **{"Content-Type": "text/html; charset=utf-8"})
        elif start is not None and start >= len(content):
            self.answer(416, b"", **{"Content-Range": f"bytes */{len(content)}"})
        elif start is not None:
            first = 0 if "other place" in fault else start
            span = f"bytes {first}-{len(content) - 1}/{len(content)}"
            self.answer(206, content[first:], fault, **{"Content-Range": span})
        else:
            self.answer(200, content, fault)

    def answer(self, status, body, fault="", **headers):
        self.send_response(status)
        self.send_header("Connection", "close")
        length = len(body) + 100 * ("says more" in fault) - 100 * ("says less" in fault)
        body = body.swapcase() if "forged" in fault else body
        told = {} if "no length" in fault else {"Content-Length": length}
        for name, value in (told | headers).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if "breaks off" in fault else body)


@pytest.fixture
def server(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(fetch, "PAUSE", 0)
    server = Server()
    server.contents["host.example/data/file.bin"] = CONTENT
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def published(**changes):
    file = File(URL, Path("data/file.bin"), len(CONTENT), hashlib.sha256(CONTENT).hexdigest())
    return replace(file, **changes)


def left(folder="data"):
    """Files below a folder."""
    files = [path for path in Path(folder).rglob("*") if path.is_file()]
    return sorted(str(path.relative_to(folder)) for path in files)


# One file


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize(
    ("faults", "asked"),
    [
        ([], [None]),
        (["503", "500"], [None] * 3),
        (["breaks off", "breaks off"], [None, "bytes=5120-", "bytes=7680-"]),
        (["breaks off", "no ranges"], [None, "bytes=5120-"]),
        (["breaks off", "other place"], [None, "bytes=5120-", None]),
        (["to /moved{path}"], [None, None]),
        (["to /moved{path}", "breaks off", "416"], [None, None, "bytes=5120-", None]),
    ],
)
def test_a_file_comes_whole_over_a_bad_line(server, faults, asked, exact):
    server.faults = [*faults]
    for _ in range(2):
        Fetcher(server.url).fetch(published(exact=exact))
        assert Path("data/file.bin").read_bytes() == CONTENT
        assert left() == ["SHA256SUMS", "file.bin"]
        assert server.asked == asked, "what is there is not fetched again"


@pytest.mark.parametrize(
    ("faults", "changes", "message"),
    [
        (["404"], {}, "the server answers 404 Not Found"),
        (["503"] * 20, {}, "the server answers 503"),
        (["web page"], {}, "a web page came in place of the file"),
        (["to http://elsewhere.example{path}"], {}, "a redirect leaves https (No"),
        (["to {path}"] * 20, {}, "more than 5 redirects"),
        (["says more"], {}, "the server has 10340 bytes, expected 10240"),
        (["says less"], {}, "the server has 10140 bytes, expected 10240"),
        ([], {"size": 5000, "exact": False}, "has 10240 bytes, expected at most 10000"),
        (["no length"], {"size": 5000, "exact": False}, "more than the 10000 bytes expected"),
        (["says less"], {"exact": False}, "its SHA-256 is "),
        (["forged"], {}, "its SHA-256 is "),
        (["breaks off, no ranges"] * 20, {}, "broke off 6 times"),
        ([], {"sha256": None, "check": "refuses"}, "not like this"),
    ],
)
def test_what_is_not_the_file_never_gets_its_name(server, faults, changes, message):
    def refuse(path):
        raise UserError(f"{path}: not like this")

    server.faults = [*faults]
    file = published(**({**changes, "check": refuse} if "check" in changes else changes))
    line = error_line(lambda: Fetcher(server.url).fetch(file))
    assert message in line and "file.bin" in line
    assert not file.path.exists() and len(server.asked) <= 7
    assert (".partial/file.bin" in left()) == ("broke off" in message)


def test_a_later_command_asks_for_the_rest_only(server):
    server.faults = ["breaks off", "404"]
    error_line(lambda: Fetcher(server.url).fetch(published()))
    assert left() == [".partial/file.bin"]
    server.asked.clear()
    Fetcher(server.url).fetch(published())
    assert server.asked == ["bytes=5120-"] and Path("data/file.bin").read_bytes() == CONTENT
    # Whole, but killed before it got its name: where the size is not known, the server is asked.
    Path("data/file.bin").rename("data/.partial/file.bin")
    Fetcher(server.url).fetch(published(exact=False, size=9000))
    assert server.asked[1:] == ["bytes=10240-"] and Path("data/file.bin").exists()


@pytest.mark.parametrize("changes", [{}, {"sha256": None}])
def test_a_file_that_changed_is_named(server, changes):
    file = published(**changes)
    Fetcher(server.url).fetch(file)
    file.path.write_bytes(b"other")
    line = error_line(lambda: Fetcher(server.url).fetch(file))
    assert line.startswith("data/file.bin: its SHA-256 is ") and "delete it and give" in line
    file.path.unlink()
    Path("data/SHA256SUMS").write_bytes(b"\xff")  # what was received is kept
    line = error_line(lambda: Fetcher(server.url).fetch(file))
    assert line.startswith("data/SHA256SUMS: not lines of a SHA-256, two spaces and a name; delet")
    assert left() == [".partial/file.bin", "SHA256SUMS"]


def test_a_full_disk_is_one_line(server, monkeypatch, capsys):
    part = Path("data/.partial/file.bin")
    part.parent.mkdir(parents=True)
    part.symlink_to("/dev/full")
    line = error_line(lambda: Fetcher(server.url).fetch(published()))
    assert line.startswith(f"{part}: cannot write: No space left on device; expected room for 10")
    server.asked.clear()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10**8))
    assert "100 MB free, but up to 360 MB needed; free some" in refusal(capsys, server, "cifar10")
    assert not server.asked


def refusal(capsys, server, *words):
    """The line with which a command ends."""
    with pytest.raises(SystemExit) as ended:
        download.main([*words, "--mirror", server.url])
    assert ended.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


def test_mistakes_in_the_command_are_one_line(server, capsys):
    line = error_line(lambda: Fetcher("http://host.example"))
    assert line.startswith("--mirror: http://host.example given; expected https://")
    line = error_line(lambda: Fetcher("https://[::1"))
    assert line.startswith("--mirror: https://[::1 given (") and "expected https://HOST" in line
    assert "cifar5: no such data; expected c4, " in refusal(capsys, server, "cifar5")
    assert "--shards: 0 given, expected 1 to 1024" in refusal(capsys, server, "--shards", "0")


def test_sizes_and_times_are_said_before_anything_is_fetched(server, capsys):
    download.main([])
    lines = capsys.readouterr().out.splitlines()
    names = [line.split(":")[0] for line in lines]
    assert names == ["c4", "cifar5m", "cifar10", "imagenet", "bart"]
    assert "18.5 GB to fetch (2 min at 1 Gbit/s, 25 min at 100 Mbit/s)" in lines[1]
    assert not server.asked and left(".") == []
    assert "up to 28.9 GB of disk; " in lines[0] and " tokenises them, 1.5 h of a core" in lines[0]
    download.main(["--shards", "512"])
    line = capsys.readouterr().out.splitlines()[0]
    assert "up to 331 GB of disk; " in line and " tokenises them, 18.6 h of a core" in line


# The data sets, at the size of a test: what is fetched is what the paper's config reads


def fetched(server, *words):
    download.main([*words, "--mirror", server.url])
    server.asked.clear()
    download.main([*words, "--mirror", server.url])
    assert not server.asked, "all of it is there"


def small(monkeypatch, name, content):
    """A published file of this module, of another content."""
    file = getattr(download, name)
    digest = hashlib.sha256(content).hexdigest()
    monkeypatch.setattr(download, name, replace(file, size=len(content), sha256=digest))


def test_c4(server, monkeypatch, capsys):
    from nanolm_c4.config import Config
    from nanolm_c4.data import from_config, train_tokenizer

    chapters = read_embedded(embedded_file())[:60]
    texts = [text for chapter in chapters for text in split_sentences(chapter)]
    train_tokenizer(texts[:300], 300, "spiece.model")
    model = Path("spiece.model").read_bytes()
    small(monkeypatch, "T5", model)
    server.contents[download.T5.url.removeprefix("https://")] = model
    monkeypatch.setattr(download, "C4_FILES", {"validation": 1, "train": 3})
    monkeypatch.setattr(download, "PATHS_AT_ONCE", 2)
    place = f"huggingface.co/datasets/allenai/c4/resolve/{C4_REVISION}/en/c4-"
    for name, part in {
        "validation.00000-of-00001": texts[:9],
        "train.00000-of-00003": texts[9:300],
        "train.00001-of-00003": texts[300:900],
    }.items():
        lines = "".join(json.dumps({"text": text}) + "\n" for text in part)
        server.contents[f"{place}{name}.json.gz"] = gzip.compress(lines.encode())
    paper = ROOT / "nanolm_c4/configs/paper.yaml"

    def corpus(*changes):
        return from_config(load(Config, paper, changes).data)

    assert "no size and SHA-256 of each of 4 files" in refusal(capsys, server, "c4", "--shards=3")
    fetched(server, "c4", "--shards", "2")
    read = corpus("data.max_train_tokens=20000")
    assert read.tokenizer.decode(read.tokens("validation")) == " ".join(texts[:9])
    assert read.meta["train"]["documents"] > 300 and read.meta["path"] == "allenai/c4"
    line = error_line(corpus)  # more text than was fetched
    assert "its 2 of 3 files of train are not enough; fetch more with bash scripts/dow" in line
    Path(f"data/c4/{C4_REVISION}/en/c4-train.00000-of-00003.json.gz").unlink()
    assert "no c4-train.00000-of-00003.json.gz in it, but later" in error_line(corpus)


def test_cifar5m(server, monkeypatch, capsys):
    from vit_cifar5m.config import Config
    from vit_cifar5m.data import from_config

    monkeypatch.setattr(download, "PART_IMAGES", 5)
    pixels = np.random.default_rng(0).integers(0, 256, (6, 5, 32, 32, 3), dtype=np.uint8)
    for number, part in enumerate(pixels):
        file = io.BytesIO()
        np.savez(file, X=part if number < 5 else part[:4], Y=np.arange(5 if number < 5 else 4))
        place = f"storage.googleapis.com/gresearch/cifar5m/part{number}.npz"
        server.contents[place] = file.getvalue()
    Path("data").mkdir()
    Path("data/cache").touch()  # no folder: whatever the cache cannot hold is not the file's fault
    assert "cannot be written" in refusal(capsys, server, "cifar5m")
    assert left("data/cifar5m") == [".partial/part0.npz"]
    Path("data/cache").unlink()
    line = refusal(capsys, server, "cifar5m")
    assert "part5.npz: 4 images, expected 5" in line and "part5.npz" not in left("data/cifar5m")
    np.savez(file := io.BytesIO(), X=pixels[5], Y=np.arange(5))
    server.contents[place] = file.getvalue()
    fetched(server, "cifar5m")
    paper = ROOT / "vit_cifar5m/configs/paper.yaml"
    images = from_config(load(Config, paper, ["data.validation_images=5"]).data, seed=0)
    assert len(images.train) == 25 and len(images.validation) == 5
    np.testing.assert_array_equal(images.train[7][0], pixels[1, 2].transpose(2, 0, 1))


def archive(members, mode="w"):
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode=mode) as opened:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            opened.addfile(member, io.BytesIO(content))
    return file.getvalue()


def test_cifar10(server, monkeypatch, capsys):
    from vit_cifar5m.config import Config
    from vit_cifar5m.data import BINARY_TEST, BINARY_TRAIN, from_config

    monkeypatch.setattr(download, "BATCH_IMAGES", 2)
    records = {name: bytes([3] + [9] * 3072) * 2 for name in (*BINARY_TRAIN, BINARY_TEST)}
    names = {f"cifar-10-batches-bin/{name}": content for name, content in records.items()}
    small(monkeypatch, "CIFAR10", archive(names, "w:gz"))
    place = download.CIFAR10.url.removeprefix("https://")
    server.contents[place] = archive(names, "w:gz")
    small(monkeypatch, "CIFAR10", server.contents[place])
    fetched(server, "cifar10")
    batch = Path("data/cifar10/cifar-10-batches-bin") / BINARY_TEST
    batch.write_bytes(b"other")
    line = refusal(capsys, server, "cifar10")
    assert f"{batch}: its SHA-256 is " in line and "delete it and give the same" in line
    batch.unlink()
    fetched(server, "cifar10")
    changes = ["data.source=cifar10", "data.path=data/cifar10", "data.validation_images=2"]
    config = load(Config, ROOT / "vit_cifar5m/configs/paper.yaml", changes)
    images = from_config(config.data, seed=0)
    assert len(images.train) == 10 and images.train[0][1] == 3


def full_disk(*args):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_imagenet(server, monkeypatch, capsys):
    from PIL import Image
    from scipy.io import savemat
    from torchvision.datasets import imagenet as published

    from vit_imagenet.config import Config
    from vit_imagenet.data import from_config

    Image.new("RGB", (40, 30)).save("image.jpeg")
    image = Path("image.jpeg").read_bytes()
    classes = ("n01", "n02")
    fields = ["ILSVRC2012_ID", "WNID", "words", "gloss", "num_children"]
    synsets = [(number + 1, name, name, "", 0) for number, name in enumerate(classes)]
    meta = io.BytesIO()
    savemat(meta, {"synsets": np.array(synsets, [(field, object) for field in fields])})
    inner = {name: {f"{name}_{k}.JPEG": image for k in range(3)} for name in classes}
    contents = {
        "train": archive({f"{name}.tar": archive(files) for name, files in inner.items()}),
        "val": archive({f"ILSVRC2012_val_{k}.JPEG": image for k in range(2)}),
        "devkit": archive(
            {
                "ILSVRC2012_devkit_t12/data/meta.mat": meta.getvalue(),
                "ILSVRC2012_devkit_t12/data/ILSVRC2012_validation_ground_truth.txt": b"2\n1\n",
            },
            "w:gz",
        ),
    }
    names = {key: name for key, (name, _) in published.ARCHIVE_META.items()}
    sums = {key: (names[key], hashlib.md5(contents[key]).hexdigest()) for key in contents}
    monkeypatch.setattr(published, "ARCHIVE_META", sums)
    monkeypatch.setattr(download, "IMAGENET", {"train": 6, "val": 2})
    monkeypatch.setattr(download, "IMAGENET_CLASSES", 2)
    monkeypatch.setattr(download, "IMAGENET_BYTES", 1000)
    line = refusal(capsys, server, "imagenet")
    assert "no ILSVRC2012_img_train.tar, ILSVRC2012_img_val.tar, ILSVRC2012_devkit_t12" in line
    assert "which need a login: fetch by hand from https://image-net.org/" in line
    Path("mine").mkdir()
    for key, content in contents.items():
        (Path("mine") / names[key]).write_bytes(content)
    with open(Path("mine") / names["val"], "ab") as damaged:
        damaged.write(b"more")
    line = refusal(capsys, server, "imagenet", "--archives", "mine")
    assert "ILSVRC2012_img_val.tar: its MD5 is not the published one; fetch it again" in line
    assert Path("data/imagenet/train").exists() and not Path("data/imagenet/val").exists()
    (Path("mine") / names["val"]).write_bytes(contents["val"])
    with monkeypatch.context() as full:
        full.setattr(published, "parse_devkit_archive", full_disk)
        line = refusal(capsys, server, "imagenet", "--archives", "mine")
        assert "data/imagenet/.partial: cannot write: No space left on device; fix" in line
    fetched(server, "imagenet", "--archives", "mine")
    config = load(Config, ROOT / "vit_imagenet/configs/paper.yaml", [])
    images = from_config(config.data, image_size=32, classes=2, seed=0)
    assert len(images.train) == 6 and images.classes == list(classes)
    assert [images.validation[k][1] for k in range(2)] == [0, 1]
    assert left("data/imagenet/val") == ["n01/ILSVRC2012_val_1.JPEG", "n02/ILSVRC2012_val_0.JPEG"]


def test_bart(server, monkeypatch, capsys):
    from bart_span_denoise import bpe
    from bart_span_denoise.config import Config
    from bart_span_denoise.data import from_config

    chapters = read_embedded(embedded_file())[:40]
    bpe.train(chapters, 400, Path("trained"))
    monkeypatch.setattr(download, "BART_SYMBOLS", 400)
    contents = [(Path("trained") / name).read_bytes() for name in bpe.FILES]
    files = []
    for file, content in zip(download.BPE, contents, strict=True):
        server.contents[file.url.removeprefix("https://")] = content
        known = file.sha256 and hashlib.sha256(content).hexdigest()
        files.append(replace(file, size=len(content), sha256=known))
    monkeypatch.setattr(download, "BPE", files)
    line = refusal(capsys, server, "bart")
    assert line.startswith("error: data/bart: no corpus there") and "--text FOLDER" in line
    fetched(server, "bart", "--text", str(as_txt(Path("text"), chapters)))
    assert "data/bart: is there already; --text is read once it is" in capsys.readouterr().err
    config = load(Config, ROOT / "bart_span_denoise/configs/bart_large.yaml", [])
    corpus = from_config(config)
    text = corpus.bpe.decode(corpus.train.clean(0)[0])
    assert corpus.vocab_size == 400 and text[:200] in "".join(chapters)
    own = Path("data/bart/dict.txt")
    own.write_text("".join(own.read_text().splitlines(keepends=True)[::-1]))
    assert "data/bart/dict.txt: not BART's dictionary, data" in refusal(capsys, server, "bart")
