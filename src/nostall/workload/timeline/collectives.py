"""Matching of the collectives of all ranks: transfer time, and waiting for the last rank.

The kernel of a collective starts when its own rank is ready and ends when the data have arrived, so
on a rank that is early it also waits.  The last rank waits for no other rank: its kernel is the
shortest, and its duration is the transfer time.  Only durations are compared, so the clocks of the
machines need not agree.

Collectives are matched within their process group by their sequence numbers if the traces have
them, else by their order.  A collective that a trace lacks, because an event is damaged or because
the recorded steps differ, is not counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nostall.core.errors import BadTrace
from nostall.core.text.plurals import pluralize
from nostall.workload.traces.recording import ActivityType, Recording
from nostall.workload.traces.work_kinds import WorkKind, work_kinds

MIN_MATCHED = 0.9
"""Share of the collectives of a process group that must match; else the traces differ."""
_LOOKAHEAD = 64
"""Collectives that may be missing in a row."""


@dataclass(frozen=True, slots=True)
class MatchedCollective:
    """One collective on all ranks of its process group that have traces."""

    name: str
    """Name of its kernel."""
    message_bytes: float
    """Bytes that each rank contributes; 0: unknown."""
    seconds: tuple[float, ...]
    """Measured seconds of the kernel on each rank."""
    ranks: tuple[int, ...]
    """Index of the trace of each rank."""

    @property
    def transfer(self) -> float:
        """Seconds on the last rank."""
        return min(self.seconds)

    @property
    def waits(self) -> tuple[float, ...]:
        """Seconds that each rank waited for the last one."""
        return tuple(s - self.transfer for s in self.seconds)


_Key = tuple[str, float]
"""Kernel name and message bytes of a collective."""


@dataclass(frozen=True, slots=True)
class _Collective:
    """One communication kernel of one rank."""

    name: str
    message_bytes: float
    sequence: int
    seconds: float

    @property
    def key(self) -> _Key:
        return self.name, self.message_bytes


def match_collectives(
    recordings: Sequence[Recording],
) -> tuple[list[MatchedCollective], list[str]]:
    """The collectives of all ranks of a job, and remarks about those that are not counted.

    Raises :class:`~nostall.core.errors.BadTrace` for fewer than two ranks, or if the ranks of a
    process group did not run the same collectives (different steps).
    """
    if len(recordings) < 2:
        raise BadTrace(
            f"cannot match collectives of {pluralize(len(recordings), 'trace')}; give traces of "
            "two or more ranks"
        )
    per_rank = [_collectives_by_group(recording) for recording in recordings]
    groups = list(dict.fromkeys(group for rank in per_rank for group in rank))
    matched: list[MatchedCollective] = []
    remarks: list[str] = []
    num_alone = 0
    for group in groups:
        members = [index for index, rank in enumerate(per_rank) if group in rank]
        lists = [per_rank[index][group] for index in members]
        if not group and len(members) < len(recordings):
            other = next(i for i in range(len(recordings)) if i not in members)
            raise _different(recordings[other], 0, recordings[members[0]], len(lists[0]))
        if len(members) < 2:
            num_alone += len(lists[0])
            continue
        if not _are_numbered(lists):
            _require_same_steps([recordings[index] for index in members])
        rows = _match_group(lists)
        longest = max(map(len, lists))
        if len(rows) < MIN_MATCHED * longest:
            sizes = [len(some) for some in lists]
            other = next((i for i, size in enumerate(sizes) if size != sizes[0]), 1)
            raise _different(
                recordings[members[other]], sizes[other], recordings[members[0]], sizes[0]
            )
        if len(rows) < longest:
            remarks.append(
                f"{pluralize(longest - len(rows), 'collective')} of {longest} in process group "
                f"{group or 'of all ranks'} {'is' if longest - len(rows) == 1 else 'are'} not in "
                "the traces of all its ranks"
            )
        matched += [
            MatchedCollective(
                row[0].name,
                row[0].message_bytes,
                tuple(collective.seconds for collective in row),
                tuple(members),
            )
            for row in rows
        ]
    if num_alone:
        remarks.append(
            f"{pluralize(num_alone, 'collective')} of process groups with only one trace "
            f"{'is' if num_alone == 1 else 'are'} not counted as waiting"
        )
    return matched, remarks


def has_collectives(recording: Recording) -> bool:
    """Whether a trace has a communication kernel."""
    return bool(_communication_rows(recording).size)


def _different(recording: Recording, count: int, other: Recording, expected: int) -> BadTrace:
    return BadTrace(
        f"{recording.path}: its {pluralize(count, 'collective')} are not the {expected} of "
        f"{other.path} in the same order; give traces of the same steps, of ranks that take part "
        "in every collective"
    )


def _are_numbered(lists: list[list[_Collective]]) -> bool:
    return all(collective.sequence >= 0 for some in lists for collective in some)


def _require_same_steps(recordings: Sequence[Recording]) -> None:
    """Raise :class:`~nostall.core.errors.BadTrace` if the ranks recorded steps of other numbers.

    A trace may lack steps of another one, which the order of the collectives then shows.
    """
    first = recordings[0]
    for other in recordings[1:]:
        if other.step_numbers - first.step_numbers and first.step_numbers - other.step_numbers:
            raise BadTrace(
                f"{first.path} has the steps {_numbers(first)} and {other.path} the steps "
                f"{_numbers(other)}, and their collectives have no numbers; give traces of the "
                "same steps"
            )


def _numbers(recording: Recording) -> str:
    return f"{min(recording.step_numbers)} to {max(recording.step_numbers)}"


def _match_group(lists: list[list[_Collective]]) -> list[tuple[_Collective, ...]]:
    """The collectives that all ranks of a process group have."""
    if _are_numbered(lists):
        by_sequence = [_numbered(some) for some in lists]
        common = [key for key in by_sequence[0] if all(key in rank for rank in by_sequence)]
        return [tuple(rank[key] for rank in by_sequence) for key in common]
    names = [[collective.name for collective in some] for some in lists]
    if all(some == names[0] for some in names):
        return list(zip(*lists, strict=True))
    rows: list[tuple[_Collective, ...]] = [(collective,) for collective in lists[0]]
    for others in lists[1:]:
        pairs = _align([row[0].key for row in rows], [collective.key for collective in others])
        rows = [(*rows[i], others[j]) for i, j in pairs]
    return rows


def _numbered(collectives: list[_Collective]) -> dict[tuple[int, str, int], _Collective]:
    """The kernels by sequence number, name and position among those of both.

    One collective can have several kernels, as an exchange among many ranks has.
    """
    count: Counter[tuple[int, str]] = Counter()
    numbered = {}
    for collective in collectives:
        key = collective.sequence, collective.name
        numbered[*key, count[key]] = collective
        count[key] += 1
    return numbered


def _align(
    first: list[tuple[str, float]], second: list[tuple[str, float]]
) -> list[tuple[int, int]]:
    """Pairs of positions with equal keys, in order; few keys may be missing on either side."""
    pairs: list[tuple[int, int]] = []
    i = j = 0
    while i < len(first) and j < len(second):
        if first[i] == second[j]:
            pairs.append((i, j))
            i, j = i + 1, j + 1
            continue
        skip = next(
            (
                (a, total - a)
                for total in range(1, _LOOKAHEAD)
                for a in range(total + 1)
                if first[i + a : i + a + 1] == second[j + total - a : j + total - a + 1] != []
            ),
            None,
        )
        if skip is None:
            i, j = i + 1, j + 1
        else:
            i, j = i + skip[0], j + skip[1]
    return pairs


def _collectives_by_group(recording: Recording) -> dict[str, list[_Collective]]:
    """The communication kernels of a trace by process group (empty: unknown), by start."""
    activities = recording.activities
    groups: dict[str, list[_Collective]] = {}
    for i in _communication_rows(recording):
        group = recording.groups[activities.group[i]] if activities.group[i] >= 0 else ""
        groups.setdefault(group, []).append(
            _Collective(
                name=recording.names[activities.name[i]],
                message_bytes=float(activities.message_bytes[i]),
                sequence=int(activities.sequence[i]),
                seconds=float(activities.end[i] - activities.start[i]),
            )
        )
    return groups


def _communication_rows(recording: Recording) -> np.ndarray:
    activities = recording.activities
    is_communication = work_kinds(activities, recording.names) == WorkKind.COMMUNICATION
    return np.flatnonzero(is_communication & (activities.type == ActivityType.KERNEL))
