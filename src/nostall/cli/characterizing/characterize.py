"""``nostall characterize``: where the time of jobs and GPUs goes, and what would reduce it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from nostall.cli.characterizing.traces import show_traces
from nostall.cli.terminal.console import (
    Format,
    FormatOption,
    QuietOption,
    err,
    out,
    show_json,
    show_table,
)
from nostall.cli.terminal.progress import ReadProgress
from nostall.core.errors import BadInput, BadJob, BadTrace
from nostall.core.text.labels import file_labels, shorten_all
from nostall.core.text.plurals import pluralize
from nostall.workload import Hardware, load_hardware, presets, read_jobs
from nostall.workload.characterization import (
    JobsCharacterization,
    ScalingCharacterization,
    TracesCharacterization,
    WhatIf,
    characterize_jobs,
    characterize_steps,
    characterize_traces,
    parse_what_if,
)
from nostall.workload.characterization.kinds import (
    KindsCharacterization,
    characterize_kinds,
    learn,
    require_learners,
)
from nostall.workload.characterization.scaling import NodeSlowdown
from nostall.workload.hardware.file import CANDIDATES, default_hardware
from nostall.workload.jobs.steps import is_step_table, read_steps
from nostall.workload.jobs.table import ColumnNames, is_table, parse_column_names
from nostall.workload.model.breakdown import STEP_PARTS
from nostall.workload.traces.chakra.reader import ChakraTrace, read_chakra
from nostall.workload.traces.nsight import is_sqlite
from nostall.workload.traces.ranks import read_ranks
from nostall.workload.traces.work_kinds import parse_kernel_name

MAX_JOBS = 12
"""Limit of the table of single jobs; larger populations have no such table."""
MAX_ROWS = 40
"""Rows of the table of slow-downs; --format json has all."""
MAX_NAME_LENGTH = 18
_JOB_CELLS = 62
_ARCHITECTURE_CELLS = 19
"""Cells of the other columns of the table of jobs, and of the gaps."""


def show_jobs(result: JobsCharacterization, *, is_default: bool = False) -> None:
    """Print the modelled shares, the resource ranking, the portings and the what-if questions.

    ``is_default`` says that the user did not choose the hardware.
    """
    hardware = result.population.hardware.name
    if is_default:
        out.print(_default_hardware_note(hardware))
    show_table(
        f"modelled shares of a step on {hardware}, weighted by GPU time, %",
        ("jobs", "count", "GPU time", *STEP_PARTS),
        [
            (
                group.name,
                group.jobs,
                f"{group.gpu_time:.1%}",
                *(f"{100 * group.by_gpu[part]:.1f}" for part in STEP_PARTS),
            )
            for group in result.groups
        ],
    )
    out.print(
        "perfect overlap of input, GPU work and weight traffic: modelled "
        f"{result.groups[0].overlap_gain:.2f}x the speed without overlap"
    )
    _show_single_jobs(result)
    first, second, *_ = result.resource_ranking.items()
    out.print(
        f"main bottleneck: {first[0]} (modelled {first[1]:.1%} of GPU time), then {second[0]} "
        f"({second[1]:.1%})"
    )
    _show_porting(result)
    for answer in result.what_if:
        out.print(
            f"what if {answer.question}: modelled {answer.mean_by_gpu:.2f}x the speed on "
            f"{hardware}, mean by GPU time ({answer.mean_by_job:.2f}x by job; "
            f"{pluralize(answer.jobs, 'job')})"
        )
    for note in result.notes:
        out.print(f"note: {note}")
    out.print(f"{pluralize(len(result.population.jobs), 'job')}, {result.num_skipped} skipped")


def _default_hardware_note(name: str) -> str:
    if name == CANDIDATES[0]:
        return f"hardware: {name}, the cluster of arXiv:1910.05930; --hardware selects another one"
    return (
        f"hardware: {name}, the oldest preset with the precisions of the jobs; --hardware selects "
        "another one"
    )


def _show_single_jobs(result: JobsCharacterization) -> None:
    if len(result.population.jobs) > MAX_JOBS:
        return
    jobs = list(result.largest_jobs())
    room = out.width - _JOB_CELLS + _ARCHITECTURE_CELLS  # the architecture is left out before names
    names = shorten_all([job.name for job, _ in jobs], max(room, MAX_NAME_LENGTH))
    show_table(
        "modelled step of each job, milliseconds",
        ("job", "architecture", *STEP_PARTS, "total"),
        [
            (
                name,
                job.architecture.value,
                *(f"{1e3 * step.part(part):,.2f}" for part in STEP_PARTS),
                f"{1e3 * step.total:,.2f}",
            )
            for (job, step), name in zip(jobs, names, strict=True)
        ],
        optional=("architecture",),
    )


def _show_porting(result: JobsCharacterization) -> None:
    if not result.porting:
        return
    show_table(
        "PS/Worker jobs ported to another architecture: modelled throughput over that of PS/Worker",
        ("to", "jobs", "weights fit", "and faster", "mean", "median"),
        [
            (
                summary.target,
                summary.jobs,
                summary.fitting,
                f"{summary.faster:.1%}",
                f"{summary.mean_speedup:.2f}x",
                f"{summary.median_speedup:.2f}x",
            )
            for summary in result.porting
        ],
    )


def show_scaling(result: ScalingCharacterization) -> None:
    """Print the slow-down over several nodes, the model of the network and its predictions."""
    if result.measured:
        show_table(
            "step time over several nodes, as a multiple of the measured step on one node",
            ("model", "GPUs", "batch", "nodes", "1 node, ms", "measured", "modelled"),
            [_slowdown_row(row) for row in result.measured[:MAX_ROWS]],
        )
        if len(result.measured) > MAX_ROWS:
            out.print(f"{len(result.measured) - MAX_ROWS} more rows: --format json")
    if result.network is not None:
        network = result.network
        out.print(
            f"network between nodes: modelled {network.curve.share * network.peak / 1e9:.3g} GB/s "
            f"({network.curve.share:.1%} of the {network.peak / 1e9:.3g} GB/s of "
            f"{result.hardware.name}), {network.curve.overhead * 1e3:.3g} ms for each exchange; "
            f"communication is hidden by {network.hidden_share:.0%} of the computation"
        )
    for question, answers in result.predictions:
        show_table(
            f"what if {question.text}: modelled step time, as a multiple of the measured step on "
            "one node",
            ("model", "GPUs", "batch", "1 node, ms", "modelled", "90 % interval"),
            [_prediction_row(row) for row in answers[:MAX_ROWS]],
        )
    for note in result.notes:
        out.print(f"note: {note}")
    out.print(f"{pluralize(result.num_steps, 'step')}, {result.num_skipped} skipped")


def _slowdown_row(row: NodeSlowdown) -> tuple[object, ...]:
    configuration = row.configuration
    return (
        _shorten(configuration.model),
        configuration.gpus,
        f"{configuration.batch:g}",
        row.nodes,
        f"{row.one_node_seconds * 1e3:.4g}",
        _multiple(row.measured_seconds, row),
        _multiple(row.modelled_seconds, row),
    )


def _prediction_row(row: NodeSlowdown) -> tuple[object, ...]:
    configuration = row.configuration
    low, high = row.interval or (None, None)
    return (
        _shorten(configuration.model),
        configuration.gpus,
        f"{configuration.batch:g}",
        f"{row.one_node_seconds * 1e3:.4g}",
        _multiple(row.modelled_seconds, row),
        f"{_multiple(low, row)} to {_multiple(high, row)}",
    )


def _multiple(seconds: float | None, row: NodeSlowdown) -> str:
    return "-" if seconds is None else f"{seconds / row.one_node_seconds:.2f}x"


def _shorten(name: str) -> str:
    return shorten_all([name], max(out.width - _JOB_CELLS, MAX_NAME_LENGTH))[0]


UNKNOWN = "unknown"
MAX_NAME = 100
"""Characters of a kernel's name in a table."""


