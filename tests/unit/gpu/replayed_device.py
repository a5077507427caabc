"""Record a device's outcomes in a file, and replay them on machines without a GPU."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from nostall.core.errors import BadRun
from nostall.core.files.atomic import write_text_atomically
from nostall.gpu.device import Device, Outcome, Status, Timing

Method = Literal["evaluate", "compare"]


class OutcomeRecord(BaseModel):
    """The outcome of one call of a device.  Field names are keys of the recording file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    verb: Method
    cubin: str
    """sha256 of the candidate."""
    fate: Status
    detail: str = ""
    original: tuple[float, ...] = ()
    candidate: tuple[float, ...] = ()
    null: tuple[float, ...] = ()
    loads: int = 1
    spent: dict[str, float] = Field(default_factory=dict)
    """Seconds by phase."""

    @classmethod
    def from_outcome(cls, method: Method, cubin: bytes, outcome: Outcome) -> OutcomeRecord:
        """The record of a call ``method(cubin)`` that returned ``outcome``."""
        timing = outcome.timing or Timing((), ())
        return cls(
            verb=method,
            cubin=_sha256(cubin),
            fate=outcome.status,
            detail=outcome.detail,
            original=timing.original,
            candidate=timing.candidate,
            null=timing.null,
            loads=timing.loads,
            spent=dict(outcome.phase_seconds),
        )

    @property
    def outcome(self) -> Outcome:
        """This record as the :class:`Outcome` of evaluating one candidate on a device."""
        timing = None
        if self.original:
            timing = Timing(self.original, self.candidate, self.null, self.loads)
        return Outcome(self.fate, timing, self.detail, self.spent)


class _RecordingFile(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    about: dict[str, str]
    """:attr:`Device.info` of the recorded device."""
    records: tuple[OutcomeRecord, ...]


class RecordingDevice:
    """Passes calls on to another device and records the outcomes."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.records: list[OutcomeRecord] = []

    @property
    def info(self) -> Mapping[str, str]:
        return self.device.info

    def evaluate(self, cubin: bytes) -> Outcome:
        return self._record("evaluate", cubin, self.device.evaluate(cubin))

    def compare(self, cubin: bytes, rounds: int, checks: int) -> Outcome:
        return self._record("compare", cubin, self.device.compare(cubin, rounds, checks))

    def save(self, path: Path) -> None:
        """Write all outcomes so far to a recording file."""
        file = _RecordingFile(about=dict(self.info), records=tuple(self.records))
        write_text_atomically(path, file.model_dump_json(indent=1))

    def _record(self, method: Method, cubin: bytes, outcome: Outcome) -> Outcome:
        self.records.append(OutcomeRecord.from_outcome(method, cubin, outcome))
        return outcome


class ReplayedDevice:
    """Returns the outcomes of a recording file.

    Raises :class:`BadRun` if the file is invalid, or has no outcome of a candidate.
    """

    def __init__(self, path: Path) -> None:
        try:
            file = _RecordingFile.model_validate_json(path.read_text())
        except (OSError, UnicodeDecodeError, ValidationError) as error:
            raise BadRun(f"{path} is not a recording of measurements: {error}") from error
        self.info: Mapping[str, str] = file.about
        self._outcomes = {(r.verb, r.cubin): r.outcome for r in file.records}

    def evaluate(self, cubin: bytes) -> Outcome:
        return self._find("evaluate", cubin)

    def compare(self, cubin: bytes, rounds: int, checks: int) -> Outcome:
        return self._find("compare", cubin)

    def _find(self, method: Method, cubin: bytes) -> Outcome:
        sha256 = _sha256(cubin)
        try:
            return self._outcomes[method, sha256]
        except KeyError:
            raise BadRun(
                f"the recording has no `{method}` of candidate {sha256[:12]}; it was made by a "
                "search with another seed, strategy or kernel"
            ) from None


def _sha256(cubin: bytes) -> str:
    return hashlib.sha256(cubin).hexdigest()
