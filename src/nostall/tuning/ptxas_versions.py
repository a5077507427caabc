"""Assemble the PTX of a kernel with several versions of ptxas and select the fastest binary.

Versions of ptxas generate different code from the same PTX.  Each binary can be the start of a
search: NVIDIA's assembler made it, and the verifier checks it like any original.
"""

from __future__ import annotations

import hashlib
import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from nostall.core import BadInput, LaunchSpec, NostallError
from nostall.core.measurement import Kind
from nostall.gpu import Device
from nostall.ptx.assemble.known_faults import describe_faults, known_faults
from nostall.ptx.assemble.versions import Assembler
from nostall.ptx.program.module import parse
from nostall.sass import Program, validate
from nostall.sass.binary import toolchain
from nostall.sass.model import SmModel
from nostall.sass.schedule import Schedule
from nostall.tuning.gpu_objective import decide
from nostall.tuning.sources.source import ASSEMBLER_KEY, Source

_ROUNDS = 100
"""Interleaved samples of a comparison on a device."""
_CHECKS = 8
"""Random inputs on which a comparison on a device checks the outputs."""


@dataclass(frozen=True)
class StartBinary:
    """A binary of the kernel from which a search can start."""

    source: Source
    version: str
    """Version of the ptxas that made it."""
    ratio: float | None = None
    """Time of the compiler's own binary / time of this one; above 1 this one is faster.  None if
    the binary cannot be used."""
    faster: bool = False
    """Whether it is faster than the compiler's own binary, beyond the noise if measured."""
    kind: Kind | None = None
    """Whether the ratio is modelled or measured; None for the compiler's own binary."""
    failure: str = ""
    """Why the binary cannot be used."""

    def __str__(self) -> str:
        """Text for the provenance and the terminal."""
        result = "the compiler's own"
        if self.kind is not None:
            result = f"{self.kind} {self.ratio:.4f}x"
        return f"ptxas {self.version}: {self.failure or result}"


CompareBinary = Callable[[Source], tuple[float, bool, Kind]]
"""Compares a binary with the compiler's own: (ratio, faster, kind) as in :class:`StartBinary`."""


def assemble_all(
    source: Source, compare: CompareBinary, assemblers: Sequence[Assembler]
) -> list[StartBinary]:
    """The compiler's own binary, then the binary of each other assembler.

    Equal binaries are listed once; a version with a known fault for the PTX is listed and not used.
    Raises :class:`BadInput` if the source has no PTX (a cubin
    file).
    """
    if source.ptx is None:
        raise BadInput(
            f"{source.origin} has no PTX to assemble; --assemblers works with Triton kernels only "
            "(path.py:kernel)"
        )
    binaries = [StartBinary(source, source.provenance.get("ptxas", "unknown"), 1.0)]
    known = {source.cubin}
    module = parse(source.ptx)
    for assembler in assemblers:
        if assembler.version == source.provenance.get("ptxas"):
            continue
        if faults := known_faults(module, assembler.version):
            failure = f"not tried, it is reported to make {describe_faults(faults)}"
            binaries.append(StartBinary(source, assembler.version, failure=failure))
            continue
        try:
            assembled = assemble(source, assembler)
            if assembled.cubin in known:
                continue
            known.add(assembled.cubin)
            ratio, faster, kind = compare(assembled)
            binaries.append(StartBinary(assembled, assembler.version, ratio, faster, kind))
        except NostallError as error:
            message = " ".join(str(error).split())[:200]
            binaries.append(StartBinary(source, assembler.version, failure=message))
    return binaries


def fastest(binaries: Sequence[StartBinary]) -> StartBinary:
    """The fastest binary that is faster than the compiler's own; otherwise that one, the first."""
    faster = (binary for binary in binaries[1:] if binary.faster)
    return max(faster, key=lambda binary: binary.ratio or 0.0, default=binaries[0])


def select_start(binaries: Sequence[StartBinary]) -> Source:
    """The source of the fastest binary.  Its provenance lists all binaries that were compared."""
    source = fastest(binaries).source
    provenance = {**source.provenance, "starts": "; ".join(map(str, binaries))}
    return replace(source, provenance=MappingProxyType(provenance))


def assemble(source: Source, assembler: Assembler) -> Source:
    """Assemble the PTX of ``source`` with the options that Triton gives to ptxas.

    Raises :class:`BadInput` if the assembler fails, or if the verifier rejects its binary.
    """
    assert source.ptx is not None
    target = re.search(r"^\s*\.target\s+(\w+)", source.ptx, re.MULTILINE)
    if target is None:
        raise BadInput(f"{source.origin}: its PTX has no .target directive")
    uses_fma = "enable_fp_fusion=False" not in source.provenance.get("options", "")
    options = ["-lineinfo", *([] if uses_fma else ["--fmad=false"])]
    with tempfile.TemporaryDirectory(prefix="nostall-") as folder:
        ptx, cubin = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        ptx.write_text(source.ptx)
        command = [str(assembler.path), *options, f"--gpu-name={target.group(1)}"]
        toolchain.run([*command, str(ptx), "-o", str(cubin)], f"ptxas {assembler.version}")
        data = cubin.read_bytes()
    findings = [f for f in validate(data).findings if f.function == source.kernel]
    if findings:
        raise BadInput(f"the verifier rejects its binary ({findings[0]})")
    provenance = {
        **source.provenance,
        ASSEMBLER_KEY: f"ptxas {assembler.version}",
        "compiler_sha256": hashlib.sha256(source.cubin).hexdigest(),
    }
    return replace(source, cubin=data, provenance=MappingProxyType(provenance))


def compare_on_model(source: Source) -> CompareBinary:
    """A comparison by the SM model.  Raises :class:`BadInput` if the launch is unknown."""
    if source.launch is None:
        raise BadInput(f"{source.origin}: the SM model needs the launch; give --launch spec.toml")
    launch = source.launch
    original_s = modelled_s(source, launch)

    def compare(assembled: Source) -> tuple[float, bool, Kind]:
        ratio = original_s / modelled_s(assembled, launch)
        return ratio, ratio > 1.0, "modelled"

    return compare


def compare_on_device(device: Device, seed: int = 0) -> CompareBinary:
    """A comparison by measurement, on a device that was opened for the compiler's own binary.

    The outputs of a binary must equal those of the compiler's own on new random inputs.
    """

    def compare(assembled: Source) -> tuple[float, bool, Kind]:
        decision = decide(device, assembled.cubin, _ROUNDS, _CHECKS, seed)
        if decision.comparison is None:
            raise BadInput(f"{decision.outcome.status} on the GPU: {decision.outcome.detail}")
        return decision.comparison.ratio, decision.faster, "measured"

    return compare


def modelled_s(source: Source, launch: LaunchSpec) -> float:
    """Seconds of a launch by the SM model."""
    program = Program.from_cubin(source.cubin)
    function = program.kernel(source.kernel)
    return SmModel(program, function, launch).evaluate([Schedule.from_function(function)])[0].value
