"""A user's program with a Triton kernel in each step; only the driver is made up.

A launch sleeps, less long if its binary is in the list that ``FASTER`` names (sha256, a line each).
``SEARCH`` replaces the search: a Python function ``module:name`` of (source, seconds, ordinal).

Usage: ``triton_program.py [STEPS]``
"""

from __future__ import annotations

import hashlib
import importlib
import os
import sys
import time
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from nostall.attach import first_call
from tests.unit.attach.program import triton_step

FASTER = Path(os.environ["FASTER"])


class Utilities:
    """The driver's utilities; the handle of a binary is its sleep in seconds."""

    def load_binary(self, name, kernel, shared, device):
        sha256 = hashlib.sha256(kernel).hexdigest()
        faster = FASTER.exists() and sha256 in FASTER.read_text()
        return object(), 0.005 if faster else 0.02, 32, 0, 1024

    def unload_module(self, module):
        pass

    def get_device_properties(self, device):
        return {"max_shared_mem": 232448}


class Driver:
    """A driver with one sm_90 GPU."""

    utils = Utilities()

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def launcher_cls(self, src, metadata):
        return lambda x, y, z, stream, function, *others: time.sleep(function)


if __name__ == "__main__":
    driver.set_active(Driver())
    if search := os.environ.get("SEARCH"):
        module, _, name = search.partition(":")
        first_call.tune_in_subprocess = getattr(importlib.import_module(module), name)
    kernel, tensor = triton.jit(triton_step.axpy), torch.ones(4096)
    for _ in range(int(sys.argv[1]) if len(sys.argv) > 1 else 100_000):
        triton_step.step(kernel, tensor)
    print("loaded", hashlib.sha256(triton_step.last.kernel).hexdigest())
