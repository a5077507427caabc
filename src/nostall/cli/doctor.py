"""The command ``nostall doctor``: check which tools, packages and GPUs are available."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
from dataclasses import dataclass
from typing import Any

from nostall import __version__
from nostall.cli.console import Format, FormatOption, out, show_json, show_table
from nostall.core.errors import MissingPart, NostallError
from nostall.sass.binary import toolchain


@dataclass(frozen=True)
class Check:
    """Result of the check of one part of the environment."""

    part: str
    version: str
    """Version and place; empty if the part is missing."""
    needed: bool
    """Whether nostall cannot work without the part."""
    remedy: str = ""
    """Advice if the part is missing."""

    @property
    def ok(self) -> bool:
        return bool(self.version)

    def to_json(self) -> dict[str, Any]:
        return {
            "part": self.part,
            "found": self.version,
            "needed": self.needed,
            "remedy": self.remedy,
            "ok": self.ok,
        }


def doctor(format: FormatOption = Format.TABLE) -> None:
    """Check the environment: tools, packages and the GPU.

    Exit code 3 if a needed part is missing.
    """
    checks = check_environment()
    if format is Format.JSON:
        show_json([check.to_json() for check in checks])
    else:
        show_table(
            f"nostall {__version__} on Python {platform.python_version()}",
            ("part", "version", "remedy"),
            [(c.part, c.version or ("MISSING" if c.needed else "-"), c.remedy) for c in checks],
        )
    missing = [check for check in checks if check.needed and not check.ok]
    if missing:
        raise MissingPart(f"{missing[0].part} is missing: {missing[0].remedy}")
    if format is Format.TABLE:
        out.print("Ready: `nostall tune` works on this machine with the modelled objective.")


def check_environment() -> list[Check]:
    """Check all parts."""
    return [
        _check_tool("nvdisasm", needed=True),
        _check_tool("cuobjdump", needed=False),
        _check_package("numba", needed=True),
        _check_package("triton", needed=False),
        _check_gpu(),
    ]


def _check_tool(name: str, *, needed: bool) -> Check:
    try:
        return Check(name, f"{toolchain.version(name)} ({toolchain.find(name)})", needed)
    except NostallError:
        return Check(name, "", needed, f"pip install nvidia-cuda-{name}")


def _check_package(name: str, *, needed: bool) -> Check:
    try:
        return Check(name, importlib.metadata.version(name), needed)
    except importlib.metadata.PackageNotFoundError:
        return Check(name, "", needed, f"pip install {name}")


def _check_gpu() -> Check:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return Check("GPU", "", False, "only measuring needs a GPU")
    try:
        query = "--query-gpu=name,driver_version"
        text = toolchain.run([tool, query, "--format=csv,noheader"], "nvidia-smi")
    except NostallError:
        return Check("GPU", "", False, "nvidia-smi fails; repair the driver")
    return Check("GPU", text.strip().replace("\n", "; "), False)
