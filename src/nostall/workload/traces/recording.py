"""A profiler trace as columns: what ran on the GPUs, what the host called, where steps begin."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nostall.workload.traces.amounts import Amounts

SECONDS = 1e-6
"""Trace times are microseconds, whatever ``displayTimeUnit`` says: that is for viewers only."""


@dataclass(frozen=True)
class Activities:
    """GPU activities, by start.  One row: start and end (s), name, stream, device, correlation.

    ``name`` indexes ``Recording.names``; ``kind`` is 0 kernel, 1 memcpy, 2 memset; ``size`` bytes
    copied (0 unknown); ``message`` bytes of a collective (0 unknown); ``operator`` the id of the
    operator that launched it (-1 unknown).
    """

    start: np.ndarray
    end: np.ndarray
    name: np.ndarray
    kind: np.ndarray
    stream: np.ndarray
    device: np.ndarray
    correlation: np.ndarray
    size: np.ndarray
    message: np.ndarray
    operator: np.ndarray

    def __len__(self) -> int:
        return len(self.start)

    def select(self, rows: np.ndarray) -> Activities:
        """The rows of a mask or of an index, in order."""
        return Activities(**{name: getattr(self, name)[rows] for name in self.__dataclass_fields__})


@dataclass(frozen=True)
class Calls:
    """Host calls of the GPU runtime: start and end (s), correlation, and whether each waits."""

    start: np.ndarray
    end: np.ndarray
    correlation: np.ndarray
    waits: np.ndarray


@dataclass(frozen=True)
class Recording:
    """One trace file; times count from its first GPU activity, which began at ``origin``.

    ``steps``: (start, end) in seconds of each ProfilerStep; ``loading``: of the host's waiting for
    its data loader.  ``amounts``: FLOP and bytes of an operator id, where its shapes were
    recorded.  ``events`` were read, ``left_out`` of them are unusable; ``damage`` says why reading
    stopped early.
    """

    path: Path
    activities: Activities
    calls: Calls
    names: tuple[str, ...]
    steps: np.ndarray
    loading: np.ndarray
    amounts: Mapping[int, Amounts]
    origin: float
    rank: int | None
    world_size: int | None
    gpu: str
    schema: int | None
    events: int
    left_out: int
    damage: str | None
