"""One run of ptxas: its cubin, its messages and the resources that it reports."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Literal

from nostall.core.errors import MissingPart
from nostall.ptx.assemble.versions import Assembler

TIMEOUT_SECONDS = 60.0
"""Time limit of one run; kernels of 3,000 PTX lines take about one second."""
_MAX_DETAIL = 300
"""Characters of the messages in a failure."""
_KERNEL = re.compile(r"Compiling entry function '([^']+)'")
_REGISTERS = re.compile(r"Used (\d+) registers")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_STACK = re.compile(r"(\d+) bytes stack frame")
_SHARED = re.compile(r"(\d+) bytes smem")
_ROUTINE = (
    "Compiling entry function",
    "Function properties for",
    "bytes gmem",
    "bytes stack frame",
    "Used ",
    "Compile time",
    "Overriding maximum register limit",
)
"""Parts of lines that ptxas prints in every verbose run."""

RunStatus = Literal["assembled", "error", "timeout"]


@dataclass(frozen=True)
class Resources:
    """Resources that ptxas reports of a kernel, with those of the functions that it calls."""

    registers: int
    """Registers of one thread."""
    spill_bytes: int
    """Bytes of spill stores and loads."""
    stack_bytes: int
    """Bytes of stack frame."""
    shared_bytes: int
    """Bytes of static shared memory of a block."""


@dataclass(frozen=True)
class PtxasRun:
    """Result of one run."""

    status: RunStatus
    cubin: bytes = b""
    """Empty unless ``status`` is ``assembled``."""
    messages: tuple[str, ...] = ()
    """Lines of its output except those of every verbose run; no file names."""
    resources: Mapping[str, Resources] = field(default_factory=dict[str, Resources])
    """By kernel; empty if ptxas reported none."""
    detail: str = ""
    """Why there is no cubin."""
    seconds: float = 0.0


def run_ptxas(
    assembler: Assembler,
    ptx: str,
    arguments: Sequence[str],
    folder: Path,
    timeout: float = TIMEOUT_SECONDS,
) -> PtxasRun:
    """Assemble ``ptx``; ``folder`` holds the files of the run and must be used by one run a time.

    Equal inputs give equal results: the names of the files are always the same, because ptxas
    writes them into its messages.  Raises :class:`MissingPart` if the assembler cannot be started.
    """
    source, target = folder / "kernel.ptx", folder / "kernel.cubin"
    source.write_text(ptx)
    target.unlink(missing_ok=True)
    command = [str(assembler.path), *arguments, source.name, "-o", target.name]
    start = perf_counter()
    try:
        process = subprocess.run(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        detail = f"ptxas {assembler.version} did not end within {timeout:g} s"
        return PtxasRun("timeout", detail=detail, seconds=perf_counter() - start)
    except OSError as error:
        raise MissingPart(f"{assembler.path} cannot be started: {error.strerror}") from error
    seconds = perf_counter() - start
    output = (process.stdout + process.stderr).decode("utf-8", "replace")
    messages = read_messages(output)
    if process.returncode != 0 or not target.exists():
        reason = " / ".join(messages)[:_MAX_DETAIL] or f"exit code {process.returncode}"
        detail = f"ptxas {assembler.version}: {reason}"
        return PtxasRun("error", messages=messages, detail=detail, seconds=seconds)
    return PtxasRun("assembled", target.read_bytes(), messages, read_resources(output), "", seconds)


def read_messages(output: str) -> tuple[str, ...]:
    """The lines of ptxas's output except those of every verbose run."""
    lines = (line.strip() for line in output.splitlines())
    return tuple(line for line in lines if line and not any(part in line for part in _ROUTINE))


def read_resources(output: str) -> dict[str, Resources]:
    """The resources of each kernel in ptxas's verbose output.

    The functions that a kernel calls are listed after it, and count with the largest.
    """
    found: dict[str, Resources] = {}
    _, *parts = _KERNEL.split(output)
    for kernel, part in zip(parts[::2], parts[1::2], strict=True):
        if registers := _REGISTERS.search(part):
            spills = (int(stores) + int(loads) for stores, loads in _SPILLS.findall(part))
            stacks, shared = (map(int, p.findall(part)) for p in (_STACK, _SHARED))
            found[kernel] = Resources(
                int(registers[1]),
                max(spills, default=0),
                max(stacks, default=0),
                max(shared, default=0),
            )
    return found
