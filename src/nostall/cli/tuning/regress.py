"""The command ``nostall regress``: what another compiler changed in a kernel, and its recovery."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nostall.cli.options.inputs import (
    TARGET_HELP,
    ArchOption,
    KernelOption,
    LaunchOption,
    PtxasOptionsOption,
    load_source,
    read_cubin,
)
from nostall.cli.terminal.console import (
    Format,
    FormatOption,
    QuietOption,
    err,
    out,
    show_json,
    show_table,
)
from nostall.core import BadInput

if TYPE_CHECKING:
    from nostall.ptx.assemble.command import Command
    from nostall.ptx.assemble.versions import Assembler
    from nostall.tuning.regress.job import Binary, Case, Report
    from nostall.tuning.regress.measured import Measured
    from nostall.tuning.regress.properties import Properties
    from nostall.tuning.settings import Settings
    from nostall.tuning.sources.source import Source

STORE = "store"
"""The baseline that is what the compiler made when a record of the store was measured."""
STATIC, GPU = "static", "gpu"
"""Values of ``--objective``."""
DEFAULT_SECONDS = 60.0

TargetArgument = Annotated[
    str | None,
    typer.Argument(
        help=f"{TARGET_HELP} Not needed with `--baseline store`: all kernels of the store."
    ),
]
BaselineOption = Annotated[
    str,
    typer.Option(
        help="What was fast: a version of ptxas (13.2, 12.9.86), the path of a ptxas, a cubin, or "
        "store (what the compiler made when the store's record was measured)."
    ),
]
PtxasOption = Annotated[
    str | None,
    typer.Option(
        help="The ptxas that is looked at, by version or path; default: the compiler's own, and "
        "the newest one for all kernels of the store."
    ),
]
SecondsOption = Annotated[float | None, typer.Option(help="Time limit of the search of a kernel.")]
EvaluationsOption = Annotated[
    int | None, typer.Option(help="Most candidates of the search of a kernel.")
]
ObjectiveOption = Annotated[
    str,
    typer.Option(
        help="static (needs no GPU); gpu (measures both binaries, and searches as `nostall tune` "
        "does if the older one is faster)."
    ),
]
SearchOption = Annotated[
    bool, typer.Option("--search/--no-search", help="Search for what was lost; or compare only.")
]
SeedOption = Annotated[int, typer.Option(help="Random seed of the orders.")]
OutOption = Annotated[
    Path | None,
    typer.Option("--out", help="Folder for the best candidate: its PTX, cubin and recipe."),
]


def regress(
    target: TargetArgument = None,
    baseline: BaselineOption = STORE,
    ptxas: PtxasOption = None,
    kernel: KernelOption = None,
    launch: LaunchOption = None,
    arch: ArchOption = None,
    ptxas_options: PtxasOptionsOption = "",
    objective: ObjectiveOption = STATIC,
    search: SearchOption = True,
    seconds: SecondsOption = None,
    evaluations: EvaluationsOption = None,
    seed: SeedOption = 0,
    out_dir: OutOption = None,
    format: FormatOption = Format.TABLE,
    quiet: QuietOption = False,
) -> None:
    """Say what a newer compiler lost in a kernel, and search for it.

    Static properties are compared, so no GPU is needed: local memory, warps of an SM, instructions
    and issue cycles of loops. A candidate has them back, its PTX is proved equal, and the verifier
    accepts its machine code; it was not measured. `--objective gpu` compares and searches times.

    Exit code 0: nothing was lost; 1: something was, also if the search recovers it.
    """
    from nostall.tuning.regress.job import compare, find_ptxas
    from nostall.tuning.regress.recover import INTERRUPTED

    settings = _settings(objective, seconds, evaluations, seed, out_dir)
    newer = find_ptxas(ptxas) if ptxas is not None else None
    if target is None:
        cases = _stored_cases(baseline, newer, out_dir)
    else:
        cases = [_case(load_source(target, kernel, launch, arch, ptxas_options), baseline, newer)]
    documents, has_lost = [], False
    for case in cases:
        is_static = search and objective == STATIC
        report = compare(case, settings.budget if is_static else None, seed)
        measured = _measure(case, settings) if objective == GPU else None
        has_lost |= bool(report.losses) if measured is None else measured.older.faster
        document = report.to_json()
        documents.append(document | ({} if measured is None else {"measured": measured.to_json()}))
        _write(report, out_dir)
        if format is Format.TABLE:
            _show(report, measured, quiet=quiet)
        if report.recovery is not None and report.recovery.stopped == INTERRUPTED:
            break
    if format is Format.JSON:
        show_json(documents[0] if target is not None else documents)
    if has_lost:
        raise typer.Exit(1)


def _settings(
    objective: str, seconds: float | None, evaluations: int | None, seed: int, out_dir: Path | None
) -> Settings:
    """The settings of a search; raises :class:`BadInput` for options that cannot be used."""
    from nostall.cli.tuning.checks import check_limits
    from nostall.tuning.settings import Settings
    from nostall.tuning.strategies import ASSEMBLER

    check_limits(seconds, evaluations)
    if objective not in (STATIC, GPU):
        raise BadInput(f"--objective is {objective!r}; give {STATIC} or {GPU}")
    if objective == GPU and out_dir is not None:
        raise BadInput(
            "--out is for the static search; to keep what is measured, run `nostall tune TARGET "
            "--objective gpu`"
        )
    if seed < 0:
        raise BadInput(f"--seed is {seed}; give 0 or a greater whole number")
    if seconds is None and evaluations is None:
        seconds = DEFAULT_SECONDS
    return Settings(
        ASSEMBLER, seed=seed, seconds=seconds, evaluations=evaluations, objective=objective
    )


def _measure(case: Case, settings: Settings) -> Measured:
    """The times of a kernel's binaries on the GPU, and the search for what was lost."""
    from nostall.gpu import Kernel, LocalGpu
    from nostall.tuning.regress.measured import measure
    from nostall.tuning.sources.source import missing_launch

    source = case.source
    if source.launch is None:
        raise missing_launch(source, "measuring")
    kernel = Kernel(case.newer.cubin, source.kernel, source.launch)
    with LocalGpu(kernel, settings.measurement_plan) as gpu:
        return measure(case, settings, gpu)


