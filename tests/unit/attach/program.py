"""A user's program that launches a Triton kernel without a GPU, for the tests of attachment points.

Everything of Triton is real (specialisation, compiler, cache, kernel objects) except the driver:
for each binary that would be loaded onto a GPU the program prints a line of JSON.

Usage: ``program.py MODE [FOLDER]``, modes as in :func:`main`; writes the binaries to FOLDER.
"""

# ruff: noqa: N803
from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

KEEP = Path(sys.argv[2]) if len(sys.argv) > 2 else None


class Utilities:
    """The driver's utilities; loading a binary prints it."""

    def load_binary(self, name, kernel, shared, device):
        sha256 = hashlib.sha256(kernel).hexdigest()
        if KEEP is not None:
            (KEEP / f"{sha256}.cubin").write_bytes(kernel)
        about = {"name": name, "sha256": sha256, "process": os.getpid()}
        print(json.dumps({**about, "dependent": Driver.launch_pdl}), flush=True)
        return object(), object(), 32, 0, 1024

    def unload_module(self, module):
        pass

    def get_device_properties(self, device):
        return {"max_shared_mem": 232448}


class Driver:
    """A driver with one sm_90 GPU, whose launches do nothing."""

    utils = Utilities()
    launch_pdl = None  # of the launcher that was made last

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def launcher_cls(self, src, metadata):
        Driver.launch_pdl = metadata.launch_pdl
        return lambda *args: None

    def get_benchmarker(self):
        def benchmark(call, quantiles):
            call()
            return [1.0, 1.0, 1.0]

        return benchmark


class Tensor:
    """The part of a tensor that Triton and nostall read: 2048 elements, with an offset of 16."""

    def __init__(self, dtype):
        self.dtype = dtype

    def element_size(self):
        return 4

    def storage_offset(self):
        return 16

    def untyped_storage(self):
        return types.SimpleNamespace(nbytes=lambda: (16 + 2048) * 4)

    def data_ptr(self):
        return 0

    def ptr_range(self):
        return 0


def axpy(y, x, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + offs, offs < n, 0.0)
    tl.store(y + offs, value * 2.0 + tl.load(y + offs, offs < n, 0.0), offs < n)


def kernel(mode):
    made = triton.jit(axpy)
    if "autotune" in mode:
        configs = [triton.Config({"BLOCK": 512}), triton.Config({"BLOCK": 1024})]
        made = triton.autotune(configs, key=["n"])(made)
    if "decorated" in mode:
        import nostall

        made = nostall.optimize(made)
    if "tuned" in mode:
        import nostall
        from nostall.attach import first_call

        first_call.tune_in_subprocess = tuned
        made = nostall.optimize(tune_seconds=5)(made)
    return made


def tuned(source, seconds, ordinal):
    """Replaces the search: prints its arguments, and switches to a store with a result."""
    os.environ["NOSTALL_HOME"] = os.environ["TUNED_HOME"]
    sha256 = hashlib.sha256(source.cubin).hexdigest()
    launch = source.launch.model_dump(mode="json")
    job = {"name": source.kernel, "seconds": seconds, "ordinal": ordinal, "launch": launch}
    print(json.dumps({**job, "sha256": f"tuned {sha256}", "process": os.getpid()}), flush=True)


def launch(mode, times=1):
    sizes = {} if "autotune" in mode else {"BLOCK": 512}
    function = kernel(mode)
    for _ in range(times):
        grid = (lambda meta: (2048 // meta["BLOCK"],)) if times > 1 else (4,)
        compiled = function[grid](Tensor("fp32"), Tensor("fp32"), 2048, **sizes)
        loaded = hashlib.sha256(compiled.asm["cubin"]).hexdigest()
        assert loaded == hashlib.sha256(compiled.kernel).hexdigest()


def main(mode):
    """Run a mode.

    ``plain``, ``autotune``, ``decorated`` and ``decorated-autotune`` launch once.
    ``tuned`` and ``tuned-autotune`` launch three times.
    ``…twice`` launches two functions with the same source.
    ``unknown-…`` pretends a newer version of Triton.
    ``worker-…`` runs the mode in a child process.
    """
    if mode.startswith("worker-"):
        rest = [mode.removeprefix("worker-"), *sys.argv[2:]]
        subprocess.run([sys.executable, __file__, *rest], check=True)
        return
    driver.set_active(Driver())
    torch = types.ModuleType("torch")  # Triton needs its class; importing PyTorch takes seconds
    torch.Tensor = type("Tensor", (), {})
    sys.modules["torch"] = torch
    if mode.startswith("unknown-"):
        triton.__version__ = "4.0.0"
    launch(mode, times=3 if "tuned" in mode else 1)
    if mode.endswith("twice"):
        launch(mode)


if __name__ == "__main__":
    main(sys.argv[1])
