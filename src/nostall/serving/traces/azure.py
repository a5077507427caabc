"""Reader of the Azure LLM inference traces of 2023 (CC-BY, Azure/AzurePublicDataset).

A CSV file with the columns TIMESTAMP, ContextTokens and GeneratedTokens.
"""

from __future__ import annotations

import csv
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path

from nostall.core.errors import BadTrace
from nostall.serving.traces.requests import Request

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def read_azure(path: Path, limit: int | None = None) -> list[Request]:
    """The first ``limit`` requests of a file. A request without generated tokens gets one."""
    with path.open(encoding="utf-8", errors="replace", newline="") as file:
        rows = csv.DictReader(file)
        if tuple(rows.fieldnames or ()) != COLUMNS:
            raise BadTrace(
                f"trace {path} begins with the columns {rows.fieldnames}; allowed are "
                f"{', '.join(COLUMNS)} (Azure LLM inference trace 2023), or JSON lines (Mooncake)"
            )
        return [_request(path, rows.line_num, row) for row in islice(rows, limit)]


def _request(path: Path, line: int, row: dict[str, str]) -> Request:
    try:
        # The files give seven digits of a second; datetime reads six.
        whole, _, fraction = row["TIMESTAMP"].partition(".")
        time = datetime.fromisoformat(whole).replace(tzinfo=UTC).timestamp()
        time += float(f"0.{fraction or 0}")
        prompt, output = int(row["ContextTokens"]), int(row["GeneratedTokens"])
    except (ValueError, TypeError) as error:
        raise BadTrace(
            f"trace {path}, line {line}: {list(row.values())} is no request; allowed are a time "
            "such as 2023-11-16 18:17:03.9799600 and two numbers of tokens"
        ) from error
    if prompt < 1 or output < 0:
        raise BadTrace(
            f"trace {path}, line {line}: {prompt} prompt and {output} generated tokens; allowed "
            "are 1 or more, and 0 or more"
        )
    return Request(time, prompt, max(output, 1))
