"""Name of the current GPU, found without initialising CUDA.

Compile workers must not create a CUDA context, and a process that forks later must not initialise
the driver.  So this module uses only libraries that are loaded already, and ``NOSTALL_GPU``.
"""

from __future__ import annotations

import ctypes
import os
import sys

VARIABLE = "NOSTALL_GPU"
"""Environment variable with the GPU's name; ``nostall apply`` sets it."""


def current() -> str | None:
    """The name of the current GPU, or None if it is unknown."""
    return _context_gpu() or _torch_gpu() or os.environ.get(VARIABLE) or None


def _context_gpu() -> str | None:
    """The GPU of this thread's CUDA context, if the driver is loaded and there is a context."""
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


def _torch_gpu() -> str | None:
    """PyTorch's current GPU, if PyTorch uses CUDA already; this thread may have no context yet."""
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    if cuda is None or not cuda.is_initialized():
        return None
    return str(cuda.get_device_name())