def _stored_cases(baseline: str, newer: Assembler | None, out_dir: Path | None) -> Sequence[Case]:
    from nostall.store import Store
    from nostall.tuning.regress.job import stored_cases

    if baseline != STORE or out_dir is not None:
        option = "--out" if out_dir is not None else f"--baseline {baseline}"
        raise BadInput(
            f"{option} is for one kernel, and none was given; give path.py:kernel, a .ptx or a "
            ".cubin file, or leave the option out"
        )
    cases: list[Case] = []
    for case in stored_cases(Store(), newer):
        if isinstance(case, str):
            err.print(f"not compared: {case}")
        else:
            cases.append(case)
    if not cases:
        raise BadInput(
            "the store has no kernel to compare; `nostall tune TARGET --objective gpu` records "
            "one, or give a kernel and --baseline with a version of ptxas or a cubin"
        )
    return cases


def _case(source: Source, baseline: str, ptxas: Assembler | None) -> Case:
    from nostall.tuning.regress.job import Case, newer_binary

    command, newer = newer_binary(source, ptxas)
    return Case(source, command, _older(source, baseline, newer, command), newer)


def _older(source: Source, baseline: str, newer: Binary, command: Command | None) -> Binary:
    from nostall.store import Store
    from nostall.tuning.regress import job

    if baseline == STORE:
        store = Store()
        row = job.newest_record(store, source)
        return job.older_by_cubin(source, store.contents(row).original, f"record {row.id[:12]}")
    if baseline.endswith(".cubin"):
        return job.older_by_cubin(source, read_cubin(Path(baseline), None), Path(baseline).name)
    return job.older_by_ptxas(source, command, job.find_ptxas(baseline), newer)


def _write(report: Report, folder: Path | None) -> None:
    """Write the best candidate of a search."""
    best = report.recovery.best if report.recovery is not None else None
    if folder is None or best is None or report.recipe is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "best.cubin").write_bytes(best.candidate.cubin)
        (folder / "best.ptx").write_text(report.text)
        (folder / "recipe.json").write_bytes(report.recipe.to_bytes())
    except OSError as error:
        raise BadInput(f"cannot write {folder}: {error.strerror}; choose another --out") from error


