"""``nostall characterize``: where the time of jobs and GPUs goes, and what would reduce it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from nostall.cli.characterize_tables import show_jobs, show_traces
from nostall.cli.console import Format, FormatOption, QuietOption, err, out, show_json
from nostall.cli.progress import ReadProgress
from nostall.core.errors import BadInput, BadJob, BadTrace
from nostall.report.workload import write_page
from nostall.workload import Hardware, load_hardware, presets, read_jobs
from nostall.workload.characterization import (
    JobsCharacterization,
    TracesCharacterization,
    WhatIf,
    characterize_jobs,
    characterize_traces,
    parse_what_if,
)
from nostall.workload.jobs.table import JobTable, is_table
from nostall.workload.traces.chakra import ChakraTrace, read_chakra
from nostall.workload.traces.ranks import read_ranks

DEFAULT_HARDWARE = "pai-2018"
CHAKRA_SUFFIX = ".et"
TRACE_SUFFIXES = (".json", ".json.gz", CHAKRA_SUFFIX)
MAX_REASONS = 20
"""Reasons for skipped input that are printed; the number of all of them is always printed."""


def characterize(
    inputs: Annotated[
        list[Path],
        typer.Argument(
            help="Job tables (.csv, .csv.gz, .parquet), or traces of torch.profiler (.json, "
            ".json.gz) and of Chakra (.et). A directory means all traces in it."
        ),
    ],
    hardware: Annotated[
        str | None,
        typer.Option(help=f"A TOML file, or one of {', '.join(presets())}."),
    ] = None,
    what_if: Annotated[
        list[str] | None,
        typer.Option(help="ethernet=100Gb/s, memory=x2 or to=allreduce-local. Can be repeated."),
    ] = None,
    report: Annotated[Path | None, typer.Option(help="Write an HTML page to this file.")] = None,
    processes: Annotated[int, typer.Option(min=1, help="Processes that read traces.")] = 1,
    format: FormatOption = Format.TABLE,
    quiet: QuietOption = False,
) -> None:
    """Show where training time goes in job tables or traces.

    Also shown: what other hardware, or another architecture, would change. Job tables are modelled
    (arXiv:1910.05930); traces are measured. Input that cannot be read is skipped and counted. Exit
    code 2 if nothing can be read.
    """
    questions = [parse_what_if(text) for text in what_if or ()]
    paths = _input_files(inputs)
    result: JobsCharacterization | TracesCharacterization
    if is_table(paths[0]):
        result = _characterize_tables(paths, load_hardware(hardware or DEFAULT_HARDWARE), questions)
    else:
        known_hardware = load_hardware(hardware) if hardware else None
        bar = ReadProgress(paths, enabled=not quiet and format is Format.TABLE)
        result = _characterize_traces(paths, known_hardware, questions, processes, bar)
    page = write_page(result, report) if report is not None else None
    if format is Format.JSON:
        show_json(result.as_json())
        return
    if isinstance(result, JobsCharacterization):
        show_jobs(result)
    else:
        show_traces(result)
    for reason in result.skip_reasons[:MAX_REASONS]:
        err.print(f"skipped: {reason}")
    if page is not None:
        out.print(f"report: {page}")


def _input_files(inputs: Sequence[Path]) -> list[Path]:
    """The input files, with the traces of each directory in its place.

    Raises :class:`~nostall.core.errors.BadInput` for tables together with traces.
    """
    files: list[Path] = []
    for path in inputs:
        if not path.is_dir():
            files.append(path)
            continue
        traces = sorted(p for p in path.iterdir() if p.name.endswith(TRACE_SUFFIXES))
        if not traces:
            suffixes = ", ".join(TRACE_SUFFIXES)
            raise BadInput(f"{path} has no traces ({suffixes}); name the files")
        files += traces
    tables = [path for path in files if is_table(path)]
    if tables and len(tables) < len(files):
        trace = next(path for path in files if not is_table(path))
        raise BadInput(
            f"{tables[0]} is a job table and {trace} is not; characterize job tables and traces "
            "in separate calls"
        )
    return files


def _characterize_tables(
    paths: Sequence[Path], hardware: Hardware, questions: Sequence[WhatIf]
) -> JobsCharacterization:
    tables: list[JobTable] = []
    unreadable: list[str] = []
    for path in paths:
        try:
            tables.append(read_jobs(path))
        except BadJob as error:
            unreadable.append(str(error))
    if not tables:
        raise BadJob(unreadable[0])
    return characterize_jobs(tables, hardware, questions, unreadable)


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
        with bar:
            ranks = read_ranks(kineto_paths, processes=processes, progress=bar.on_bytes)
    return characterize_traces(ranks, chakra, hardware, questions, unreadable)