def require_traces(paths: Sequence[Path], option: str) -> None:
    """Raise :class:`~nostall.core.errors.BadInput` for tables and Chakra traces."""
    for path in paths:
        if is_table(path) or path.suffix == ".et" or is_sqlite(path):
            raise BadInput(
                f"{option} needs traces of torch.profiler, whose operators tell the kind; {path} "
                "is none; leave it out"
            )


def learn_traces(paths: Sequence[Path], kind: str | None, corpus: Path) -> None:
    """Add traces to a file of labelled programs, and say what is in it."""
    require_traces(paths, "--learn")
    programs, reasons = learn(paths, kind or "", corpus)
    for reason in reasons:
        err.print(f"skipped: {reason}")
    out.print(f"{corpus}: {pluralize(programs, 'labelled program')}")


def show_kinds(result: KindsCharacterization, explain: bool) -> None:
    """Print the label of each trace, and the possible new kinds."""
    files = file_labels([Path(document.name) for document, _ in result.rows])
    show_table(
        f"kinds of the traces by their operators (learnt from {result.corpus})",
        ("trace", "kind", "probability", "nearest programs"),
        [
            (
                file,
                UNKNOWN if label.is_unknown else label.kind,
                f"novelty {label.novelty:.2f}" if label.is_unknown else f"{label.probability:.2f}",
                ", ".join(
                    f"{Path(n.name).name} ({n.kind}, {n.similarity:.2f})" for n in label.nearest
                ),
            )
            for file, (_, label) in zip(files, result.rows, strict=True)
        ],
    )
    if explain:
        _show_words(result, files)
    if result.kernels:
        _show_kernels(result)
    if result.new_kinds is not None:
        _show_new_kinds(result)


