"""scripts/download.sh: files come whole or not at all, and the paper-size configs find them.

The scripts are the shipped ones, but for checksums and numbers of images of small contents; they
fetch from a server on this machine.
"""

import gzip
import hashlib
import io
import itertools
import json
import os
import shutil
import subprocess
import tarfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from scripts import download
from tests.text_files import as_txt, error_line
from training.config import load
from training.data.text import C4_REVISION, embedded_file, read_embedded, split_sentences

pytestmark = pytest.mark.thorough
ROOT = Path(__file__).resolve().parents[1]
HUB = f"datasets/allenai/c4/resolve/{C4_REVISION}/"
CIFAR10 = "www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
T5_SUM = "d60acb128cf7b7f2536e8f38a5b18a05535c9e14c7a355904270e15b0945ea86"
ENCODER_SUM = "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783"
VOCAB_SUM = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"
CIFAR10_SUM = "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"


def digest(content):
    return hashlib.sha256(content).hexdigest()


class Server(ThreadingHTTPServer):
    """Serves `contents` (path: bytes) below its address, with the `faults` that are left."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.contents, self.faults, self.asked = {}, [], []
        self.url = f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        server, span = self.server, self.headers.get("Range")
        if self.path.startswith("/api/"):  # what the hub's library wants to know besides
            self.answer(404, b"")
            return
        server.asked.append(span)
        fault = server.faults.pop(0) if server.faults else ""
        content = server.contents.get(self.path.lstrip("/").removeprefix("moved/"))
        if fault.isdecimal() or content is None:
            self.answer(int(fault or 404), b"")
        elif fault.startswith("to "):
            self.answer(302, b"", Location=fault[3:].format(path=self.path))
        elif span and int(span[6:-1]) >= len(content):
            self.answer(416, b"", **{"Content-Range": f"bytes */{len(content)}"})
        elif span:
            start = int(span[6:-1])
            place = f"bytes {start}-{len(content) - 1}/{len(content)}"
            self.answer(206, content[start:], fault, **{"Content-Range": place})
        else:
            self.answer(200, content, fault)

    def answer(self, status, body, fault="", **headers):
        self.send_response(status)
        self.send_header("Connection", "close")
        if "endless" not in fault:
            self.send_header("Content-Length", "9" * 4500 if "absurd" in fault else len(body))
        told = {"ETag": f'"{digest(body)}"', "X-Repo-Commit": C4_REVISION, **headers}
        for name, value in told.items():
            self.send_header(name, value)
        self.end_headers()
        body = body.swapcase() if "forged" in fault else body
        if self.command == "HEAD":
            return
        pieces = itertools.repeat(bytes(1 << 20)) if "endless" in fault else [body]
        try:
            for piece in pieces:
                self.wfile.write(piece[: len(piece) // 2] if "breaks off" in fault else piece)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the client has had enough


@pytest.fixture
def server():
    server = Server()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def call(server, tmp_path, monkeypatch):
    """Runs the scripts in a folder of their own, with other numbers in place of those published."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    (tmp_path / "scripts/environment.sh").write_text(f'cd "{tmp_path}"\n')
    df = tmp_path / "bin/df"  # stands in: what fits must not depend on the disk of the tests
    df.parent.mkdir()
    df.write_text('#!/bin/sh\necho header; echo "fs 9 9 ${FREE_KB:-900000000} 9 /"\n')
    df.chmod(0o755)

    def call(*words, numbers=(), **variables):
        for path in (Path("scripts/download.sh"), Path("scripts/download.py")):
            text = path.read_text()
            for published, small in dict(numbers).items():
                text = text.replace(published, small)
            path.write_text(text)
        served = {"MIRROR": server.url, "HF_ENDPOINT": server.url, "HF_HUB_OFFLINE": "0"}
        path = f"{df.parent}:{os.environ['PATH']}"
        env = {**os.environ, **served, "PYTHONPATH": str(ROOT), "PATH": path, **variables}
        command = ["bash", "scripts/download.sh", *words]
        return subprocess.run(command, env=env, capture_output=True, text=True)

    return call


