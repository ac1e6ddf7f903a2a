"""Keeping memory: what malloc does with a large freed block, seen from outside."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from training import allocator

ROOT = Path(__file__).resolve().parents[2]
ON_GLIBC = platform.libc_ver()[0] == "glibc"

# Prints whether memory is kept, and the page faults of touching 64 MB that were freed before.
PROBE = """
import ctypes, resource
from training.allocator import keep_memory
kept = keep_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes, libc.memset.argtypes = [ctypes.c_void_p], [ctypes.c_void_p, ctypes.c_int,
    ctypes.c_size_t]
def touch():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = libc.malloc(1 << 26)
    libc.memset(block, 1, 1 << 26)
    libc.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
touch()
print(kept, touch())
"""


def probe(**environment):
    clean = {k: v for k, v in os.environ.items() if "MALLOC" not in k and k != allocator.OPT_OUT}
    result = subprocess.run(
        [sys.executable, "-c", PROBE],
        env={**clean, **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    kept, faults = result.stdout.split()
    return kept == "True", int(faults)


@pytest.mark.skipif(not ON_GLIBC, reason="needs glibc")
def test_a_freed_block_is_used_again_without_page_faults():
    kept, faults = probe()
    assert kept and faults < 100


@pytest.mark.skipif(not ON_GLIBC, reason="needs glibc")
@pytest.mark.parametrize("name", [allocator.OPT_OUT, "MALLOC_TOP_PAD_", "GLIBC_TUNABLES"])
def test_the_environment_can_decline(name):
    value = {"GLIBC_TUNABLES": "glibc.malloc.arena_max=4"}.get(name, "0")
    kept, faults = probe(**{name: value})
    assert not kept and faults > 10


def test_nothing_happens_without_glibc(monkeypatch):
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    monkeypatch.setattr(allocator.ctypes, "CDLL", lambda name: pytest.fail("loaded a library"))
    assert allocator.keep_memory() is False
