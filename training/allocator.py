"""glibc's malloc, told to keep the memory a training step frees for the next one."""

from __future__ import annotations

import ctypes
import os
import platform

# malloc.h
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
# No block is mapped on its own, and -1 switches trimming of the heap off.
_OPTIONS = ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, -1))

OPT_OUT = "TRAINING_KEEP_MEMORY"  # set to 0 by a user who wants memory back sooner
_TUNED = ("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")  # how users tune malloc, or replace it


def keep_memory() -> bool:
    """Keeps freed memory in this process; whether that was done. Call it before training.

    By default glibc maps every large block afresh and returns it when freed, so a step on the CPU
    meets a page fault, and the kernel's clearing of a page, for every 4 KB it uses. Here large
    blocks come from the heap and the heap never shrinks; the process then stays as large as its
    largest step. Does nothing without glibc, when the environment says TRAINING_KEEP_MEMORY=0,
    or when it already tunes malloc (MALLOC_*_, GLIBC_TUNABLES) or preloads another one.
    """
    if platform.libc_ver()[0] != "glibc" or os.environ.get(OPT_OUT) == "0":
        return False
    if any(value and name.startswith(_TUNED) for name, value in os.environ.items()):
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return all(mallopt(option, value) == 1 for option, value in _OPTIONS)
