"""Measurements kept and played back: a device for tests and for machines without a GPU."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from nostall.core.errors import BadRun
from nostall.gpu.device import Device, Fate, Outcome, Timing

Verb = Literal["evaluate", "compare"]


class Record(BaseModel):
    """One answer of a device."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    verb: Verb
    cubin: str
    fate: Fate
    detail: str = ""
    original: tuple[float, ...] = ()
    candidate: tuple[float, ...] = ()
    null: tuple[float, ...] = ()
    loads: int = 1
    spent: dict[str, float] = {}

    @property
    def outcome(self) -> Outcome:
        timing = None
        if self.original:
            timing = Timing(self.original, self.candidate, self.null, self.loads)
        return Outcome(self.fate, timing, self.detail, self.spent)


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    about: dict[str, str]
    records: tuple[Record, ...]


class Recording:
    """Passes everything on to a device and keeps its answers."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.records: list[Record] = []

    @property
    def about(self) -> Mapping[str, str]:
        return self.device.about

    def evaluate(self, cubin: bytes) -> Outcome:
        return self._keep("evaluate", cubin, self.device.evaluate(cubin))

    def compare(self, cubin: bytes, rounds: int, checks: int) -> Outcome:
        return self._keep("compare", cubin, self.device.compare(cubin, rounds, checks))

    def save(self, path: Path) -> None:
        file = _File(about=dict(self.about), records=tuple(self.records))
        path.write_text(file.model_dump_json(indent=1))

    def _keep(self, verb: Verb, cubin: bytes, outcome: Outcome) -> Outcome:
        timing = outcome.timing or Timing((), ())
        self.records.append(
            Record(
                verb=verb,
                cubin=_name(cubin),
                fate=outcome.fate,
                detail=outcome.detail,
                original=timing.original,
                candidate=timing.candidate,
                null=timing.null,
                loads=timing.loads,
                spent=dict(outcome.spent),
            )
        )
        return outcome


class Replay:
    """Answers from a recording; a candidate that was never measured is a :class:`BadRun`."""

    def __init__(self, path: Path) -> None:
        try:
            file = _File.model_validate_json(path.read_text())
        except (OSError, UnicodeDecodeError, ValidationError) as error:
            raise BadRun(f"{path} is not a recording of measurements: {error}") from error
        self.about: Mapping[str, str] = file.about
        self._answers = {(r.verb, r.cubin): r.outcome for r in file.records}

    def evaluate(self, cubin: bytes) -> Outcome:
        return self._answer("evaluate", cubin)

    def compare(self, cubin: bytes, rounds: int, checks: int) -> Outcome:
        return self._answer("compare", cubin)

    def _answer(self, verb: Verb, cubin: bytes) -> Outcome:
        try:
            return self._answers[verb, _name(cubin)]
        except KeyError:
            raise BadRun(
                f"the recording has no `{verb}` of candidate {_name(cubin)[:12]}; it was made by a "
                "search with another seed, strategy or kernel"
            ) from None


def _name(cubin: bytes) -> str:
    return hashlib.sha256(cubin).hexdigest()
