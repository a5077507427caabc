"""Reader of the Mooncake traces (kvcache-ai/Mooncake): JSON lines with prefix hashes.

Each line has timestamp (ms), input_length, output_length and hash_ids, one hash for each block of
512 prompt tokens.
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Annotated

import pydantic

from nostall.core.errors import BadTrace
from nostall.serving.traces.requests import HASH_BLOCK, Request

Tokens = Annotated[int, pydantic.Field(ge=0, le=1 << 24)]


class _Line(pydantic.BaseModel):
    """One line of a trace."""

    timestamp: float
    input_length: Tokens
    output_length: Tokens
    hash_ids: list[int] = []


def read_mooncake(path: Path, limit: int | None = None) -> list[Request]:
    """The first ``limit`` requests of a file. A request without generated tokens gets one."""
    requests = []
    with path.open("rb") as file:
        for number, text in enumerate(islice(file, limit), 1):
            try:
                line = _Line.model_validate_json(text)
            except pydantic.ValidationError as error:
                first = error.errors()[0]
                where = ".".join(str(part) for part in first["loc"]) or "the line"
                raise BadTrace(
                    f"trace {path}, line {number}: {where}: {first['msg']}; a line has timestamp, "
                    "input_length, output_length and hash_ids"
                ) from error
            requests.append(_request(path, number, line))
    return requests


def _request(path: Path, number: int, line: _Line) -> Request:
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
