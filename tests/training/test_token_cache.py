"""Token caches under both text experiments: whole or absent, and checked."""

import errno
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import bart_span_denoise.data
import nanolm_c4.data
from bart_span_denoise.config import Config as BartConfig
from nanolm_c4.config import Config as NanolmConfig
from tests import damages
from tests.bart_span_denoise.texts import DOCUMENTS
from tests.processes import Program, finished
from tests.text_files import error_line
from training import files
from training.config import load
from training.data import token_cache
from training.data.text import in_validation
from training.data.token_cache import META, TokenCache, cache_problem
from training.errors import UserError

ROOT = Path(token_cache.__file__).parents[2]


class Experiment:
    """One of the experiments with text, at toy size."""

    def __init__(self, name, words):
        self.name, self.words = name, words

    def arguments(self, text, cache, *more):
        config = str(ROOT / self.name / "configs" / "laptop.yaml")
        common = [f"data.path={text}", f"data.cache_dir={cache}", "data.validation_fraction=0.3"]
        return [config, *self.words, *common, *more]

    def prepare(self, text, cache, *more):
        path, *words = self.arguments(text, cache, *more)
        if self.name == "nanolm_c4":
            return nanolm_c4.data.from_config(load(NanolmConfig, path, words).data)
        return bart_span_denoise.data.from_config(load(BartConfig, path, words)).cache

    @property
    def data(self):
        return {"nanolm_c4": nanolm_c4.data}.get(self.name, bart_span_denoise.data)


TEXT = "data.source=text data.trained_vocab_size=320 data.tokens_per_sample=40"
EXPERIMENTS = {
    "nanolm_c4": ["data.source=local", "data.tokenizer_vocab_size=64"],
    "bart_span_denoise": TEXT.split(),
}


@pytest.fixture(params=EXPERIMENTS, scope="module")
def experiment(request):
    return Experiment(request.param, EXPERIMENTS[request.param])


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text") / "all.jsonl", DOCUMENTS)


def write_text(file, documents):
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    return file


@pytest.fixture(scope="module")
def made(experiment, text, tmp_path_factory):
    """A prepared cache, which tests leave alone."""
    return experiment.prepare(text, tmp_path_factory.mktemp("made"))


@pytest.fixture
def folder(made, tmp_path):
    """A copy of it in tmp_path / "cache"."""
    return shutil.copytree(made.folder, tmp_path / "cache" / made.folder.name)


def content(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.name != META}


def refuse(*arguments):
    raise AssertionError("the cache was made or read a second time")


def test_the_files_are_described(made):
    names = set(content(made.folder))
    assert set(made.meta["sizes"]) == set(made.meta["sha256"]) == names
    for name in names:
        assert files.sha256(made.folder / name) == made.meta["sha256"][name]
    assert {"python", "numpy", "datasets"} < set(made.meta["versions"])
    assert "files" not in made.meta


def test_the_second_preparation_reads_nothing(experiment, made, text, monkeypatch, capfd):
    monkeypatch.setattr(token_cache, "scratch_folder", refuse)
    monkeypatch.setattr(token_cache, "sha256", refuse)
    again = experiment.prepare(text, made.folder.parent)
    assert (again.folder, again.meta) == (made.folder, made.meta)
    assert capfd.readouterr().err == ""


FLIPPED = damages.named("cache", "train.bin", "flip(was, 101)")
CUT = damages.named("cache", "train.bin", "was[:10]")
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(errno.EMFILE, "many", "a")])
def test_an_interrupted_preparation_leaves_nothing(experiment, text, tmp_path, monkeypatch, error):
    def interrupt(*arguments):
        raise error

    with monkeypatch.context() as patch, pytest.raises((KeyboardInterrupt, OSError)):
        patch.setattr(token_cache, "_describe", interrupt)
        experiment.prepare(text, tmp_path)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("side", ["train", "validation"])
def test_an_empty_split_is_refused_before_anything_is_trained(experiment, tmp_path, capfd, side):
    kept = [text for text in DOCUMENTS if in_validation(text, 0.3) != (side == "validation")]
    few = write_text(tmp_path / "few.jsonl", kept)
    line = error_line(lambda: experiment.prepare(few, tmp_path / "cache"))
    assert f"{few}: validation_fraction 0.3 leaves no document for {side}; expected" in line
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize(
    ("error", "says"),
    [
        *((OSError(number, os.strerror(number)), "is full") for number in FULL),
        (OSError(errno.EIO, os.strerror(errno.EIO)), "cannot be written"),
        (OSError("600 requested and 0 written"), "cannot be written"),  # numpy's of a full disk
    ],
)
def test_a_disk_that_cannot_be_written_is_named_and_nothing_is_left(tmp_path, error, says):
    def build(folder):
        (folder / "train.bin").write_bytes(b"half")
        raise error

    with pytest.raises(
        UserError, match=f"^data.cache_dir: {tmp_path / 'cache'} {says} .*; expected"
    ):
        token_cache.prepare(tmp_path / "cache" / "text", build)
    assert list((tmp_path / "cache").iterdir()) == []


# Waits for a partner right before a step; arguments: cache, meeting point, own name, step, number
# of partners.
MEETING = """
import sys, time
from pathlib import Path
from training.data import token_cache

cache, meeting, name, step, partners = sys.argv[1:]
ordinary = getattr(token_cache, step)

def meet(*arguments):
    (Path(meeting) / name).touch()
    while len(list(Path(meeting).iterdir())) < int(partners):
        time.sleep(0.01)
    ordinary(*arguments)

def build(folder):
    (folder / "train.bin").write_bytes(bytes(range(256)))
    return {"vocab_size": 256}

setattr(token_cache, step, meet)
token_cache.prepare(Path(cache), build)
print(token_cache.TokenCache(cache).meta)
"""


