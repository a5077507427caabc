"""Many stitched kernels compiled at once, in processes that see no GPU.

Triton's own cache takes what they make, so whoever launches a kernel later finds its binary there.
A file beside the sources says of each program that it is done and what its kernels take: registers,
bytes on the stack of a thread (spills), shared memory, instructions.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import struct
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.pool import Pool
from pathlib import Path
from time import monotonic
from typing import Any

import torch

from nostall.core.errors import one_line
from nostall.core.files import write_atomically
from nostall.fusion.codegen.emit.program import Launch, Program
from nostall.fusion.codegen.runtime.kernel import launch_options, load_source
from nostall.sass.binary.attributes import parse_attributes
from nostall.sass.binary.cubin import Cubin

_REGISTERS, _FRAME = 0x2F, 0x11
"""Attributes of ``.nv.info``: (symbol, registers) and (symbol, bytes of its stack)."""
_POLITE = 15
"""Compilers give way to the processes that time kernels."""


@dataclass(frozen=True)
class Task:
    """A program without its graph: text, and for each kernel the dtypes that it is called with."""

    key: str
    source: str
    launches: tuple[Launch, ...]
    dtypes: tuple[tuple[str, ...], ...]


def task_of(program: Program) -> Task:
    spaces = {space.name: space.dtype for space in program.workspaces}
    nodes = {name: program.graph[index].dtype for name, index in program.nodes_by_argument.items()}
    known = nodes | spaces
    dtypes = tuple(tuple(known[name] for name in one.arguments) for one in program.launches)
    return Task(program.key, program.source, program.launches, dtypes)


def pool(folder: Path, processes: int, capability: int) -> Pool:
    """Processes that compile for one architecture; leave it to end them, whatever they do."""
    context = multiprocessing.get_context("spawn")
    return context.Pool(processes, _prepare, (folder, capability))


def processes(gpus: int) -> int:
    """Those that this machine has cores for, beside the ones that time."""
    return max(1, len(os.sched_getaffinity(0)) - gpus)


def place(folder: Path, key: str) -> Path:
    """Where it is said that a program is compiled."""
    return folder / f"{key}.json"


def awaited(folder: Path, keys: Iterable[str], until: float) -> dict[str, dict[str, Any]]:
    """What is said of these programs, as soon as all are compiled or the clock reads ``until``."""
    wanted = list(keys)
    while True:
        ready = [key for key in wanted if place(folder, key).exists()]
        if len(ready) == len(wanted) or monotonic() > until:
            return {key: json.loads(place(folder, key).read_text()) for key in ready}
        time.sleep(0.05)


def compiled(task: Task) -> str:
    """In a process of the pool: compile, and say so.  What fails says why."""
    found: dict[str, Any] = {}
    began = monotonic()
    try:
        _, functions = load_source(task.source, [one.name for one in task.launches], _Here.folder)
        found["kernels"] = [
            _resources(function, launch, dtypes)
            for function, launch, dtypes in zip(functions, task.launches, task.dtypes, strict=True)
        ]
    except Exception as error:  # a compiler's, of many kinds; the plan is left out with it
        found["error"] = one_line(error)
    found["seconds"] = round(monotonic() - began, 2)
    write_atomically(place(_Here.folder, task.key), json.dumps(found).encode())
    return task.key


def use(cubin: bytes) -> dict[str, int]:
    """Registers and bytes of stack of a thread, and instructions of a cubin with one kernel."""
    parsed = Cubin.parse(cubin)
    found = {"registers": 0, "stack_bytes": 0}
    for section in parsed.elf.sections:
        if section.name != ".nv.info":
            continue
        for entry in parse_attributes(parsed.elf, section):
            name = {_REGISTERS: "registers", _FRAME: "stack_bytes"}.get(entry.code)
            if name is not None and len(entry.payload) == 8:
                found[name] = max(found[name], struct.unpack("<II", entry.payload)[1])
    size = sum(s.size for s in parsed.elf.sections if s.name.startswith(".text."))
    return {**found, "instructions": size // 16}


def _resources(function: Any, launch: Launch, dtypes: Sequence[str]) -> dict[str, int]:
    given = [getattr(torch, dtype) for dtype in dtypes]
    # As StitchedKernel.launch calls it: another option would be another entry of the cache.
    kernel = function.warmup(
        *given,
        *launch.counts,
        grid=launch.grid,
        **launch_options(launch),
    )
    return {**use(kernel.asm["cubin"]), "shared_bytes": int(kernel.metadata.shared)}


class _Here:
    """What a process of the pool was told when it began."""

    folder: Path


def _prepare(folder: Path, capability: int) -> None:
    import triton
    from triton.backends.compiler import GPUTarget

    from nostall.attach.torch_compile.workers.codegen_job import TargetOnlyDriver

    _Here.folder = folder
    os.nice(_POLITE)
    # Compilers need no more than the name of the architecture; no context is made on the GPU.
    triton.runtime.driver.set_active(TargetOnlyDriver(GPUTarget("cuda", capability, 32)))
