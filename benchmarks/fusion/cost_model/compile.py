"""Compilation of many stitched kernels in a pool of processes that use no GPU.

The binaries go to Triton's cache, where later launches find them.  For each compiled program a JSON
file beside its source has the resources of its kernels: registers, stack bytes of a thread
(spills), shared memory and instructions.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import struct
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.pool import Pool
from pathlib import Path
from time import monotonic
from typing import Any

import torch

from nostall.core.errors import one_line
from nostall.core.files.atomic import write_atomically
from nostall.fusion.codegen.emit.program import Launch, Program
from nostall.fusion.codegen.runtime.kernel import launch_options, load_source
from nostall.sass.binary.attributes import parse_attributes
from nostall.sass.binary.cubin import Cubin

_REGISTERS, _STACK_BYTES = 0x2F, 0x11
"""Attributes of ``.nv.info``: (symbol, registers) and (symbol, stack bytes)."""
_NICENESS = 15
"""Niceness of the compiling processes, so that they do not disturb those that time kernels."""


@dataclass(frozen=True)
class Task:
    """A program to compile, without its graph."""

    key: str
    source: str
    launches: tuple[Launch, ...]
    dtypes: tuple[tuple[str, ...], ...]
    """Dtypes of the tensor arguments of each launch."""


def make_task(program: Program) -> Task:
    workspace_dtypes = {workspace.name: workspace.dtype for workspace in program.workspaces}
    argument_dtypes = {
        name: program.graph[index].dtype for name, index in program.nodes_by_argument.items()
    }
    dtype_by_name = argument_dtypes | workspace_dtypes
    dtypes = tuple(
        tuple(dtype_by_name[name] for name in launch.arguments) for launch in program.launches
    )
    return Task(program.key, program.source, program.launches, dtypes)


def compiler_pool(folder: Path, process_count: int, capability: int) -> Pool:
    """A pool of processes that compile for one architecture.

    Leaving its context terminates them, even during a compilation.
    """
    context = multiprocessing.get_context("spawn")
    return context.Pool(process_count, _start_worker, (folder, capability))


def process_count(gpus: int) -> int:
    """Number of compiling processes: CPU cores that the processes of the GPUs leave."""
    return max(1, len(os.sched_getaffinity(0)) - gpus)


def result_path(folder: Path, key: str) -> Path:
    """Result file of a compiled program."""
    return folder / f"{key}.json"


def wait_for_programs(
    folder: Path, keys: Iterable[str], deadline: float
) -> dict[str, dict[str, Any]]:
    """Results of these programs, once all are compiled or at ``deadline`` (monotonic clock)."""
    expected = list(keys)
    while True:
        ready = [key for key in expected if result_path(folder, key).exists()]
        if len(ready) == len(expected) or monotonic() > deadline:
            return {key: json.loads(result_path(folder, key).read_text()) for key in ready}
        time.sleep(0.05)


def submit_programs(
    workers: Pool, names: Iterable[str], programs_of: Callable[[str], Iterable[Program]]
) -> None:
    """Submit all programs of these chains to the compiler pool once, in order."""
    submitted: set[str] = set()
    for name in names:
        try:
            programs = tuple(programs_of(name))
        except Exception:  # the job of this chain reports the error
            traceback.print_exc()
            continue
        for program in programs:
            if program.key not in submitted:
                submitted.add(program.key)
                workers.apply_async(run_task, (make_task(program),))


def run_task(task: Task) -> str:
    """Compile a program in a process of the pool and write its resources or its error."""
    result: dict[str, Any] = {}
    start = monotonic()
    try:
        _, functions = load_source(
            task.source, [launch.name for launch in task.launches], _Worker.folder
        )
        result["kernels"] = [
            _compile_kernel(function, launch, dtypes)
            for function, launch, dtypes in zip(functions, task.launches, task.dtypes, strict=True)
        ]
    except Exception as error:  # compilers raise many kinds; the plan is not timed
        result["error"] = one_line(error)
    result["seconds"] = round(monotonic() - start, 2)
    write_atomically(result_path(_Worker.folder, task.key), json.dumps(result).encode())
    return task.key


def cubin_resources(cubin: bytes) -> dict[str, int]:
    """Registers and stack bytes of a thread, and instructions, of a cubin with one kernel."""
    parsed = Cubin.parse(cubin)
    resources = {"registers": 0, "stack_bytes": 0}
    for section in parsed.elf.sections:
        if section.name != ".nv.info":
            continue
        for entry in parse_attributes(parsed.elf, section):
            name = {_REGISTERS: "registers", _STACK_BYTES: "stack_bytes"}.get(entry.code)
            if name is not None and len(entry.payload) == 8:
                resources[name] = max(resources[name], struct.unpack("<II", entry.payload)[1])
    code_bytes = sum(
        section.size for section in parsed.elf.sections if section.name.startswith(".text.")
    )
    return {**resources, "instructions": code_bytes // 16}


def _compile_kernel(function: Any, launch: Launch, dtypes: Sequence[str]) -> dict[str, int]:
    argument_dtypes = [getattr(torch, dtype) for dtype in dtypes]
    # The same options as in StitchedKernel.launch; other options would make another cache key.
    kernel = function.warmup(
        *argument_dtypes,
        *launch.counts,
        grid=launch.grid,
        **launch_options(launch),
    )
    return {**cubin_resources(kernel.asm["cubin"]), "shared_bytes": int(kernel.metadata.shared)}


class _Worker:
    """Settings of this process of the pool."""

    folder: Path


def _start_worker(folder: Path, capability: int) -> None:
    import triton
    from triton.backends.compiler import GPUTarget

    from nostall.attach.torch_compile.workers.codegen_job import TargetOnlyDriver

    _Worker.folder = folder
    os.nice(_NICENESS)
    # Compilation needs the architecture only, so that no CUDA context is created.
    triton.runtime.driver.set_active(TargetOnlyDriver(GPUTarget("cuda", capability, 32)))
