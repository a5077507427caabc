"""Generated programs as binaries: compiled for an architecture, judged, and tuned when asked.

No GPU is needed: Triton brings its own ptxas, and tuning has the SM model as its objective.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pprint import pformat
from typing import Any

from pydantic import ValidationError

from nostall.core import BadInput, NostallError, Observer, Run
from nostall.core.errors import UnsupportedArchitecture
from nostall.core.launch import LaunchSpec
from nostall.fusion.codegen.emit.program import Program
from nostall.fusion.codegen.runtime.launch_specs import launch_specs
from nostall.sass import validate
from nostall.tuning.fusing.document import Binary, TunedBinary
from nostall.tuning.fusing.planned import source_file
from nostall.tuning.job import Settings, describe, tune
from nostall.tuning.source import Source, compile_triton
from nostall.tuning.strategies import strategy

FOLDER = "sass"
"""Where the runs of tuned kernels lie inside the run directory."""


@dataclass(frozen=True)
class Compiled:
    """A kernel for the document; ``source`` is what can be launched, None where nothing can."""

    binary: Binary
    source: Source | None = None

    @property
    def refused(self) -> str:
        """Why it may not be tuned; empty where it may."""
        found = self.binary
        if found.findings:
            return f"nostall's rules do not know {found.findings} places of it"
        return found.failure or found.not_judged


def write_source(program: Program, run: Run, launches: Mapping[str, LaunchSpec]) -> Path:
    """Keep the text of a program in the run directory, with the table that `nostall tune
    FILE.py:KERNEL` asks a file for."""
    table = {name: _given(launch) for name, launch in launches.items()}
    text = f"\n\n# How `nostall tune` launches them.\nLAUNCHES = {pformat(table, width=100)}\n"
    (run.path / "kernels").mkdir(exist_ok=True)
    return run.write(source_file(program), (program.source + text * bool(table)).encode())


def _given(launch: LaunchSpec) -> dict[str, Any]:
    """A launch without what it leaves to its defaults."""
    return launch.model_dump(exclude_defaults=True)


def compiled(program: Program, run: Run, arch: str) -> Iterator[Compiled]:
    """The kernels of a program, each written to the run directory.

    What cannot be compiled is no error: it says why, and PyTorch runs those operators.
    """
    try:
        launches = launch_specs(program)
    except ValidationError as error:
        write_source(program, run, {})
        for refused in program.launches:
            yield Compiled(Binary(name=refused.name, failure=_said(error)))
        return
    path = write_source(program, run, launches)
    for name, launch in launches.items():
        yield _compiled(path, name, launch, run, arch)


def _compiled(path: Path, name: str, launch: LaunchSpec, run: Run, arch: str) -> Compiled:
    try:
        source = compile_triton(path, name, launch, arch)
    except BadInput as error:
        return Compiled(Binary(name=name, failure=_said(error)))
    file = f"kernels/{name}.cubin"
    run.write(file, source.cubin)
    try:
        verdict = validate(source.cubin)
    except UnsupportedArchitecture as error:
        return Compiled(Binary(name=name, file=file, not_judged=_said(error)), source)
    findings = verdict.findings
    binary = Binary(
        name=name,
        file=file,
        instructions=verdict.checked,
        findings=len(findings),
        first_finding=str(findings[0]) if findings else "",
    )
    return Compiled(binary, source)


def tuned(
    made: Compiled, run: Run, settings: Settings, command: str, observers: Sequence[Observer]
) -> tuple[TunedBinary, bool]:
    """What the search over a kernel's instructions finds, and whether it was interrupted."""
    name = made.binary.name
    if made.refused or made.source is None:
        return TunedBinary(name=name, note=made.refused), False
    folder = f"{FOLDER}/{name}"
    inner = Run.create(run.path / folder, command, describe(made.source, settings))
    try:
        with inner:
            found = tune(
                made.source,
                strategy(settings.strategy),
                settings,
                run=inner,
                observers=observers,
            )
    except NostallError as error:
        inner.finish("failed", {})
        return TunedBinary(name=name, folder=folder, note=_said(error)), False
    told = TunedBinary(
        name=name,
        folder=folder,
        ratio=found.ratio,
        improved=found.improved,
        evaluations=found.search.evaluations,
    )
    return told, found.search.stopped == "interrupted"


def _said(error: Exception) -> str:
    if isinstance(error, ValidationError):
        return f"its launch cannot be written down: {error.errors()[0]['msg']}"
    return " ".join(str(error).split())[:300]