def whole(server, call, *words, **options):
    """A call that fetches; another one after it that asks for nothing."""
    for _ in range(2):
        server.asked.clear()
        ran = call(*words, **options)
        assert ran.returncode == 0, ran.stderr
        assert ran.stdout.endswith(f"{words[0]}: whole and checked\n")
    assert not server.asked, "all of it is there"


def refused(call, *words, **options):
    """The last line of a call that fails."""
    ran = call(*words, **options)
    assert ran.returncode == 2 and "Traceback" not in ran.stderr, ran.stderr
    return ran.stderr.splitlines()[-1]


def left(folder="data"):
    files = [path for path in Path(folder).rglob("*") if path.is_file()]
    return sorted(str(path.relative_to(folder)) for path in files)


def archive(members, mode="w"):
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode=mode) as opened:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            opened.addfile(member, io.BytesIO(content))
    return file.getvalue()


def batches():
    """CIFAR-10's archive, of two images a batch."""
    from vit_cifar5m.data import BINARY_TEST, BINARY_TRAIN

    records = bytes([3] + [9] * 3072) * 2
    return archive(
        {f"cifar-10-batches-bin/{name}": records for name in (*BINARY_TRAIN, BINARY_TEST)}, "w:gz"
    )


def test_sizes_and_times_are_said_before_anything_is_fetched(server, call):
    lines = call().stdout.splitlines()
    names = [line.split(":")[0] for line in lines]
    assert names == ["c4", "c4 --shards 512", "cifar5m", "cifar10", "imagenet", "bart"]
    assert "18.5 GB to fetch (2 to 25 min)" in lines[2] and not server.asked
    assert not Path("data").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("cifar5", "cifar5: no such data or option; expected c4, cifar5m"),
        ("c4 --shards 0", "--shards: 0 given, expected 1 to 1024"),
        ("c4 --shards=2000", "--shards: 2000 given, expected 1 to 1024"),
        ("bart --text", "--text: expected a value after it"),
    ],
)
def test_a_mistake_in_the_command_is_one_line(call, words, message):
    ran = call(*words.split())
    assert ran.returncode == 2 and ran.stderr.startswith("error: ") and message in ran.stderr
    assert ran.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "address",
    [
        *("http://host.example", "http://localhost.evil.example", "ftp://127.0.0.1"),
        *("http://127.0.0.1:80@evil.example", "http://localhost/@evil.example"),
    ],
)
def test_addresses_by_plain_http_are_refused(call, address, monkeypatch, capsys):
    """The hub's, too: the SHA-256s that files are compared with come from it."""
    line = f"{address} given; expected https://, as http can be forged\n"
    assert call("bart", MIRROR=address).stderr == f"error: MIRROR: {line}"
    monkeypatch.setenv("HF_ENDPOINT", address)
    with pytest.raises(SystemExit, match="2"):
        download.main(["c4"])
    assert capsys.readouterr().err == f"error: HF_ENDPOINT: {line}"


def test_a_full_disk_is_known_before_anything_is_fetched(server, call):
    line = refused(call, "cifar10", FREE_KB="100000")
    assert "102 MB free, but up to 360 MB needed; free some" in line and not server.asked