def start(tmp_path, name, step, partners):
    meeting, script = tmp_path / "meeting", tmp_path / "meet.py"
    meeting.mkdir(exist_ok=True)
    script.write_text(MEETING)
    return Program(script, tmp_path / "caches/toy", meeting, name, step, partners, PYTHONPATH=ROOT)


def test_two_processes_at_once_end_with_one_cache(tmp_path):
    both = [start(tmp_path, name, "publish", 2) for name in ("a", "b")]
    outputs = [process.communicate(timeout=600)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert outputs[0] == outputs[1] != ""
    (cache,) = (tmp_path / "caches").iterdir()
    assert cache_problem(cache) is None


def test_the_next_preparation_sweeps_what_a_killed_one_has_left_and_nothing_else(tmp_path):
    killed, other = (start(tmp_path, name, "_describe", 3) for name in ("a", "b"))
    deadline = time.monotonic() + 120
    while len(list((tmp_path / "meeting").iterdir())) < 2:
        assert killed.poll() is other.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert all(name.startswith(".") for name in os.listdir(tmp_path / "caches"))
    again = start(tmp_path, "c", "_describe", 3)
    for process in (again, other):
        assert "256" in process.communicate(timeout=600)[0] and process.returncode == 0
    assert os.listdir(tmp_path / "caches") == ["toy"]


@pytest.mark.parametrize("damage", damages.of("cache"), ids=str)
def test_a_damaged_cache_is_refused_reported_and_rebuilt(
    experiment, made, folder, text, capfd, damage
):
    assert TokenCache(folder).meta == made.meta  # checked once, and noted
    damage.do(folder)
    assert damage.follows(f"{folder}: ", error_line(lambda: TokenCache(folder)))
    again = experiment.prepare(text, folder.parent)
    assert capfd.readouterr().err.startswith(f"{folder}: {damage.words}")
    assert content(again.folder) == content(made.folder)
    assert cache_problem(folder) is None and os.listdir(folder.parent) == [folder.name]


def test_a_copied_cache_is_hashed_once_more(folder, monkeypatch):
    os.utime(folder / "train.bin")
    read = []
    monkeypatch.setattr(
        token_cache, "sha256", lambda file: read.append(file.name) or files.sha256(file)
    )
    for _ in range(2):
        assert cache_problem(folder) is None
    assert read == ["train.bin"]


def test_a_cache_that_cannot_be_written_is_used(folder, monkeypatch):
    def refused(path, value):
        raise UserError(f"{path}: cannot write: Read-only file system")

    os.utime(folder / "train.bin")
    monkeypatch.setattr(token_cache, "write_json", refused)
    assert cache_problem(folder) is None
    FLIPPED.do(folder)
    assert cache_problem(folder) == FLIPPED.words


def test_a_cache_that_is_deleted_while_in_use_is_named_in_one_line(experiment, made, folder, text):
    cache = type(made)(folder)
    shutil.rmtree(folder)
    assert str(folder) in error_line(lambda: cache.tokens("train"))
    again = experiment.prepare(text, folder.parent)
    assert content(again.folder) == content(made.folder)


def test_the_checksum_is_that_of_the_content_wherever_it_was_read(experiment, made, tmp_path):
    same = experiment.prepare(write_text(tmp_path / "same.jsonl", DOCUMENTS), tmp_path)
    other = experiment.prepare(write_text(tmp_path / "less.jsonl", DOCUMENTS[1:]), tmp_path)
    assert same.folder.name != made.folder.name
    assert same.checksum == made.checksum != other.checksum


def test_a_library_s_own_cache_is_made_again_once_it_is_damaged(tmp_path, capfd):
    folder, made = tmp_path / "arrow", []

    def make():
        if not folder.exists():
            folder.mkdir()
            (folder / "train.bin").write_bytes(bytes(200))
            made.append(folder)
        return (folder / "train.bin").read_bytes()

    for damage in (None, None, FLIPPED, CUT):
        if damage is not None:
            damage.do(folder)
        assert token_cache.guard(folder, make) == bytes(200)
    assert len(made) == 3
    told = capfd.readouterr().err.splitlines()
    assert told[0] == f"{folder}: {FLIPPED.words}; rebuilding it"
    assert told[1].startswith(f"{folder}: train.bin has 10 bytes where meta.json says 200")


def test_pickles_carry_no_opened_file(made):
    whole = made.tokens("train").tobytes()
    pickled = pickle.dumps(made)
    assert len(pickled) < 10_000
    assert pickle.loads(pickled).tokens("train").tobytes() == whole


def command(experiment, *arguments):
    return finished("-m", f"{experiment.name}.data", *arguments, cwd=ROOT)


def test_the_command_prepares_what_a_config_describes(experiment, made, text, tmp_path):
    done = command(experiment, *experiment.arguments(text, tmp_path, "--threads", "2"))
    assert done.returncode == 0, done.err
    printed = json.loads(done.out)
    assert printed["sha256"] == made.meta["sha256"]
    assert Path(printed["folder"]).parent == tmp_path
    # The libraries' own logs stay silent.
    assert done.err.startswith("training a ") and done.err.count("\n") in (1, 3)


def test_the_commands_start_without_what_is_slow_to_import():
    modules = ", ".join(f"{name}.data" for name in EXPERIMENTS)
    code = f"import sys, {modules}; print(set(sys.argv[1:]) & set(sys.modules))"
    slow = ["torch", "datasets", "sentencepiece", "tokenizers", "pyarrow", "pythonbible"]
    output = subprocess.check_output([sys.executable, "-c", code, *slow], cwd=ROOT, text=True)
    assert output.strip() == "set()"