def _show(report: Report, measured: Measured | None, *, quiet: bool) -> None:
    case, answer = report.case, report.answer
    out.print(f"{case.source.kernel}: {_answer(report, is_measured=measured is not None)}")
    if measured is not None:
        out.print(_measured_line(measured))
    if quiet or answer == "same code":
        return
    found = report.recovery.best if report.recovery is not None else None
    binaries = [case.older.properties, case.newer.properties]
    columns = ["property", case.older.label, case.newer.label]
    if found is not None:
        binaries.append(found.properties)
        columns.append("found")
    rows = [
        (name, *(str(read(properties)) for properties in binaries)) for name, read in _ROWS.items()
    ]
    show_table("static properties", tuple(columns), rows)
    label = "cause:    " if report.losses else "differs:  "
    for cause in report.causes:
        out.print(f"{label} {cause}")
    for line in _search_lines(report):
        out.print(line)
    if report.offer is not None:
        offered = "possible" if report.offer.offered else "not offered"
        out.print(f"older:     ptxas {report.offer.version}, {offered}: {report.offer.reason}")


_ROWS: Mapping[str, Callable[[Properties], object]] = {
    "registers": lambda p: p.registers,
    "warps of an SM": lambda p: p.warps_per_sm,
    "local memory accesses": lambda p: p.local_accesses,
    "spilled bytes": lambda p: "-" if p.spill_bytes is None else p.spill_bytes,
    "instructions": lambda p: p.instructions,
    "instructions of loops": lambda p: p.loops.instructions,
    "issue cycles of loops": lambda p: p.loops.issue_cycles,
    "bank conflicts": lambda p: p.bank_conflicts,
    "load to reader": lambda p: round(p.loops.load_distance),
}


def _answer(report: Report, *, is_measured: bool) -> str:
    lost = "; ".join(map(str, report.losses))
    if lost and is_measured:
        return f"static loss ({lost})"
    match report.answer:
        case "same code":
            return "the same machine code"
        case "no loss":
            return "no static loss"
        case "recovered" | "in part":
            return f"{_lost(report)}; {_found(report)}"
    return f"{_lost(report)}; {report.answer}"


def _lost(report: Report) -> str:
    """What the newer binary lost, with the bytes that it spills more, if they are known."""
    older, newer = report.case.older.properties, report.case.newer.properties
    lost = list(map(str, report.losses))
    before, after = older.spill_bytes, newer.spill_bytes
    if before is not None and after is not None and before < after:
        lost.append(f"spilled bytes {before} → {after}")
    return f"{report.case.newer.label} lost: {', '.join(lost)}"


def _found(report: Report) -> str:
    """What the best candidate has back, with its own numbers."""
    assert report.recovery is not None and report.recovery.best is not None
    from nostall.tuning.regress.losses import METRICS

    older, best = report.case.older.properties, report.recovery.best.properties
    values = [f"{x.name} {METRICS[x.name].read(best, older):g}" for x in report.losses]
    if best.spill_bytes is not None:
        values.append(f"spilled bytes {best.spill_bytes}")
    how = "recovered" if report.answer == "recovered" else "recovered in part"
    return f"{how} by another input of the same ptxas: {', '.join(values)} (not measured)"


def _measured_line(measured: Measured) -> str:
    comparison = measured.older.comparison
    assert comparison is not None
    times = f"{comparison.ratio:.4f} [{comparison.low:.4f}, {comparison.high:.4f}]"
    if measured.recovered is None:
        return f"measured:  time newer / older {times}: no time was lost"
    if measured.found is None:
        return f"measured:  time newer / older {times}; not searched, there is no PTX"
    return f"measured:  time newer / older {times}; recovered {measured.recovered:.0%} of the loss"


def _search_lines(report: Report) -> list[str]:
    if report.recovery is None:
        without = report.losses and report.case.command is None
        return ["searched:  no, there is no PTX to search"] if without else []
    recovery, best = report.recovery, report.recovery.best
    counts = ", ".join(f"{n} {what}" for what, n in recovery.counts.items() if n)
    lines = [f"searched:  {recovery.seconds:.0f} s, {counts or 'nothing'}, {recovery.stopped}"]
    if best is None:
        return [*lines, "found:     no candidate comes nearer to the older binary"]
    from nostall.tuning.assembler.description import describe_levers

    parts = ", ".join(f"{share:.0%} of {name}" for name, share in report.shares().items())
    left = "; ".join(map(str, report.left()))
    return [
        *lines,
        f"changed:   {'; '.join(describe_levers(best.candidate.state))}",
        f"recovered: {parts}{f'; left: {left}' if left else ''}",
        "checked:   PTX proved equal, machine code verified; not measured",
    ]
