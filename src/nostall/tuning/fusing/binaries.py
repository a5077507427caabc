"""Compilation of generated programs to cubins, with verification and tuning of their SASS.

Needs no GPU: Triton contains ptxas, and the objective of tuning is the SM model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pprint import pformat

from pydantic import ValidationError

from nostall.core import BadInput, NostallError, Observer, Run
from nostall.core.errors import UnsupportedArchitecture
from nostall.core.launch import LaunchSpec
from nostall.core.text.plurals import pluralize
from nostall.fusion.codegen.emit.program import Program
from nostall.fusion.codegen.runtime.launch_specs import launch_specs
from nostall.sass import validate
from nostall.tuning.fusing.document import Binary, TunedBinary
from nostall.tuning.fusing.region_plans import source_file
from nostall.tuning.job import describe, tune
from nostall.tuning.settings import Settings
from nostall.tuning.sources.source import Source
from nostall.tuning.sources.triton_source import compile_triton
from nostall.tuning.strategies import make_strategy

FOLDER = "sass"
"""Folder inside the run directory that contains the runs of tuned kernels."""


@dataclass(frozen=True)
class CompiledKernel:
    """A GPU kernel after compilation, successful or not."""

    binary: Binary
    """The kernel's record in ``fusion.json``."""
    source: Source | None = None
    """The compiled kernel with its launch; None if compilation failed."""

    @property
    def untunable_reason(self) -> str:
        """Why the kernel cannot be tuned; empty if it can."""
        binary = self.binary
        if binary.findings:
            findings = pluralize(binary.findings, "finding")
            return f"the verifier reports {findings} in the compiler's own order"
        return binary.failure or binary.not_judged


def write_source(program: Program, run: Run, launches: Mapping[str, LaunchSpec]) -> Path:
    """Write a program's source to the run directory; returns its path.

    The launches are appended as the table ``LAUNCHES``, which `nostall tune FILE.py:KERNEL` reads.
    """
    table = {name: launch.model_dump(exclude_defaults=True) for name, launch in launches.items()}
    text = f"\n\n# How `nostall tune` launches them.\nLAUNCHES = {pformat(table, width=100)}\n"
    (run.path / "kernels").mkdir(exist_ok=True)
    return run.write(source_file(program), (program.source + text * bool(table)).encode())


def compile_program(program: Program, run: Run, arch: str) -> Iterator[CompiledKernel]:
    """Compile the kernels of a program and write each to the run directory.

    A kernel that cannot be compiled is not an error: its record has the reason, and PyTorch runs
    its operators.
    """
    try:
        launches = launch_specs(program)
    except ValidationError as error:
        write_source(program, run, {})
        for launch in program.launches:
            yield CompiledKernel(Binary(name=launch.name, failure=_message(error)))
        return
    path = write_source(program, run, launches)
    for name, spec in launches.items():
        yield _compile_kernel(path, name, spec, run, arch)


def _compile_kernel(
    path: Path, name: str, launch: LaunchSpec, run: Run, arch: str
) -> CompiledKernel:
    try:
        source = compile_triton(path, name, launch, arch)
    except BadInput as error:
        return CompiledKernel(Binary(name=name, failure=_message(error)))
    file = f"kernels/{name}.cubin"
    run.write(file, source.cubin)
    try:
        verdict = validate(source.cubin)
    except UnsupportedArchitecture as error:
        return CompiledKernel(Binary(name=name, file=file, not_judged=_message(error)), source)
    findings = verdict.findings
    binary = Binary(
        name=name,
        file=file,
        instructions=verdict.checked,
        findings=len(findings),
        first_finding=str(findings[0]) if findings else "",
    )
    return CompiledKernel(binary, source)


def tune_kernel(
    kernel: CompiledKernel,
    run: Run,
    settings: Settings,
    command: str,
    observers: Sequence[Observer],
) -> tuple[TunedBinary, bool]:
    """Search the instruction order of a kernel on the SM model, in a run directory of its own.

    Returns the record and whether the search was interrupted. The record has the reason if the
    kernel cannot be tuned or the search fails.
    """
    name = kernel.binary.name
    if kernel.untunable_reason or kernel.source is None:
        return TunedBinary(name=name, note=kernel.untunable_reason), False
    folder = f"{FOLDER}/{name}"
    kernel_run = Run.create(run.path / folder, command, describe(kernel.source, settings))
    try:
        with kernel_run:
            outcome = tune(
                kernel.source,
                make_strategy(settings.strategy),
                settings,
                run=kernel_run,
                observers=observers,
            )
    except NostallError as error:
        kernel_run.finish("failed", {})
        return TunedBinary(name=name, folder=folder, note=_message(error)), False
    record = TunedBinary(
        name=name,
        folder=folder,
        ratio=outcome.ratio,
        improved=outcome.improved,
        evaluations=outcome.search.evaluations,
    )
    return record, outcome.search.stopped == "interrupted"


def _message(error: Exception) -> str:
    """An error's text on one line, at most 300 characters."""
    if isinstance(error, ValidationError):
        return f"its launch is invalid: {error.errors()[0]['msg']}"
    return " ".join(str(error).split())[:300]