@pytest.mark.parametrize(
    ("faults", "asked"),
    [
        ([], [None]),
        (["503"], [None, None]),
        (["breaks off", "breaks off"], [None, "half", "three quarters"]),
    ],
)
def test_a_file_comes_whole_over_a_bad_line(server, call, faults, asked):
    content = batches()
    server.contents |= {CIFAR10: content, f"{CIFAR10}?again": content}
    server.faults = [*faults]
    ran = call("cifar10", numbers={CIFAR10_SUM: digest(content)})
    assert ran.returncode == 0, ran.stderr
    half = len(content) // 2
    rest = {"half": half, "three quarters": half + (len(content) - half) // 2, None: None}
    places = [rest[name] and f"bytes={rest[name]}-" for name in asked]
    assert server.asked == places
    assert Path("data/cifar10/cifar-10-binary.tar.gz").read_bytes() == content
    assert not any("partial" in name for name in left())


@pytest.mark.parametrize(
    ("faults", "message", "kept"),
    [
        (["404"], "did not come (curl ended with 22)", False),
        (["to http://127.0.0.2:9{path}"], "did not come (curl ended with 47)", False),
        (["to ftp://127.0.0.1{path}"], "did not come (curl ended with 47)", False),
        (["to {path}"] * 20, "did not come (curl ended with 47)", False),
        (["absurd"], "did not come (curl ended with ", False),
        (["forged"], "has not the published SHA-256 and is deleted", False),
        (["breaks off"] * 20, "did not come (curl ended with 18); give the same command", True),
    ],
)
def test_what_is_not_the_file_never_gets_its_name(server, call, faults, message, kept):
    content = server.contents[CIFAR10] = bytes(range(256)) * 400
    server.faults = [*faults]
    numbers = {CIFAR10_SUM: digest(content)}
    line = refused(call, "cifar10", numbers=numbers)
    assert line.startswith("error: www.cs.toronto.edu/") and message in line
    assert ("cifar10/.partial/cifar-10-binary.tar.gz" in left()) == kept
    assert "cifar10/cifar-10-binary.tar.gz" not in left() and len(server.asked) <= 7


def test_an_answer_without_end_ends(server, call):
    server.contents[CIFAR10] = b"x"
    server.faults = ["endless"]
    line = refused(call, "cifar10", numbers={"170052171": "3000000"})
    assert "did not come (curl ended with" in line
    assert sum(path.stat().st_size for path in Path("data").rglob("*tar.gz")) < 4_000_000


def test_a_file_that_is_whole_but_has_no_name_yet_is_not_fetched_again(server, call):
    content = server.contents[CIFAR10] = batches()
    part = Path("data/cifar10/.partial/cifar-10-binary.tar.gz")
    part.parent.mkdir(parents=True)
    part.write_bytes(content)
    ran = call("cifar10", numbers={CIFAR10_SUM: digest(content)})
    assert ran.returncode == 0, ran.stderr
    assert not server.asked


def test_c4(server, call):
    from nanolm_c4.config import Config
    from nanolm_c4.data import from_config, train_tokenizer

    chapters = read_embedded(embedded_file())[:60]
    texts = [text for chapter in chapters for text in split_sentences(chapter)]
    train_tokenizer(texts[:300], 300, "spiece.model")
    model = Path("spiece.model").read_bytes()
    commit = "a9723ea7f1b39c1eae772870f3b547bf6ef7e6c1"
    server.contents[f"huggingface.co/google-t5/t5-base/resolve/{commit}/spiece.model"] = model
    for name, part in {
        "validation.00000-of-00001": texts[:9],
        "train.00000-of-00003": texts[9:300],
        "train.00001-of-00003": texts[300:900],
    }.items():
        lines = "".join(json.dumps({"text": text}) + "\n" for text in part)
        server.contents[f"{HUB}en/c4-{name}.json.gz"] = gzip.compress(lines.encode())
    numbers = {
        T5_SUM: digest(model),
        '{"validation": 8, "train": 1024}': '{"validation": 1, "train": 3}',
        "ulimit -f 1000000": "ulimit -f 2000",
    }
    paper = ROOT / "nanolm_c4/configs/paper.yaml"

    def corpus(*changes):
        return from_config(load(Config, paper, changes).data)

    Path("data/t5").mkdir(parents=True)
    shutil.copy("spiece.model", "data/t5")
    for faults, words in (
        (["404"], "en/c4-validation.00000-of-00001.json.gz: did not come from the hub ("),
        (["absurd"] * 20, ".json.gz: did not come from the hub ("),
        (["", "", "to http://127.0.0.2:9{path}"], "the hub's redirect: http://127.0.0.2:9"),
        (["", "to http://127.0.0.2:9{path}"], ".json.gz given; expected https://, as http can"),
        (["", "", "endless"], "did not come from the hub (OSError: [Errno 27] File too large"),
        (["", "", "forged"], ".json.gz: not the hub's SHA-256; delete it and"),
    ):
        server.faults = faults
        assert words in refused(call, "c4", "--shards=2", numbers=numbers)
        server.faults = []
    next(Path("data/c4").rglob("*validation*.gz")).unlink()
    shutil.rmtree("data/t5")
    whole(server, call, "c4", "--shards", "2")
    read = corpus("data.max_train_tokens=20000")
    assert read.tokenizer.decode(read.tokens("validation")) == " ".join(texts[:9])
    assert read.meta["train"]["documents"] > 300 and read.meta["path"] == "allenai/c4"
    line = error_line(corpus)  # more text than was fetched
    assert "its 2 of 3 files of train are not enough; fetch more with bash scripts/dow" in line
    Path(f"data/c4/{C4_REVISION}/en/c4-train.00000-of-00003.json.gz").unlink()
    assert "no c4-train.00000-of-00003.json.gz in it, but later" in error_line(corpus)


def test_cifar5m(server, call):
    from vit_cifar5m.config import Config
    from vit_cifar5m.data import from_config

    pixels = np.random.default_rng(0).integers(0, 256, (6, 5, 32, 32, 3), dtype=np.uint8)

    def serve(number, count):
        np.savez(file := io.BytesIO(), X=pixels[number][:count], Y=np.arange(count))
        place = f"storage.googleapis.com/gresearch/cifar5m/part{number}.npz"
        server.contents[place] = file.getvalue()

    for number in range(6):
        serve(number, 5 if number < 5 else 4)
    numbers = {"1_000_448": "5"}
    line = refused(call, "cifar5m", numbers=numbers)
    assert "data/cifar5m/part5.npz: 4 images, expected 5; delete it and give the same" in line
    Path("data/cifar5m/part5.npz").unlink()
    serve(5, 5)
    whole(server, call, "cifar5m")
    paper = ROOT / "vit_cifar5m/configs/paper.yaml"
    images = from_config(load(Config, paper, ["data.validation_images=5"]).data, seed=0)
    assert len(images.train) == 25 and len(images.validation) == 5
    np.testing.assert_array_equal(images.train[7][0], pixels[1, 2].transpose(2, 0, 1))
    Path("data/cifar5m/part3.npz").write_bytes(b"other")
    assert "data/cifar5m: files are not those of its SHA256SUMS; del" in refused(call, "cifar5m")


def test_cifar10(server, call):
    from vit_cifar5m.config import Config
    from vit_cifar5m.data import from_config

    content = server.contents[CIFAR10] = batches()
    whole(server, call, "cifar10", numbers={CIFAR10_SUM: digest(content)})
    changes = ["data.source=cifar10", "data.path=data/cifar10", "data.validation_images=2"]
    config = load(Config, ROOT / "vit_cifar5m/configs/paper.yaml", changes)
    images = from_config(config.data, seed=0)
    assert len(images.train) == 10 and images.train[0][1] == 3
    Path("data/cifar10/cifar-10-binary.tar.gz").write_bytes(b"other")
    line = refused(call, "cifar10")
    assert "cifar-10-binary.tar.gz: its SHA-256 is not the published one; delete it and" in line


def test_imagenet(monkeypatch, tmp_path, capsys):
    from PIL import Image
    from scipy.io import savemat
    from torchvision.datasets import imagenet as published

    from vit_imagenet.config import Config
    from vit_imagenet.data import from_config

    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (40, 30)).save("image.jpeg")
    image = Path("image.jpeg").read_bytes()
    classes = ("n01", "n02")
    fields = ["ILSVRC2012_ID", "WNID", "words", "gloss", "num_children"]
    synsets = [(number + 1, name, name, "", 0) for number, name in enumerate(classes)]
    meta = io.BytesIO()
    savemat(meta, {"synsets": np.array(synsets, [(field, object) for field in fields])})
    inner = {name: {f"{name}_{k}.JPEG": image for k in range(3)} for name in classes}
    devkit = "ILSVRC2012_devkit_t12/data"
    told = {"meta.mat": meta.getvalue(), "ILSVRC2012_validation_ground_truth.txt": b"2\n1\n"}
    contents = {
        "train": archive({f"{name}.tar": archive(files) for name, files in inner.items()}),
        "val": archive({f"ILSVRC2012_val_{k}.JPEG": image for k in range(2)}),
        "devkit": archive({f"{devkit}/{name}": text for name, text in told.items()}, "w:gz"),
    }
    names = {key: name for key, (name, _) in published.ARCHIVE_META.items()}
    sums = {key: (names[key], hashlib.md5(contents[key]).hexdigest()) for key in contents}
    monkeypatch.setattr(published, "ARCHIVE_META", sums)
    monkeypatch.setattr(download, "IMAGENET", {"train": 6, "val": 2})
    monkeypatch.setattr(download, "IMAGENET_CLASSES", 2)

    def line():
        with pytest.raises(SystemExit) as ended:
            download.main(["imagenet", "--archives", "mine"])
        assert ended.value.code == 2
        return capsys.readouterr().err.splitlines()[-1]

    assert "no ILSVRC2012_img_train.tar, ILSVRC2012_img_val.tar, ILSVRC2012_devkit_t12" in line()
    Path("mine").mkdir()
    for key, content in contents.items():
        (Path("mine") / names[key]).write_bytes(content)
    with open(Path("mine") / names["val"], "ab") as damaged:
        damaged.write(b"more")
    assert "ILSVRC2012_img_val.tar: its MD5 is not the published one; fetch it again" in line()
    assert Path("data/imagenet/train").exists() and not Path("data/imagenet/val").exists()
    (Path("mine") / names["val"]).write_bytes(contents["val"])
    for _ in range(2):
        download.main(["imagenet", "--archives", "mine"])
    config = load(Config, ROOT / "vit_imagenet/configs/paper.yaml", [])
    images = from_config(config.data, image_size=32, classes=2, seed=0)
    assert len(images.train) == 6 and images.classes == list(classes)
    assert [images.validation[k][1] for k in range(2)] == [0, 1]
    assert left("data/imagenet/val") == ["n01/ILSVRC2012_val_1.JPEG", "n02/ILSVRC2012_val_0.JPEG"]


