"""``nostall characterize``: what jobs and GPUs wait for, and what would change it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from nostall.cli.characterize_tables import show_jobs, show_traces
from nostall.cli.console import Format, FormatOption, QuietOption, err, out, show_json
from nostall.cli.reading import Reading
from nostall.core.errors import BadInput, BadJob, BadTrace
from nostall.report.workload import write_page
from nostall.workload import Hardware, load_hardware, presets, read_jobs
from nostall.workload.answers import (
    JobsAnswer,
    TracesAnswer,
    WhatIf,
    answer_jobs,
    answer_traces,
    parse_what_if,
)
from nostall.workload.jobs.table import JobTable, is_table
from nostall.workload.traces.chakra import ChakraTrace, read_chakra
from nostall.workload.traces.ranks import read_ranks

DEFAULT_HARDWARE = "pai-2018"
CHAKRA = ".et"
TRACES = (".json", ".json.gz", CHAKRA)
MOST_REASONS = 20
"""Lines about what was left out; the count is always printed."""


def characterize(
    inputs: Annotated[
        list[Path],
        typer.Argument(
            help="Job tables (.csv, .csv.gz, .parquet), or traces (.json, .json.gz of "
            "torch.profiler, .et of Chakra); a directory stands for the traces in it."
        ),
    ],
    hardware: Annotated[
        str | None,
        typer.Option(help=f"A TOML file, or one of {', '.join(presets())}."),
    ] = None,
    what_if: Annotated[
        list[str] | None,
        typer.Option(help="ethernet=100Gb/s, memory=x2, to=allreduce-local; may come again."),
    ] = None,
    report: Annotated[Path | None, typer.Option(help="Write an HTML page here.")] = None,
    processes: Annotated[int, typer.Option(min=1, help="Traces to read side by side.")] = 1,
    format: FormatOption = Format.TABLE,
    quiet: QuietOption = False,
) -> None:
    """Where does training time go, and what would other hardware or another architecture change?

    Job tables are modelled (arXiv:1910.05930); traces are measured.  Input that cannot be read is
    left out and counted; exit code 2 when nothing can be read.
    """
    questions = [parse_what_if(text) for text in what_if or ()]
    paths = _expanded(inputs)
    answer: JobsAnswer | TracesAnswer
    if is_table(paths[0]):
        answer = _jobs(paths, load_hardware(hardware or DEFAULT_HARDWARE), questions)
    else:
        known = load_hardware(hardware) if hardware else None
        bar = Reading(paths, enabled=not quiet and format is Format.TABLE)
        answer = _traces(paths, known, questions, processes, bar)
    page = write_page(answer, report) if report is not None else None
    if format is Format.JSON:
        show_json(answer.as_json())
        return
    if isinstance(answer, JobsAnswer):
        show_jobs(answer)
    else:
        show_traces(answer)
    for line in answer.left_out[:MOST_REASONS]:
        err.print(f"left out: {line}")
    if page is not None:
        out.print(f"report: {page}")


def _expanded(inputs: Sequence[Path]) -> list[Path]:
    """Files; directories become the traces in them.  Tables and traces do not mix."""
    found: list[Path] = []
    for path in inputs:
        if not path.is_dir():
            found.append(path)
            continue
        inside = sorted(p for p in path.iterdir() if p.name.endswith(TRACES))
        if not inside:
            raise BadInput(f"{path} holds no traces ({', '.join(TRACES)}); name the files")
        found += inside
    tables = [p for p in found if is_table(p)]
    if tables and len(tables) < len(found):
        other = next(p for p in found if not is_table(p))
        raise BadInput(
            f"{tables[0]} is a job table and {other} is none; characterize one kind at a time"
        )
    return found


def _jobs(paths: Sequence[Path], hardware: Hardware, questions: Sequence[WhatIf]) -> JobsAnswer:
    tables: list[JobTable] = []
    bad: list[str] = []
    for path in paths:
        try:
            tables.append(read_jobs(path))
        except BadJob as error:
            bad.append(str(error))
    if not tables:
        raise BadJob(bad[0])
    return answer_jobs(tables, hardware, questions, bad)


def _traces(
    paths: Sequence[Path],
    hardware: Hardware | None,
    questions: Sequence[WhatIf],
    processes: int,
    bar: Reading,
) -> TracesAnswer:
    kineto = [p for p in paths if p.suffix != CHAKRA]
    chakra: list[ChakraTrace] = []
    bad: list[str] = []
    for path in paths:
        if path.suffix == CHAKRA:
            try:
                chakra.append(read_chakra(path))
            except BadTrace as error:
                bad.append(str(error))
    read = None
    if kineto:
        with bar:
            read = read_ranks(kineto, processes=processes, progress=bar.on_bytes)
    return answer_traces(read, chakra, hardware, questions, bad)
