"""What every test can rely on."""

from __future__ import annotations

import atexit
import contextlib
import gc
import hashlib
import os
import signal
import sys
import time
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import settings

from nostall.core.errors import MissingPart
from nostall.core.garbage_collector import paused
from nostall.sass.binary import toolchain

# A shell starts background jobs with Ctrl-C ignored, and children inherit that; tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Tests compute little, and idle threads of the teams of several workers spin. On few cores
# Inductor's compile processes, which import PyTorch again, take longer than they save; so does its
# check of the C++ compiler. Commands inherit what is set.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(max(1, (os.cpu_count() or 1) // 4)))
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

# The same examples on every machine; HYPOTHESIS_PROFILE=random looks for new ones.
settings.register_profile("same", derandomize=True, deadline=None)
settings.register_profile("random", deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))


KEPT = Path(__file__).parents[1] / ".cache" / "disassembled"
KEPT_DAYS = 14


def keep_disassemblies() -> None:
    """Have nvdisasm asked once for the same bytes; workers and commands inherit what is set.

    What this very nvdisasm said is kept for later sessions, but no longer than ``KEPT_DAYS``.
    """
    try:
        tool = toolchain.find("nvdisasm")
    except MissingPart:
        return
    folder = KEPT / hashlib.sha256(tool.read_bytes()).hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    oldest = time.time() - KEPT_DAYS * 86400
    for file in KEPT.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # another session has removed it
            if file.is_file() and file.stat().st_mtime < oldest:
                file.unlink()
    script = Path(__file__).parent / "tools" / "nvdisasm"
    os.environ |= {
        "NOSTALL_TESTS_NVDISASM": str(tool),
        "NOSTALL_TESTS_KEPT": str(folder),
        "NOSTALL_NVDISASM": str(script),
    }


if "NOSTALL_NVDISASM" not in os.environ:
    keep_disassemblies()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Pause garbage collection while tests are collected, and never scan what was collected.

    Modules and tests stay; a full collection of them takes a second or more.
    """
    with paused():
        result = yield
    gc.freeze()
    atexit.register(gc.unfreeze)  # else Triton reports its frozen objects as leaks at the end
    return result


frozen_modules = 0


def pytest_runtest_logfinish() -> None:
    """Freeze what a test has imported: full collections, which some tests ask for, skip it."""
    global frozen_modules
    if len(sys.modules) > frozen_modules + 100:
        frozen_modules = len(sys.modules)
        gc.collect()
        gc.freeze()
