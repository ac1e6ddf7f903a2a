"""Where a result was made: versions, commit and device, kept with every run."""

from __future__ import annotations

import functools
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

# Drivers, which only ask for the commit, start without torch.
if TYPE_CHECKING:
    import torch

_PACKAGES = ("torch", "accelerate", "numpy", "datasets", "sentencepiece", "timm")


def describe(device: torch.device) -> dict[str, object]:
    """Versions, commit, device and threads as JSON types."""
    import torch

    return {
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "commit": commit(),
        "device": device_name(device),
        "threads": torch.get_num_threads(),
    }


@functools.cache
def device_name(device: torch.device) -> str:
    """The GPU's or the processor's name."""
    if device.type == "cuda":
        import torch

        return torch.cuda.get_device_name(device)
    cpus = Path("/proc/cpuinfo")
    lines = cpus.read_text().splitlines() if cpus.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def has_bf16_units(device: torch.device) -> bool:
    """Whether the device multiplies bf16 matrices itself; else torch does so in float32, slower."""
    import torch

    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if platform.machine() in ("x86_64", "AMD64"):
        return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.ops.mkldnn._is_mkldnn_bf16_supported()


@functools.cache
def commit() -> str | None:
    """The repository's commit, with "+changes" when files differ from it; None outside git.

    As it was at the first call in this process.
    """
    git = ["git", "-C", str(Path(__file__).resolve().parent.parent)]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True)
        status = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True)
    except OSError:
        return None
    changes = "+changes" if status.stdout.strip() else ""
    return None if head.returncode else head.stdout.strip() + changes


@functools.cache
def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
