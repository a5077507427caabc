"""Several assemblers for one PTX: which ptxas are here, and which one's binary to start from.

What ptxas makes of the same PTX differs by version.  Each binary is a legal start of its own, as
good as the compiler's: made by NVIDIA's assembler and judged by the validator like any original.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from nostall.core import BadInput, Comparison, LaunchSpec, NostallError
from nostall.core.measurement import Kind
from nostall.gpu import Device
from nostall.sass import Program, validate
from nostall.sass.binary import toolchain
from nostall.sass.model import SmModel
from nostall.sass.schedule import Schedule
from nostall.tuning.gpu_objective import decide
from nostall.tuning.source import Source

ASSEMBLER = "assembler"
"""Provenance key of a source that was assembled anew."""
_ROUNDS, _CHECKS = 100, 8


@dataclass(frozen=True)
class Assembler:
    """One ptxas; ``version`` such as ``13.5.37``."""

    path: Path
    version: str


@dataclass(frozen=True)
class Start:
    """One binary of the kernel.

    ``ratio``: time of the compiler's own binary / time of this one, above 1 is faster; None with
    ``failure`` where it cannot be a start.  ``faster``: beyond the noise, where it was measured;
    ``kind``: who said so, None for the compiler's own.
    """

    source: Source
    version: str
    ratio: float | None = None
    faster: bool = False
    kind: Kind | None = None
    failure: str = ""

    def __str__(self) -> str:
        said = "the compiler's own"
        if self.kind is not None:
            said = f"{self.kind} {self.ratio:.4f}x"
        return f"ptxas {self.version}: {self.failure or said}"


Judge = Callable[[Source], tuple[float, bool, Kind]]
"""(ratio to the compiler's own binary, faster beyond the noise, who said so)."""


def assemblers() -> list[Assembler]:
    """Every ptxas of another version: Triton's, the packaged ones, CUDA's, the one on PATH."""
    known: dict[str, Assembler] = {}
    for path in _places():
        if path.is_file() and os.access(path, os.X_OK):
            version = _version(path)
            known.setdefault(version, Assembler(path, version))
    return list(known.values())


def starts(source: Source, judge: Judge, tools: Sequence[Assembler]) -> list[Start]:
    """The kernel as the compiler made it, then as each other assembler does.

    Raises :class:`BadInput` for a kernel without PTX (a cubin file).
    """
    if source.ptx is None:
        raise BadInput(
            f"{source.origin} has no PTX to assemble; --assemblers is for Triton kernels "
            "(path.py:kernel)"
        )
    found = [Start(source, source.provenance.get("ptxas", "unknown"), 1.0)]
    made = {source.cubin}
    for tool in tools:
        if tool.version == source.provenance.get("ptxas"):
            continue
        try:
            other = assembled(source, tool)
            if other.cubin in made:
                continue
            made.add(other.cubin)
            ratio, faster, kind = judge(other)
            found.append(Start(other, tool.version, ratio, faster, kind))
        except NostallError as error:
            said = " ".join(str(error).split())[:200]
            found.append(Start(source, tool.version, failure=said))
    return found


def best(found: Sequence[Start]) -> Start:
    """The fastest that is faster than the compiler's own, or that one, which comes first."""
    return max((s for s in found[1:] if s.faster), key=lambda s: s.ratio or 0.0, default=found[0])


def chosen(found: Sequence[Start]) -> Source:
    """The source to search from; its provenance lists all that were tried."""
    start = best(found)
    told = {**start.source.provenance, "starts": "; ".join(map(str, found))}
    return replace(start.source, provenance=MappingProxyType(told))


def assembled(source: Source, tool: Assembler) -> Source:
    """``source`` with its PTX assembled by ``tool``, as Triton calls it.

    Raises :class:`BadInput` when the assembler fails, or when nostall's rules do not hold for what
    it makes.
    """
    assert source.ptx is not None
    target = re.search(r"^\s*\.target\s+(\w+)", source.ptx, re.MULTILINE)
    if target is None:
        raise BadInput(f"{source.origin}: its PTX names no target")
    fused = (
        []
        if "enable_fp_fusion=False" not in source.provenance.get("options", "")
        else ["--fmad=false"]
    )
    with tempfile.TemporaryDirectory(prefix="nostall-") as folder:
        text, binary = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        text.write_text(source.ptx)
        command = [str(tool.path), "-lineinfo", *fused, f"--gpu-name={target.group(1)}"]
        toolchain.run([*command, str(text), "-o", str(binary)], f"ptxas {tool.version}")
        data = binary.read_bytes()
    findings = [f for f in validate(data).findings if f.function == source.kernel]
    if findings:
        raise BadInput(f"nostall's rules do not hold for it ({findings[0]})")
    provenance = {
        **source.provenance,
        ASSEMBLER: f"ptxas {tool.version}",
        "compiler_sha256": hashlib.sha256(source.cubin).hexdigest(),
    }
    return replace(source, cubin=data, provenance=MappingProxyType(provenance))


def by_model(source: Source) -> Judge:
    """Judge by the SM model.  Raises :class:`BadInput` where the launch is not known."""
    if source.launch is None:
        raise BadInput(f"{source.origin}: the SM model needs the launch; give --launch spec.toml")
    launch = source.launch
    own = _modelled(source, launch)

    def judge(other: Source) -> tuple[float, bool, Kind]:
        ratio = own / _modelled(other, launch)
        return ratio, ratio > 1.0, "modelled"

    return judge


def by_device(device: Device, seed: int = 0) -> Judge:
    """Judge by a device that was opened for the compiler's own binary: bit-identical on fresh
    inputs, then timed beside it."""

    def judge(other: Source) -> tuple[float, bool, Kind]:
        decision = decide(device, other.cubin, _ROUNDS, _CHECKS, seed)
        compared: Comparison | None = decision.comparison
        if compared is None:
            raise BadInput(f"{decision.outcome.status} on the GPU: {decision.outcome.detail}")
        return compared.ratio, decision.faster, "measured"

    return judge


def _modelled(source: Source, launch: LaunchSpec) -> float:
    program = Program.from_cubin(source.cubin)
    function = program.kernel(source.kernel)
    return SmModel(program, function, launch).evaluate([Schedule.from_function(function)])[0].value


def _places() -> Iterator[Path]:
    try:
        import triton.backends.nvidia as bundled

        yield from sorted(Path(path, "bin", "ptxas") for path in bundled.__path__)
        yield from sorted(Path(path, "bin", "ptxas-blackwell") for path in bundled.__path__)
    except ImportError:
        pass
    for site in (sysconfig.get_path("platlib"), sysconfig.get_path("purelib")):
        yield from sorted(Path(site, "nvidia").glob("*/bin/ptxas"), reverse=True)
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if folder := os.environ.get(variable):
            yield Path(folder, "bin", "ptxas")
    if on_path := shutil.which("ptxas"):
        yield Path(on_path)


def _version(path: Path) -> str:
    try:
        text = subprocess.run(
            [str(path), "--version"], capture_output=True, text=True, timeout=60, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise BadInput(f"{path} does not say its version ({error}); remove or repair it") from error
    found = re.search(r"V(\d+\.\d+\.\d+)", text)
    return found.group(1) if found else "unknown"
