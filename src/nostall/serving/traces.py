"""Request traces of serving systems: arrival times, prompt and output lengths, prefix hashes.

A request of a trace, and the reader that recognises a trace file's format.

- Azure's LLM inference traces (AzurePublicDataset, CC-BY), CSV: columns TIMESTAMP, ContextTokens
  and GeneratedTokens. The times of 2023 have seven digits of a second and no zone, those of 2024
  six digits and a zone.
- BurstGPT (CC-BY), CSV: columns Timestamp (seconds), Request tokens and Response tokens, among
  others. A failed request has no response tokens.
- Mooncake (kvcache-ai/Mooncake), JSON lines: timestamp (ms), input_length, output_length and
  hash_ids, one hash for each block of 512 prompt tokens.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice, pairwise
from pathlib import Path
from typing import Annotated, NamedTuple

import pydantic

from nostall.core.errors import BadTrace
from nostall.core.files.atomic import check_content
from nostall.core.text.suggest import wrong_separator
from nostall.core.validation import first_problem


@dataclass(frozen=True)
class Request:
    """One request of a trace."""

    arrival_s: float
    """Seconds since the first request of the trace."""
    prompt: int
    """Prompt tokens; 1 or more."""
    output: int
    """Generated tokens; 1 or more."""
    hashes: tuple[int, ...] = ()
    """Hash of each block of the prompt, the last one possibly partial: equal hashes at equal
    places are equal prefixes. Empty if the trace has none."""


HASH_BLOCK = 512
"""Prompt tokens of a hash of the Mooncake traces."""
MAX_SECONDS = 1e11
"""Largest time, some 3,000 years; milliseconds since 1970 in a column of seconds are above it."""
MAX_TOKENS = 1 << 24
"""Most prompt or generated tokens of a request."""


def load_requests(path: Path, limit: int | None = None) -> list[Request]:
    """The first ``limit`` requests of a trace file, by arrival.

    A file is read to its end if the first requests and the one behind them are not sorted.

    Formats: CSV of the Azure LLM inference traces (2023 and 2024) and of BurstGPT, JSON lines of
    the Mooncake traces. The first character decides. Raises :class:`BadTrace` if the file has
    another format or no request.
    """

    check_content(path, BadTrace)
    with path.open("rb") as file:
        first = file.read(64).removeprefix(b"\xef\xbb\xbf").lstrip()
    if first.startswith(b"\x1f\x8b"):
        raise BadTrace(
            f"trace {path} is compressed with gzip; run 'gunzip -k' on it and give the result"
        )
    if first.startswith(b"["):
        raise BadTrace(
            f"trace {path} is one JSON array; allowed are JSON lines (Mooncake: timestamp, "
            "input_length, output_length) and CSV; 'jq -c .[]' writes each element in a line"
        )
    rows = (read_mooncake if first.startswith(b"{") else read_csv)(path)
    requests = list(islice(rows, limit))
    if limit is not None:
        behind: list[Request] = []
        wrong: BadTrace | None = None
        try:
            behind = list(islice(rows, 1))
        except BadTrace as error:  # it may be none of the requests that are asked for
            wrong = error
        if any(one.arrival_s > two.arrival_s for one, two in pairwise([*requests, *behind])):
            if wrong is not None:
                raise wrong
            requests += [*behind, *rows]
    if not requests:
        raise BadTrace(f"trace {path} has no request; give a trace with one or more")
    start = min(request.arrival_s for request in requests)
    shifted = [
        Request(request.arrival_s - start, request.prompt, request.output, request.hashes)
        for request in requests
    ]
    return sorted(shifted, key=lambda request: request.arrival_s)[:limit]


_TIME = re.compile(r"(\d{4}-\d\d-\d\d[ T].*?)(?:\.(\d+))?\s*(Z|UTC|[+-]\d\d:?\d\d)?")


def _azure_time(text: str) -> float:
    """Seconds since 1970 of a date with any number of digits of a second; UTC without a zone."""
    match = _TIME.fullmatch(text.strip())
    if match is None:
        raise ValueError(text)
    whole, fraction, zone = match.groups()
    time = datetime.fromisoformat(whole + (zone if zone and zone[0] in "+-" else ""))
    if time.tzinfo is None:
        time = time.replace(tzinfo=UTC)
    return time.timestamp() + float(f"0.{fraction or 0}")


def _seconds(text: str) -> float:
    time = float(text)
    if not abs(time) <= MAX_SECONDS:
        raise ValueError(text)
    return time


class _Format(NamedTuple):
    """Columns of a format."""

    name: str
    columns: tuple[str, str, str]
    """Time, prompt tokens and generated tokens."""
    parse_time: Callable[[str], float]
    example: str
    """A valid time."""


FORMATS = (
    _Format("Azure LLM inference traces of 2023 and 2024",
            ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
            _azure_time, "a time such as 2023-11-16 18:17:03.9799600"),
    _Format("BurstGPT", ("Timestamp", "Request tokens", "Response tokens"), _seconds,
            "a time in seconds"),
)  # fmt: skip


def read_csv(path: Path) -> Iterator[Request]:
    """The requests of a file. A request without generated tokens gets one."""
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
        rows = csv.DictReader(file, skipinitialspace=True)
        try:
            names = rows.fieldnames or ()
            form = next((form for form in FORMATS if set(form.columns) <= set(names)), None)
            if form is None:
                allowed = "; ".join(f"{', '.join(each.columns)} ({each.name})" for each in FORMATS)
                raise BadTrace(
                    f"trace {path} begins with the columns {rows.fieldnames}; allowed are "
                    f"{allowed}; or JSON lines (Mooncake){wrong_separator(names)}"
                )
            for row in rows:
                yield _csv_request(path, rows.line_num, row, form)
        except csv.Error as error:
            raise BadTrace(
                f"trace {path}, line {rows.line_num + 1}: {error}; is a quotation mark not closed?"
            ) from error


def _csv_request(path: Path, line: int, row: dict[str, str], form: _Format) -> Request:
    try:
        text, *numbers = (row[name] for name in form.columns)
        time, (prompt, output) = form.parse_time(text), map(int, numbers)
    except (ValueError, TypeError, AttributeError, OverflowError) as error:
        raise BadTrace(
            f"trace {path}, line {line}: {list(row.values())} is no request; allowed are "
            f"{form.example} and two numbers of tokens"
        ) from error
    if not (1 <= prompt <= MAX_TOKENS and 0 <= output <= MAX_TOKENS):
        raise BadTrace(
            f"trace {path}, line {line}: {prompt} prompt and {output} generated tokens; allowed "
            f"are 1 or more, and 0 or more, each up to {MAX_TOKENS:,}"
        )
    return Request(time, prompt, max(output, 1))


Tokens = Annotated[int, pydantic.Field(ge=0, le=MAX_TOKENS)]


class _Line(pydantic.BaseModel):
    """One line of a trace."""

    timestamp: Annotated[
        pydantic.FiniteFloat, pydantic.Field(ge=-1e3 * MAX_SECONDS, le=1e3 * MAX_SECONDS)
    ]
    """Milliseconds."""
    input_length: Tokens
    output_length: Tokens
    hash_ids: list[int] = []


def read_mooncake(path: Path) -> Iterator[Request]:
    """The requests of a file. A request without generated tokens gets one."""
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        for number, text in enumerate(file, 1):
            if not text.strip():
                continue
            try:
                line = _Line.model_validate_json(text)
            except pydantic.ValidationError as error:
                raise BadTrace(
                    f"trace {path}, line {number}: {first_problem(error, 'the line')}; a line has "
                    "timestamp, input_length, output_length and hash_ids"
                ) from error
            yield _mooncake_request(path, number, line)


def _mooncake_request(path: Path, number: int, line: _Line) -> Request:
    blocks = -(-line.input_length // HASH_BLOCK)
    if line.input_length < 1 or len(line.hash_ids) not in (0, blocks):
        raise BadTrace(
            f"trace {path}, line {number}: {line.input_length} prompt tokens and "
            f"{len(line.hash_ids)} hashes; allowed are 1 or more tokens, and one hash for each "
            f"{HASH_BLOCK} tokens, or none"
        )
    return Request(
        line.timestamp / 1e3,
        line.input_length,
        max(line.output_length, 1),
        tuple(line.hash_ids),
    )
