"""A user's program for ``benchmarks.attach.attach_points``: one kernel, launched in several ways.

    python benchmarks/attach/user_program.py MODE FOLDER

Modes: ``plain``, ``decorated``, ``autotune`` (decorated), ``first-call``, ``worker``, ``compiled``
(torch.compile), ``cuda.core``, ``cupy``. Writes the result to FOLDER/result.npy, each binary that
the driver loads to FOLDER/SHA256.cubin, and its sha256 to FOLDER/loaded.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
ROWS = COLUMNS = 512


def record_loads(folder: Path) -> None:
    """Patch Triton so that it records each binary that it gives to the driver."""
    from triton.runtime import driver

    utilities: Any = driver.active.utils
    load = utilities.load_binary

    def load_binary(name: str, data: bytes, *rest: Any) -> Any:
        record_binary(folder, data)
        return load(name, data, *rest)

    utilities.load_binary = load_binary


def record_binary(folder: Path, data: bytes) -> None:
    """Write a binary to the folder and append its sha256 to the list."""
    sha256 = hashlib.sha256(data).hexdigest()
    (folder / f"{sha256}.cubin").write_bytes(data)
    with (folder / "loaded").open("a") as log:
        log.write(f"{sha256}\n")


def inputs() -> tuple[Any, Any, Any]:
    """(output, rows, weights), with the same values in each process."""
    import torch

    torch.manual_seed(1)
    x = torch.randn(ROWS, COLUMNS).half().cuda()
    w = torch.randn(COLUMNS).half().cuda()
    return torch.zeros_like(x), x, w


def kernel(mode: str) -> Any:
    """The Triton kernel, decorated as the mode needs it."""
    import triton

    sys.path.insert(0, str(EXAMPLES))
    from rmsnorm import rmsnorm

    if mode == "plain":
        return rmsnorm
    import nostall

    if mode == "first-call":
        return nostall.optimize(tune_seconds=6)(rmsnorm)
    if mode == "autotune":
        warps = [triton.Config({}, num_warps=4), triton.Config({}, num_warps=8)]
        rmsnorm = triton.autotune(warps, key=["columns"])(rmsnorm)
    return nostall.optimize(rmsnorm)


def triton_result(mode: str) -> Any:
    y, x, w = inputs()
    launch = kernel(mode)[(ROWS,)]
    for _ in range(2):  # with `first-call`, the first call tunes and the second uses the result
        y.zero_()
        launch(y, x, w, COLUMNS, COLUMNS, 1e-6, BLOCK=COLUMNS)
    return y


def compiled_result() -> Any:
    import torch

    _, x, w = inputs()
    return torch.compile(lambda x, w: torch.relu(torch.sin(x) * w + 1.0))(x, w)


def arguments(y: Any, x: Any, w: Any) -> list[Any]:
    """Arguments of the compiled kernel, with Triton's two scratch pointers."""
    import numpy as np

    pointers = [np.uint64(t.data_ptr()) for t in (y, x, w)]
    sizes = [np.int32(COLUMNS), np.int32(COLUMNS), np.float32(1e-6)]
    return [*pointers, *sizes, np.uint64(0), np.uint64(0)]


def loaded_result(mode: str, folder: Path) -> Any:
    """Launch the cubin FOLDER/original without Triton; FOLDER/shared has its shared memory."""
    import torch

    import nostall

    y, x, w = inputs()
    path, shared = folder / "original", int((folder / "shared").read_text())
    record_binary(folder, nostall.load(path, to="bytes"))
    if mode == "cupy":
        module = nostall.load(path, to="cupy")
        function = module.get_function("rmsnorm")
        function((ROWS,), (128,), tuple(arguments(y, x, w)), shared_mem=shared)
    else:
        from cuda.core import Device, LaunchConfig, launch

        device = Device()
        device.set_current()
        config = LaunchConfig(grid=ROWS, block=128, shmem_size=shared)
        launch(device.default_stream, config, nostall.load(path), *arguments(y, x, w))
        device.sync()
    torch.cuda.synchronize()
    return y


def run(mode: str, folder: Path) -> None:
    import numpy as np

    if mode in ("cuda.core", "cupy"):
        result = loaded_result(mode, folder)
    else:
        record_loads(folder)
        result = compiled_result() if mode == "compiled" else triton_result(mode)
    np.save(folder / "result.npy", result.cpu().numpy())


def main() -> None:
    mode, folder = sys.argv[1], Path(sys.argv[2])
    if mode != "worker":
        run(mode, folder)
        return
    import multiprocessing

    child = multiprocessing.get_context("spawn").Process(target=run, args=("plain", folder))
    child.start()
    child.join()
    sys.exit(child.exitcode)


if __name__ == "__main__":
    main()
