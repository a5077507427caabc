"""The vendor's tools: where they are, and running them with limits on time, memory and output."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from nostall.core.errors import BadBinary, MissingPart

_SECONDS = 120
_MEMORY = 6 << 30
_OUTPUT = 2 << 30


def find(tool: str) -> Path:
    """The path of ``nvdisasm`` or ``cuobjdump``.

    Order: ``NOSTALL_NVDISASM`` / ``NOSTALL_CUOBJDUMP``, the PyPI package of the same name wherever
    Python imports from, PATH (an older nvdisasm may refuse kernels of 255 registers).
    """
    variable = f"NOSTALL_{tool.upper()}"
    chosen = os.environ.get(variable)
    if chosen:
        if os.access(chosen, os.X_OK) and Path(chosen).is_file():
            return Path(chosen)
        raise MissingPart(
            f"{variable} is {chosen!r}, which is not an executable file; unset it to use the "
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
    """The tool's own version line, such as ``V13.5.37``."""
    text = run([str(find(tool)), "--version"], tool)
    words = [w for w in text.replace(",", " ").split() if w.startswith("V") and w[1:2].isdigit()]
    return words[-1] if words else "unknown"


def run(command: Sequence[str], what: str, cwd: Path | None = None) -> str:
    """Run a vendor tool and return its standard output.

    Raises :class:`BadBinary` when the tool refuses its input, dies or passes a limit: the input
    is then at fault; :class:`MissingPart` when it cannot be started.
    """
    with tempfile.TemporaryFile() as out:
        try:
            done = subprocess.run(
                command,
                stdout=out,
                stderr=subprocess.PIPE,
                stdin=subprocess.DEVNULL,
                timeout=_SECONDS,
                preexec_fn=_limits(),
                cwd=cwd,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise BadBinary(f"{what} did not finish within {_SECONDS} s on this input") from None
        except OSError as error:
            raise MissingPart(f"{command[0]} cannot be started: {error.strerror}") from error
        complaint = done.stderr.decode("utf-8", "replace").strip().splitlines()
        if done.returncode != 0:
            said = complaint[0] if complaint else f"exit code {done.returncode}"
            raise BadBinary(f"{what} refuses this input: {said}")
        out.seek(0)
        text = out.read().decode("utf-8", "replace")
        if any("flow analysis" in line or "Invalid register" in line for line in complaint):
            raise BadBinary(f"{what} cannot analyse this input: {complaint[0]}")
        return text


def _limits() -> Callable[[], None]:
    """Limits for the tool; a limit that already holds here and is lower stays."""
    wanted = {
        resource.RLIMIT_AS: _MEMORY,
        resource.RLIMIT_FSIZE: _OUTPUT,
        resource.RLIMIT_CORE: 0,
    }
    pairs = []
    for kind, most in wanted.items():
        hard = resource.getrlimit(kind)[1]
        limit = most if hard == resource.RLIM_INFINITY else min(most, hard)
        pairs.append((kind, (limit, limit)))

    def apply() -> None:
        for kind, limits in pairs:
            resource.setrlimit(kind, limits)

    return apply
