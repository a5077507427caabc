"""Find NVIDIA's nvdisasm and cuobjdump, and run them with limits on time, memory and output."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from nostall.core.errors import BadBinary, MissingPart

_TIMEOUT_SECONDS = 120
_MAX_MEMORY_BYTES = 6 << 30
_MAX_OUTPUT_BYTES = 2 << 30


def find(tool: str) -> Path:
    """The path of ``nvdisasm`` or ``cuobjdump``; raises :class:`MissingPart` if there is none.

    Search order:

    1. the environment variable ``NOSTALL_NVDISASM`` or ``NOSTALL_CUOBJDUMP``;
    2. the PyPI package (``nvidia-cuda-nvdisasm``, ``nvidia-cuda-cuobjdump``) on ``sys.path``;
    3. PATH, which comes last because an older nvdisasm may reject kernels with 255 registers.
    """
    variable = f"NOSTALL_{tool.upper()}"
    override = os.environ.get(variable)
    if override:
        if os.access(override, os.X_OK) and Path(override).is_file():
            return Path(override)
        raise MissingPart(
            f"{variable} is {override!r}, which is not an executable file; unset it to use the "
            f"packaged {tool}"
        )
    for site in dict.fromkeys([*filter(None, sys.path), sysconfig.get_path("platlib")]):
        for packaged in sorted(Path(site, "nvidia").glob(f"*/bin/{tool}"), reverse=True):
            if os.access(packaged, os.X_OK):
                return packaged
    on_path = shutil.which(tool)
    if on_path:
        return Path(on_path)
    raise MissingPart(
        f"{tool} was not found; install it with `pip install nvidia-cuda-{tool}`, or set {variable}"
    )


def version(tool: str) -> str:
    """The version that the tool prints, such as ``V13.5.37``; ``unknown`` if it prints none."""
    text = run([str(find(tool)), "--version"], tool)
    words = [w for w in text.replace(",", " ").split() if w.startswith("V") and w[1:2].isdigit()]
    return words[-1] if words else "unknown"


def run(command: Sequence[str], tool: str, cwd: Path | None = None) -> str:
    """Run a tool and return its standard output; ``tool`` is its name in error texts.

    Raises :class:`BadBinary` if the tool rejects its input, crashes or exceeds a limit (the input
    is the cause then), and :class:`MissingPart` if the tool cannot be started.
    """
    with tempfile.TemporaryFile() as output:
        try:
            returncode, stderr = _run_limited(command, output, cwd)
        except subprocess.TimeoutExpired:
            raise BadBinary(
                f"{tool} did not finish within {_TIMEOUT_SECONDS} s on this input"
            ) from None
        except OSError as error:
            raise MissingPart(f"{command[0]} cannot be started: {error.strerror}") from error
        errors = stderr.decode("utf-8", "replace").strip().splitlines()
        if returncode != 0:
            message = errors[0] if errors else f"exit code {returncode}"
            raise BadBinary(f"{tool} rejects this input: {message}")
        output.seek(0)
        text = output.read().decode("utf-8", "replace")
        if any("flow analysis" in line or "Invalid register" in line for line in errors):
            raise BadBinary(f"{tool} cannot analyse this input: {errors[0]}")
        return text


def _run_limited(command: Sequence[str], output: IO[bytes], cwd: Path | None) -> tuple[int, bytes]:
    """Run a command within the limits; returns its exit code and its standard error."""
    with subprocess.Popen(
        command, stdout=output, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, cwd=cwd
    ) as process:
        try:
            # Not preexec_fn: Python copies the page tables of the whole process for it (fork in the
            # place of vfork), which takes 0.1 s in a process of 1 GB.
            with contextlib.suppress(ProcessLookupError):  # it has ended
                for kind, limit in _resource_limits().items():
                    resource.prlimit(process.pid, kind, (limit, limit))
            errors = process.communicate(timeout=_TIMEOUT_SECONDS)[1]
        except BaseException:  # raised again; Ctrl-C, too, must leave no process behind
            process.kill()
            raise
    return process.returncode, errors


def _resource_limits() -> dict[int, int]:
    """The limits of a tool by kind of resource; lower limits in force stay."""
    requested = {
        resource.RLIMIT_AS: _MAX_MEMORY_BYTES,
        resource.RLIMIT_FSIZE: _MAX_OUTPUT_BYTES,
        resource.RLIMIT_CORE: 0,
    }
    limits = {}
    for kind, maximum in requested.items():
        hard = resource.getrlimit(kind)[1]
        limits[kind] = maximum if hard == resource.RLIM_INFINITY else min(maximum, hard)
    return limits
