"""Log of all candidates of an assembler search: compressed JSON lines that survive a kill."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from nostall.core import BadRun, Checkpoint, Trial
from nostall.ptx.schedule.state import PtxState
from nostall.search.orders.operators import GIVEN, Proposal
from nostall.tuning.assembler.candidate import Candidate

CANDIDATES_FILE = "candidates.jsonl.gz"
"""File of a run directory."""
_BATCH = 64
"""Records that are compressed and written together; a kill loses at most these."""


class CandidateLog:
    """Appends one line for each result of a candidate; also an observer that flushes.

    A line has the lever (the operator), the parent's key, the state with its order, the hashes of
    the text and of the code, the registers, the result, and the ratios original / candidate.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lines: list[str] = []

    def record(
        self,
        number: int,
        proposal: Proposal[PtxState],
        candidate: Candidate,
        result: str,
        ratios: Sequence[float],
    ) -> None:
        """Add a result: ``timed``, ``measured again``, or why the candidate was dropped."""
        repeated = result == "measured again"
        is_child = proposal.operator != GIVEN
        entry: dict[str, Any] = {
            "number": number,
            "lever": str(proposal.operator),
            "key": candidate.state.key().hex(),
            "result": result,
            "ratios": [round(ratio, 6) for ratio in ratios],
        }
        if not repeated:
            entry |= {
                "parent": proposal.parent.key().hex() if is_child else None,
                "state": candidate.state.dump(),
                "ptx_sha256": candidate.ptx_sha256,
                "code_sha256": candidate.code_sha256,
                "registers": candidate.resources.registers if candidate.resources else None,
                "spill_bytes": candidate.resources.spill_bytes if candidate.resources else None,
                "detail": candidate.detail,
            }
        self._lines.append(json.dumps(entry, separators=(",", ":")))
        if len(self._lines) >= _BATCH:
            self.flush()

    def flush(self) -> None:
        """Write the lines that wait."""
        if self._lines:
            lines, self._lines = self._lines, []
            data = gzip.compress("".join(f"{line}\n" for line in lines).encode(), 1, mtime=0)
            with self.path.open("ab") as file:
                file.write(data)

    def on_trial(self, trial: Trial) -> None:
        """Do nothing."""

    def on_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Write the lines that wait."""
        self.flush()


def read_candidates(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a log; a batch that a kill cut off is left out.

    Raises :class:`BadRun` for a damaged file.
    """
    lines: list[str] = []
    try:
        with gzip.open(path, "rt") as file:
            lines.extend(file)
    except (EOFError, gzip.BadGzipFile):
        pass
    except (UnicodeDecodeError, zlib.error) as error:
        raise _damaged(path, f"{type(error).__name__}: {error}") from error
    for number, line in enumerate(lines, 1):
        try:
            yield json.loads(line)
        except ValueError as error:
            raise _damaged(path, f"line {number}: {error}") from error


def _damaged(path: Path, reason: str) -> BadRun:
    return BadRun(f"{path} is damaged ({reason}); delete it to go on without its measurements")
