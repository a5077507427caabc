"""Run a throw-away peer of the assembler search on one kernel, in a process of its own.

The peer is a folder with ``gpu_portfolio.py``, which is not part of this repository.  It gets the
kernel that the other methods get, and its winner is measured as theirs are.

    python -m benchmarks.ptx.spike_peer FOLDER KERNEL.json SECONDS RESULT.json
"""

from __future__ import annotations

import base64
import json
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

from nostall.core.launch import Buffer, Scalar
from nostall.sass.binary.code_hash import rename_kernel
from nostall.tuning.sources.source import Source

FINAL_SECONDS = 12.0
"""Seconds at its end in which the peer does not search."""
_SCRATCH = ("global_scratch", "profile_scratch")
"""Arguments of the compiler that the peer adds itself."""
_TORCH_TYPES = {
    "f16": "float16", "bf16": "bfloat16", "f32": "float32",
    "f8e5m2": "float8_e5m2", "f8e4m3": "float8_e4m3fn",
}  # fmt: skip


@dataclass(frozen=True)
class Found:
    """What the peer found."""

    cubin: bytes
    """Its winner under the original kernel name; empty if it has none."""
    own_ratio: dict[str, Any] | None
    """The ratio that it reports itself."""
    label: str
    counts: dict[str, int]
    original_us: float
    seconds: float


def run_spike(folder: Path, source: Source, seconds: float) -> Found:
    """Give the peer ``seconds`` of search on a kernel; raises ValueError if it cannot run it."""
    with tempfile.TemporaryDirectory() as scratch:
        kernel, result = Path(scratch, "kernel.json"), Path(scratch, "result.json")
        kernel.write_text(json.dumps(describe(source)))
        command = [sys.executable, "-m", "benchmarks.ptx.spike_peer", str(folder.absolute())]
        command += [str(kernel), str(seconds + FINAL_SECONDS), str(result)]
        run = subprocess.run(
            command, capture_output=True, text=True, timeout=seconds + 90, check=False
        )
        if not result.exists():
            raise ValueError(f"the peer failed: {run.stderr[-1500:]}")
        found = json.loads(result.read_text())
    cubin = base64.b64decode(found["cubin"])
    if cubin:
        match = re.search(rb"\0\.text\.([\w$]+)\0", cubin)
        if match is None:
            raise ValueError("the peer's cubin has no kernel")
        cubin = rename_kernel(cubin, match.group(1).decode(), source.kernel)
    return Found(
        cubin,
        found["ratio"],
        found["label"],
        found["counts"],
        found["original_us"],
        found["seconds"],
    )


def describe(source: Source) -> dict[str, Any]:
    """A kernel as the peer needs it: arrays (the output last), values, launch and files.

    Raises ValueError for a kernel without exactly one output.
    """
    assert source.launch is not None and source.ptx is not None
    buffers = [a for a in source.launch.args if isinstance(a, Buffer)]
    outputs = [b for b in buffers if b.role != "in"]
    if len(outputs) != 1 or outputs[0].role != "out":
        raise ValueError("the peer runs kernels with one output only")
    arrays = [*(b for b in buffers if b.role == "in"), outputs[0]]
    if unknown := [b.dtype for b in arrays if b.dtype not in _TORCH_TYPES]:
        raise ValueError(f"the peer does not know the types {unknown}")
    values: list[list[Any]] = []
    for argument in source.launch.args:
        if argument.name in _SCRATCH:
            continue
        if isinstance(argument, Buffer):
            values.append(["ptr", [b.name for b in arrays].index(argument.name)])
        elif isinstance(argument, Scalar):
            kind = "fp32" if argument.dtype == "f32" else "i32"
            values.append([kind, argument.value])
    return {
        "ptx": source.ptx,
        "cubin": base64.b64encode(source.cubin).decode(),
        "name": source.kernel,
        "values": values,
        "shared": source.launch.shared,
        "block": source.launch.block[0],
        "grid": list(source.launch.grid),
        "arrays": [[list(b.shape), _TORCH_TYPES[b.dtype]] for b in arrays],
        "config": source.provenance.get("options", ""),
    }


def main(folder: str, kernel_file: str, seconds: str, result_file: str) -> None:
    """Run the peer in this process and write its winner."""
    began = monotonic()
    sys.path.insert(0, folder)
    import gpu_portfolio as peer  # type: ignore[import-not-found]
    import torch

    built = json.loads(Path(kernel_file).read_text())
    built["cubin"] = base64.b64decode(built["cubin"])
    built["values"] = [tuple(value) for value in built["values"]]
    arrays = [(tuple(shape), getattr(torch, dtype)) for shape, dtype in built.pop("arrays")]
    case = peer.Case(None, arrays, [], None, ["given"])
    peer.CASES[built["name"]] = lambda: case
    peer.compile_case = lambda case, config: built
    loaded: list[bytes] = []
    load = peer.Gpu.load

    def remember(gpu: Any, cubin: bytes, *arguments: Any) -> Any:
        if cubin != built["cubin"]:
            loaded.append(cubin)
        return load(gpu, cubin, *arguments)

    peer.Gpu.load = remember
    report = peer.tune(built["name"], float(seconds))
    best = report.get("best")
    # The comparison of its winner is the last thing that it does, so that cubin is the last one.
    winner = loaded[-1] if best and loaded else b""
    answer = {
        "cubin": base64.b64encode(winner).decode(),
        "ratio": {k: best[k] for k in ("ratio", "null", "faster")} if best else None,
        "label": best["label"] if best else "",
        "counts": report["counts"] | {"distinct": len(report["variants"])},
        "original_us": report["original_us"],
        "seconds": monotonic() - began,
    }
    Path(result_file).write_text(json.dumps(answer))


if __name__ == "__main__":
    import os

    main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)  # without waiting for assemblers of the peer that still run
