"""Reader of request traces in CSV: Azure's LLM inference traces and BurstGPT.

Azure (AzurePublicDataset, CC-BY): columns TIMESTAMP, ContextTokens and GeneratedTokens. The times
of 2023 have seven digits of a second and no zone, those of 2024 six digits and a zone.
BurstGPT (CC-BY): columns Timestamp (seconds), Request tokens and Response tokens, among others. A
failed request has no response tokens.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path

from nostall.core.errors import BadTrace
from nostall.serving.traces.requests import Request

_TIME = re.compile(r"(.*?)(?:\.(\d+))?\s*(Z|UTC|[+-]\d\d:?\d\d)?")


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
    if not math.isfinite(time):
        raise ValueError(text)
    return time


@dataclass(frozen=True)
class _Format:
    """Columns of a format."""

    name: str
    time: str
    prompt: str
    output: str
    parse_time: Callable[[str], float]
    example: str
    """A valid time."""

    @property
    def columns(self) -> tuple[str, str, str]:
        return self.time, self.prompt, self.output


FORMATS = (
    _Format("Azure LLM inference traces of 2023 and 2024", "TIMESTAMP", "ContextTokens",
            "GeneratedTokens", _azure_time, "a time such as 2023-11-16 18:17:03.9799600"),
    _Format("BurstGPT", "Timestamp", "Request tokens", "Response tokens", _seconds,
            "a time in seconds"),
)  # fmt: skip


def read_csv(path: Path, limit: int | None = None) -> list[Request]:
    """The first ``limit`` requests of a file. A request without generated tokens gets one."""
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
        rows = csv.DictReader(file, skipinitialspace=True)
        names = rows.fieldnames
        for form in FORMATS:
            if names is not None and set(form.columns) <= set(names):
                return [_request(path, rows.line_num, row, form) for row in islice(rows, limit)]
        allowed = "; ".join(f"{', '.join(form.columns)} ({form.name})" for form in FORMATS)
        raise BadTrace(
            f"trace {path} begins with the columns {names}; allowed are {allowed}; or JSON lines "
            "(Mooncake)"
        )


def _request(path: Path, line: int, row: dict[str, str], form: _Format) -> Request:
    try:
        time = form.parse_time(row[form.time])
        prompt, output = int(row[form.prompt]), int(row[form.output])
    except (ValueError, TypeError, AttributeError, OverflowError) as error:
        raise BadTrace(
            f"trace {path}, line {line}: {list(row.values())} is no request; allowed are "
            f"{form.example} and two numbers of tokens"
        ) from error
    if prompt < 1 or output < 0:
        raise BadTrace(
            f"trace {path}, line {line}: {prompt} prompt and {output} generated tokens; allowed "
            "are 1 or more, and 0 or more"
        )
    return Request(time, prompt, max(output, 1))
