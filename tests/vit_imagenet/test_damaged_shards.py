"""Damaged shards, and damaged copies of them: named, and nothing of them used."""

import pytest

from tests.vit_imagenet.test_data import flipped, opened, write_parquet, write_tar
from training.errors import UserError

DAMAGED = {
    "another file": lambda content: b"not a tar" * 100,
    "empty": lambda content: b"",
    "cut in an image": lambda content: content[: 512 + 100],
    "cut behind an image": lambda content: content[:5120],
    "cut before its end": lambda content: content[: 512 * -(-len(content.rstrip(b"\0")) // 512)],
    "a damaged first header": lambda content: flipped(content, 10),
    "a damaged later header": lambda content: flipped(content, content.index(b"ant_2.jpg")),
}


@pytest.mark.parametrize("how", DAMAGED)
def test_a_damaged_tar_is_named_and_nothing_of_it_used(tmp_path, how):
    """To tarfile a damaged header in the middle is the end: images would just be fewer."""
    root = write_tar(tmp_path / "images")
    file = root / "train-0.tar"
    file.write_bytes(DAMAGED[how](file.read_bytes()))
    with pytest.raises(UserError) as caught:
        opened(root, "shards")
    assert str(caught.value).startswith(f"{file}: cannot be read as tar (")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("write", [write_parquet, write_tar])
def test_a_damaged_arrow_copy_is_made_again(tmp_path, capfd, write):
    root = write(tmp_path / "images")
    before = [record.content for record in opened(root, "shards").train.source]
    file = next((tmp_path / "cache").rglob("*-train.arrow"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(bytes(content))
    after = [record.content for record in opened(root, "shards").train.source]
    assert after == before
    assert f"{file.name} is damaged: its SHA-256 is not" in capfd.readouterr().err