def _show_kernels(result: KindsCharacterization) -> None:
    show_table(
        "kernels that no rule names: kinds learnt from launch parameters and times",
        ("kernel", "time", "learnt kind", "probability"),
        [
            (
                parse_kernel_name(kernel.name).function[:MAX_NAME],
                f"{1e6 * kernel.seconds:.4g} us",
                kernel.kind,
                f"{kernel.probability:.2f}",
            )
            for kernel in result.kernels
        ],
    )


def _show_words(result: KindsCharacterization, files: Sequence[str]) -> None:
    show_table(
        "operators that decide (share of the trees that a label loses without the operator)",
        ("trace", "label", "operators"),
        [
            (
                file,
                label.kind,
                ", ".join(f"{word} {loss:.2f}" for word, loss in label.words) or "no single one",
            )
            for file, (_, label) in zip(files, result.rows, strict=True)
        ],
    )


def _show_new_kinds(result: KindsCharacterization) -> None:
    new = result.new_kinds
    assert new is not None
    show_table(
        "possible new kinds among the unknown traces",
        ("new kind", "traces", "typical operators"),
        [
            (
                str(number + 1),
                ", ".join(Path(name).name for name in kind.members),
                ", ".join(kind.words),
            )
            for number, kind in enumerate(new.kinds)
        ],
    )
    ranges = [
        f"{min(posterior)} to {max(posterior)}" if len(posterior) > 1 else str(min(posterior))
        for posterior in new.counts.values()
    ]
    out.print(
        "number of new kinds by the temper of the counts: "
        + ", ".join(f"{t:g}: {r}" for t, r in zip(new.counts, ranges, strict=True))
    )


NETWORK_HARDWARE = "h100-dgx"
"""Hardware whose network bounds that of step tables by default; it is the fastest preset."""
CHAKRA_SUFFIX = ".et"
TRACE_SUFFIXES = (".json", ".json.gz", ".sqlite", CHAKRA_SUFFIX)
MAX_REASONS = 20
"""Reasons for skipped input that are printed; the number of all of them is always printed."""
Result = JobsCharacterization | ScalingCharacterization | TracesCharacterization
T = TypeVar("T")


