"""``nostall doctor``: what is here, what is missing, and how to get it."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
from dataclasses import dataclass

from nostall import __version__
from nostall.cli.console import Format, FormatOption, out, show_json, show_table
from nostall.core.errors import MissingPart, NostallError
from nostall.sass.binary import toolchain


@dataclass(frozen=True)
class Check:
    """One line of the examination; ``needed`` parts make the exit code 3 when missing."""

    part: str
    found: str
    needed: bool
    remedy: str = ""

    @property
    def ok(self) -> bool:
        return bool(self.found)


def doctor(format: FormatOption = Format.TABLE) -> None:
    """Examine the environment; exit code 3 when a needed part is missing."""
    checks = examine()
    if format is Format.JSON:
        show_json([{**vars(c), "ok": c.ok} for c in checks])
    else:
        show_table(
            f"nostall {__version__} on Python {platform.python_version()}",
            ("part", "found", "remedy"),
            [(c.part, c.found or ("MISSING" if c.needed else "-"), c.remedy) for c in checks],
        )
    missing = [c for c in checks if c.needed and not c.ok]
    if missing:
        raise MissingPart(f"{missing[0].part} is missing: {missing[0].remedy}")
    if format is Format.TABLE:
        out.print("Ready: `nostall tune` works here on the modelled objective.")


def examine() -> list[Check]:
    """All checks, needed parts first."""
    return [
        _tool("nvdisasm", needed=True),
        _tool("cuobjdump", needed=False),
        _package("numba", needed=True),
        _package("triton", needed=False),
        _gpu(),
    ]


def _tool(name: str, *, needed: bool) -> Check:
    remedy = f"pip install nvidia-cuda-{name}"
    try:
        return Check(name, f"{toolchain.version(name)} ({toolchain.find(name)})", needed)
    except NostallError:
        return Check(name, "", needed, remedy)


def _package(name: str, *, needed: bool) -> Check:
    try:
        return Check(name, importlib.metadata.version(name), needed)
    except importlib.metadata.PackageNotFoundError:
        return Check(name, "", needed, f"pip install {name}")


def _gpu() -> Check:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return Check("GPU", "", False, "none here; everything but measuring works without")
    try:
        query = "--query-gpu=name,driver_version"
        text = toolchain.run([tool, query, "--format=csv,noheader"], "nvidia-smi")
    except NostallError:
        return Check("GPU", "", False, "nvidia-smi does not answer")
    return Check("GPU", text.strip().replace("\n", "; "), False)
