"""A recording of a run: what its program answered, from which the result is derived again.

The decisions are those of the job itself: it asks a recording instead of a program, and everything
else, from the bounds to the verdicts, is computed from the recorded steps.
"""

from __future__ import annotations

import gzip
import json
import math
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from nostall import __version__
from nostall.core.errors import BadInput
from nostall.core.files.atomic import create_folder, write_atomically
from nostall.core.launch import StrictModel
from nostall.core.validation import explain, load_json
from nostall.optimizing.program import Event, Program, ProgramEnded, TimeIsUp
from nostall.optimizing.result import Result

RECORDING_FILE = "recording.json.gz"
MAX_BYTES = 1 << 28
DERIVED = ("levels", "certificate_of_no_gain", "attempts", "kept", "together", "second_start")
"""Keys of the result that follow from the recorded answers, compared first."""
NOT_DERIVED = ("notes", "files_written_while_watched", "program_exit_code", "lines")
"""Keys of the result that do not follow from the recorded answers, or repeat texts of levels."""
TEXTS = ("reason", "expected", "minutes", "line")
"""Keys of levels and attempts that a later version may word or estimate otherwise; a replay shows
its own, and what they tell is in other keys."""


What = Literal["clock", "watched", "agree", "ask"]


class Entry(StrictModel):
    """One question and its answer."""

    what: What
    question: Any = None
    """The order that was given; of ``agree`` its number."""
    answer: Any = None
    """Seconds, an event, whether ranks agree, or events."""
    ended: str | None = None
    """Why there is no answer: ``time`` is up, or the reason why the program ended."""


class Recording(StrictModel):
    """The file ``recording.json.gz``."""

    format: Literal["nostall program recording"] = "nostall program recording"
    schema_version: Literal[1] = 1
    nostall: str
    options: dict[str, Any]
    starts: tuple[tuple[Entry, ...], ...]
    """What was asked in each start of the program: the first, and perhaps a second one."""
    result: dict[str, Any]
    """``result.json`` of the run."""


class NotDerived(BaseModel):
    """Keys of a recorded result that a replay takes over."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")

    command: list[str]
    command_files: dict[str, str]
    files_written_while_watched: list[str]
    program_exit_code: int
    notes: list[str]


class Recorder:
    """Asks a program, and keeps what it answers."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.entries: list[Entry] = []

    @property
    def orders(self) -> int:
        """Orders that were given."""
        return self.program.orders

    def clock(self) -> float:
        """Seconds of a clock."""
        return float(self._answered("clock", None, time.monotonic))

    def wait_watched(
        self, until: float = math.inf, settings: Mapping[str, Any] | None = None
    ) -> Event:
        """As the program's, which was started with ``settings`` of its engines.

        With what its trace shows, because the trace is not kept.
        """
        watched = self._answered("watched", settings, lambda: self.program.wait_watched(until))
        return dict(watched)

    def ranks_agree(self, number: int | None = None) -> bool:
        """As the program's."""
        return bool(self._answered("agree", number, lambda: self.program.ranks_agree(number)))

    def ask(self, until: float, **order: Any) -> list[Event]:
        """As the program's."""
        return list(self._answered("ask", order, lambda: self.program.ask(until, **order)))

    def _answered(self, what: What, question: Any, ask: Callable[[], Any]) -> Any:
        """The answer of ``ask``, which is kept, as is the end that came instead of one."""
        question = _plain(question)
        try:
            answer = ask()
        except (TimeIsUp, ProgramEnded) as end:
            reason = "time" if isinstance(end, TimeIsUp) else str(end)
            self.entries.append(Entry(what=what, question=question, ended=reason))
            raise
        self.entries.append(Entry(what=what, question=question, answer=answer))
        return answer