def characterize(
    inputs: Annotated[
        list[Path],
        typer.Argument(
            help="Traces of torch.profiler or JAX (.json, .json.gz), of Nsight Systems (.sqlite) "
            "and of Chakra (.et), or tables of jobs or of measured steps (.csv, .csv.gz, "
            ".parquet). A directory means all traces in it."
        ),
    ],
    hardware: Annotated[
        str | None,
        typer.Option(help=f"A TOML file, or one of {', '.join(presets())}."),
    ] = None,
    what_if: Annotated[
        list[str] | None,
        typer.Option(
            help="ethernet=100Gb/s, memory=x2, to=allreduce-local or nodes=4. Can be repeated."
        ),
    ] = None,
    column: Annotated[
        list[str] | None,
        typer.Option(
            help="Column of a table by the field that it has: 'flops [T]=tflop'. Columns that are "
            "no field are left out. Can be repeated."
        ),
    ] = None,
    report: Annotated[Path | None, typer.Option(help="Write an HTML page to this file.")] = None,
    kinds: Annotated[
        bool, typer.Option(help="Label each trace with a kind of model (extra learn).")
    ] = False,
    explain: Annotated[
        bool, typer.Option(help="With --kinds: show the operators that decide.")
    ] = False,
    corpus: Annotated[
        Path | None, typer.Option(help="With --kinds: labelled programs that --learn wrote.")
    ] = None,
    learn: Annotated[
        Path | None, typer.Option(help="Add the traces to this file of labelled programs.")
    ] = None,
    kind: Annotated[str | None, typer.Option(help="With --learn: the kind of the traces.")] = None,
    processes: Annotated[int, typer.Option(min=1, help="Processes that read traces.")] = 1,
    format: FormatOption = Format.TABLE,
    quiet: QuietOption = False,
) -> None:
    """Show where training time goes, in traces and tables.

    Read are profiler traces, job tables and tables of measured steps. Also shown: what other
    hardware, another architecture or more nodes would change. Traces and steps are measured; job
    tables are modelled (arXiv:1910.05930). Input that cannot be read is skipped and counted. Exit
    code 2 if nothing can be read.
    """
    names = parse_column_names(column or ())
    paths = _input_files(inputs, names)
    if names and not is_table(paths[0]):
        raise BadInput(f"--column names columns of tables, and {paths[0]} is none; leave it out")
    if learn is not None:
        learn_traces(paths, kind, learn)
        return
    needs_labels = kinds or explain or corpus is not None
    if needs_labels:
        require_traces(paths, "--kinds")
        require_learners()
    bar = ReadProgress(paths, enabled=not quiet and format is Format.TABLE)
    result = _characterize(paths, hardware, what_if or (), names, processes, bar)
    labels = characterize_kinds(paths, corpus) if needs_labels else None
    page = _write_page(result, report, labels) if report is not None else None
    if format is Format.JSON:
        more = {"kinds": labels.as_json()} if labels is not None else {}
        show_json({**result.as_json(), **more})
        return
    _show(result, is_default=hardware is None)
    if labels is not None:
        show_kinds(labels, explain)
    for reason in result.skip_reasons[:MAX_REASONS]:
        err.print(f"skipped: {reason}")
    if page is not None:
        out.print(f"report: {page}")


def _characterize(
    paths: Sequence[Path],
    hardware: str | None,
    what_if: Sequence[str],
    names: ColumnNames,
    processes: int,
    bar: ReadProgress,
) -> Result:
    questions = [parse_what_if(text) for text in what_if]
    known_hardware = load_hardware(hardware) if hardware else None
    if not is_table(paths[0]):
        return _characterize_traces(paths, known_hardware, questions, processes, bar)
    if is_step_table(paths[0], names):
        return _characterize_steps(paths, known_hardware, questions, names)
    return _characterize_jobs(paths, known_hardware, questions, names)


def _show(result: Result, *, is_default: bool) -> None:
    """Print the tables; ``is_default``: no hardware was given."""
    match result:
        case JobsCharacterization():
            show_jobs(result, is_default=is_default)
        case ScalingCharacterization():
            show_scaling(result)
        case TracesCharacterization():
            show_traces(result)


