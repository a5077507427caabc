"""A request of a trace, and the reader that recognises a trace file's format."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from nostall.core.errors import BadTrace
from nostall.core.files.pointers import check_content


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
Reader = Callable[[Path, int | None], list[Request]]


def load_requests(path: Path, limit: int | None = None) -> list[Request]:
    """The first ``limit`` requests of a trace file, by arrival.

    Formats: CSV of the Azure LLM inference traces (2023 and 2024) and of BurstGPT, JSON lines of
    the Mooncake traces. The first byte decides. Raises :class:`BadTrace` if the file has another
    format or no request.
    """
    from nostall.serving.traces.csv_rows import read_csv
    from nostall.serving.traces.mooncake import read_mooncake

    check_content(path, BadTrace)
    with path.open("rb") as file:
        first = file.read(2)
    if first == b"\x1f\x8b":
        raise BadTrace(
            f"trace {path} is compressed with gzip; run 'gunzip -k' on it and give the result"
        )
    reader: Reader = read_mooncake if first.startswith(b"{") else read_csv
    requests = reader(path, limit)
    if not requests:
        raise BadTrace(f"trace {path} has no request; give a trace with one or more")
    start = min(request.arrival_s for request in requests)
    shifted = [
        Request(request.arrival_s - start, request.prompt, request.output, request.hashes)
        for request in requests
    ]
    return sorted(shifted, key=lambda request: request.arrival_s)