class Replayed:
    """Answers as a recorded program did; refuses questions that it was not asked."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self.entries, self.position, self.orders = entries, 0, 0

    def clock(self) -> float:
        """The recorded seconds."""
        return float(self._next("clock", None).answer)

    def wait_watched(
        self, until: float = math.inf, settings: Mapping[str, Any] | None = None
    ) -> Event:
        """The recorded event, or the recorded end."""
        event: Event = self._answer("watched", _plain(settings))
        return event

    def ranks_agree(self, number: int | None = None) -> bool:
        """The recorded answer."""
        return bool(self._next("agree", number).answer)

    def ask(self, until: float, **order: Any) -> list[Event]:
        """The recorded events, or the recorded end."""
        self.orders += 1
        return list(self._answer("ask", _plain(order)))

    def check_end(self) -> None:
        """Raises :class:`BadInput` if answers are left to which the job has no question."""
        if left := len(self.entries) - self.position:
            raise BadInput(
                f"--replay: the job asks nothing after entry {self.position} of the recording, and "
                f"{left} more follow: the recording was changed, or made by another version"
            )

    def _answer(self, what: str, question: Any) -> Any:
        entry = self._next(what, question)
        if entry.ended == "time":
            raise TimeIsUp
        if entry.ended is not None:
            raise ProgramEnded(entry.ended)
        return entry.answer

    def _next(self, what: str, question: Any) -> Entry:
        if self.position == len(self.entries):
            raise RecordingEnds
        entry = self.entries[self.position]
        self.position += 1
        if entry.what != what or entry.question != question:
            asked = {"what": what, "question": question}
            raise BadInput(
                f"--replay: entry {self.position} of the recording answers "
                f"{_short({'what': entry.what, 'question': entry.question})}, and the job asks "
                f"{_short(asked)}: the recording was changed, or made by another version"
            )
        return entry


class RecordingEnds(Exception):
    """The recorded run was interrupted here."""


def write_recording(
    starts: Sequence[Sequence[Entry]], options: Any, result: Result, folder: Path
) -> Path:
    """Write the recording of a run with ``options``, a dataclass, to ``folder``; the path."""
    recording = Recording(
        nostall=__version__, options=asdict(options),
        starts=tuple(map(tuple, starts)), result=_plain(result.as_json()),
    )  # fmt: skip
    create_folder(folder)
    data = recording.model_dump_json(exclude_defaults=False).encode()
    write_atomically(folder / RECORDING_FILE, gzip.compress(data, mtime=0))
    return folder / RECORDING_FILE


def read_recording(path: Path) -> Recording:
    """Read a recording; raises :class:`BadInput` for any other file."""
    try:
        with gzip.open(path) as file:
            data = file.read(MAX_BYTES)  # what is cut off is no JSON
        return load_json(Recording, data)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise BadInput(
            f"--replay: cannot read {path}: {reason}; give the {RECORDING_FILE} that "
            "`nostall optimize` writes"
        ) from error
    except ValidationError as error:
        raise BadInput(
            f"--replay: {path} is no recording of this version of nostall: "
            f"{explain(error, Recording)}; record the program again"
        ) from error


def check_same(recording: Recording, result: Result) -> None:
    """Raises :class:`BadInput` if a verdict of the recording does not follow from its answers."""
    derived = _decided({**_plain(result.as_json()), "nostall": recording.nostall})
    recorded = _decided(recording.result)
    if new := [note for note in result.notes if note not in recording.result.get("notes", [])]:
        raise BadInput(
            f"--replay: the samples give the note {_short(new[0])}, which the recording lacks; it "
            "was changed: record the program again"
        )
    for key in dict.fromkeys([*DERIVED, *derived, *recorded]):
        if key not in NOT_DERIVED and not _equal(recorded.get(key), derived.get(key)):
            place, old, found = _first_difference(key, recorded.get(key), derived.get(key))
            raise BadInput(
                f"--replay: {place} is {_short(old)} in the recording, and its samples give "
                f"{_short(found)}: the recording was changed, or nostall {recording.nostall} "
                f"decides otherwise than {__version__}; record the program again"
            )


def _decided(value: Any) -> Any:
    """A JSON value without :data:`TEXTS`."""
    if isinstance(value, dict):
        return {key: _decided(item) for key, item in value.items() if key not in TEXTS}
    return [_decided(item) for item in value] if isinstance(value, list) else value


def _first_difference(place: str, one: Any, other: Any) -> tuple[str, Any, Any]:
    """Where two JSON values differ first, and the values there."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        for key in [*one, *other]:
            if not _equal(one.get(key), other.get(key)):
                return _first_difference(f"{place}.{key}", one.get(key), other.get(key))
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for at, (a, b) in enumerate(zip(one, other, strict=True)):
            if not _equal(a, b):
                return _first_difference(f"{place}.{at}", a, b)
    return place, one, other


def _equal(one: Any, other: Any) -> bool:
    """Whether two JSON values are equal; floats up to the rounding of other machines."""
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-9)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_equal, one, other))
    return bool(one == other)


def _plain(value: Any) -> Any:
    """A value as JSON gives it back."""
    return json.loads(json.dumps(value))


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 120 else f"{text[:117]}..."
