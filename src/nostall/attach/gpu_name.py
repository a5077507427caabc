"""The name of the GPU in use, found without starting CUDA where it does not run yet.

Compile workers must not create a CUDA context, and a process that forks later must not initialise
the driver; so this only looks at what is loaded already, and at what ``nostall apply`` passed on.
"""

from __future__ import annotations

import ctypes
import os
import sys

VARIABLE = "NOSTALL_GPU"


def current() -> str | None:
    """The current device's name, ``NOSTALL_GPU``, or None when nothing says it."""
    return _of_context() or _of_torch() or os.environ.get(VARIABLE) or None


def _of_context() -> str | None:
    """The device of this thread's CUDA context, if the driver is loaded and there is one."""
    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return None
    device, raw = ctypes.c_int(), ctypes.create_string_buffer(256)
    if driver.cuCtxGetDevice(ctypes.byref(device)) != 0:
        return None
    if driver.cuDeviceGetName(raw, len(raw), device) != 0:
        return None
    return raw.value.decode("utf-8", "replace")


def _of_torch() -> str | None:
    """PyTorch's current device, if PyTorch already uses CUDA: a thread may have no context yet."""
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    if cuda is None or not cuda.is_initialized():
        return None
    return str(cuda.get_device_name())
