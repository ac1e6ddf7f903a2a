"""A byte-level BPE for the tests of data."""

import pytest

from bart_span_denoise import bpe, data
from tests.bart_span_denoise.texts import DOCUMENTS, SIZE


@pytest.fixture(scope="session")
def gpt2(tmp_path_factory):
    """Files of a BPE, as config keys."""
    folder = tmp_path_factory.mktemp("bpe")
    bpe.train(DOCUMENTS, SIZE, folder)
    return {key: str(folder / name) for key, name in zip(data.BPE_KEYS, bpe.FILES, strict=True)}