def _input_files(inputs: Sequence[Path], names: ColumnNames) -> list[Path]:
    """The input files, with the traces of each directory in its place.

    Raises :class:`~nostall.core.errors.BadInput` for different kinds of input.
    """
    files = [file for path in inputs for file in _traces_in(path)]
    tables = [path for path in files if is_table(path)]
    if tables and len(tables) < len(files):
        trace = next(path for path in files if not is_table(path))
        raise BadInput(
            f"{tables[0]} is a table and {trace} is not; characterize tables and traces in "
            "separate calls"
        )
    kinds = {path: is_step_table(path, names) for path in tables}
    if len(set(kinds.values())) > 1:
        steps = next(path for path, is_steps in kinds.items() if is_steps)
        jobs = next(path for path, is_steps in kinds.items() if not is_steps)
        raise BadInput(
            f"{steps} is a table of measured steps and {jobs} is not; characterize them in "
            "separate calls"
        )
    return files


def _traces_in(path: Path) -> list[Path]:
    """The traces of a directory, or the file itself."""
    try:
        if not path.is_dir():
            return [path]
        traces = sorted(p for p in path.iterdir() if p.name.endswith(TRACE_SUFFIXES))
    except OSError as error:
        raise BadInput(
            f"cannot read {path}: {error.strerror or error}; check the path and its permissions"
        ) from error
    if not traces:
        raise BadInput(f"{path} has no traces ({', '.join(TRACE_SUFFIXES)}); name the files")
    return traces


def _read_tables(
    paths: Sequence[Path], names: ColumnNames, read: Callable[[Path, ColumnNames], T]
) -> tuple[list[T], list[str]]:
    """(tables, reasons for files that cannot be read)."""
    tables: list[T] = []
    unreadable: list[str] = []
    for path in paths:
        try:
            tables.append(read(path, names))
        except BadJob as error:
            unreadable.append(str(error))
    if not tables:
        raise BadJob(unreadable[0])
    return tables, unreadable


def _characterize_jobs(
    paths: Sequence[Path],
    hardware: Hardware | None,
    questions: Sequence[WhatIf],
    names: ColumnNames,
) -> JobsCharacterization:
    tables, unreadable = _read_tables(paths, names, read_jobs)
    hardware = hardware or default_hardware(job for table in tables for job in table.jobs)
    return characterize_jobs(tables, hardware, questions, unreadable)


def _characterize_steps(
    paths: Sequence[Path],
    hardware: Hardware | None,
    questions: Sequence[WhatIf],
    names: ColumnNames,
) -> ScalingCharacterization:
    tables, unreadable = _read_tables(paths, names, read_steps)
    hardware = hardware or load_hardware(NETWORK_HARDWARE)
    return characterize_steps(tables, hardware, questions, unreadable)


def _characterize_traces(
    paths: Sequence[Path],
    hardware: Hardware | None,
    questions: Sequence[WhatIf],
    processes: int,
    bar: ReadProgress,
) -> TracesCharacterization:
    kineto_paths = [path for path in paths if path.suffix != CHAKRA_SUFFIX]
    chakra: list[ChakraTrace] = []
    unreadable: list[str] = []
    for path in paths:
        if path.suffix == CHAKRA_SUFFIX:
            try:
                chakra.append(read_chakra(path))
            except BadTrace as error:
                unreadable.append(str(error))
    ranks = None
    if kineto_paths:
        try:
            with bar:
                ranks = read_ranks(kineto_paths, processes=processes, progress=bar.on_bytes)
        except BadTrace as error:
            if not chakra:
                raise
            unreadable.append(str(error))
    return characterize_traces(ranks, chakra, hardware, questions, unreadable)


def _write_page(result: Result, path: Path, labels: KindsCharacterization | None) -> Path:
    if isinstance(result, ScalingCharacterization):
        raise BadInput(
            f"--report {path}: there is no page for tables of measured steps; use --format json"
        )
    from nostall.report.workload import write_page

    return write_page(result, path, labels)