def test_bart(server, call):
    from bart_span_denoise import bpe
    from bart_span_denoise.config import Config
    from bart_span_denoise.data import from_config

    chapters = read_embedded(embedded_file())[:40]
    bpe.train(chapters, 400, Path("trained"))
    encoder, vocab, dictionary = ((Path("trained") / name).read_bytes() for name in bpe.FILES)
    place = "openaipublic.blob.core.windows.net/gpt-2/encodings/main"
    server.contents |= {
        f"{place}/encoder.json": encoder,
        f"{place}/vocab.bpe": vocab,
        "dl.fbaipublicfiles.com/fairseq/gpt2_bpe/dict.txt": dictionary,
    }
    numbers = {"50_265": "400", ENCODER_SUM: digest(encoder), VOCAB_SUM: digest(vocab)}
    line = refused(call, "bart", numbers=numbers)
    assert line.startswith("error: data/bart: no corpus there") and "--text FOLDER" in line
    whole(server, call, "bart", "--text", str(as_txt(Path("text"), chapters)))
    config = load(Config, ROOT / "bart_span_denoise/configs/bart_large.yaml", [])
    corpus = from_config(config)
    text = corpus.bpe.decode(corpus.train.clean(0)[0])
    assert corpus.vocab_size == 400 and text[:200] in "".join(chapters)
    known = Path("data/gpt2/dict.txt")
    came = known.read_bytes()
    known.write_bytes(came[:-2] + bytes([came[-2] ^ 1]) + came[-1:])
    assert "data/gpt2: files are not those of its SHA256SUMS" in refused(call, "bart")
    known.write_bytes(came)
    own = Path("data/bart/dict.txt")
    own.write_text("".join(own.read_text().splitlines(keepends=True)[::-1]))
    assert "data/bart/dict.txt: not BART's dictionary, data" in refused(call, "bart")
