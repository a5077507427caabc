"""In-memory form of a profiler trace: columns of GPU activities and runtime calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import numpy as np

from nostall.workload.traces.operator_cost import OperatorCost

TIME_UNIT = 1e-6
"""Seconds per unit of time in a trace; ``displayTimeUnit`` only affects trace viewers."""

WHOLE_GRAPH = "CUDA graph"
"""Start of the name of an activity that is a whole graph, whose kernels are not recorded."""


class ActivityType(IntEnum):
    """Types of GPU activities."""

    KERNEL = 0
    MEMCPY = 1
    MEMSET = 2


@dataclass(frozen=True)
class Activities:
    """GPU activities in columns of shape [activities], sorted by start."""

    start: np.ndarray
    """Seconds."""
    end: np.ndarray
    """Seconds."""
    name: np.ndarray
    """Index into ``Recording.names``."""
    type: np.ndarray
    """:class:`ActivityType`."""
    stream: np.ndarray
    device: np.ndarray
    correlation: np.ndarray
    """Correlation id of the runtime call that launched the activity; -1: unknown."""
    copied_bytes: np.ndarray
    """Bytes of a copy; 0: unknown."""
    message_bytes: np.ndarray
    """Bytes that this rank contributes to a collective; 0: unknown."""
    operator: np.ndarray
    """Id of the PyTorch operator that launched the activity; -1: unknown."""
    group: np.ndarray
    """Index into ``Recording.groups`` of the process group of a collective; -1: unknown."""
    sequence: np.ndarray
    """Number of a collective in its process group; -1: unknown."""

    def __len__(self) -> int:
        return len(self.start)

    def select(self, rows: np.ndarray) -> Activities:
        """The rows of a boolean mask or of an index array, in the order of that array."""
        return Activities(**{name: getattr(self, name)[rows] for name in self.__dataclass_fields__})


@dataclass(frozen=True)
class RuntimeCalls:
    """Calls of the GPU runtime on the host in columns of shape [calls], sorted by start."""

    start: np.ndarray
    """Seconds."""
    end: np.ndarray
    """Seconds."""
    name: np.ndarray
    """Index into ``Recording.host_names``."""
    thread: np.ndarray
    """Index into ``Recording.thread_process``."""
    correlation: np.ndarray
    """Correlation id of the activity that the call launches; -1: none."""
    external: np.ndarray
    """External id of the call; -1: none.  Profilers of ROCm link activities to calls by it."""
    synchronizes: np.ndarray
    """Whether the call waits for the GPU."""


@dataclass(frozen=True)
class HostCalls:
    """Operators and annotations on the host in columns of shape [calls], sorted by start.

    Of two calls with the same start, the longer one is first.
    """

    start: np.ndarray
    """Seconds."""
    end: np.ndarray
    """Seconds."""
    name: np.ndarray
    """Index into ``Recording.host_names``."""
    thread: np.ndarray
    """Index into ``Recording.thread_process``."""
    is_operator: np.ndarray
    """Whether the call is an operator; the others are annotations of the user."""


@dataclass(frozen=True)
class Recording:
    """One trace file.  Times are seconds since its first GPU activity."""

    path: Path
    activities: Activities
    calls: RuntimeCalls
    names: tuple[str, ...]
    """Names of the activities."""
    steps: np.ndarray
    """Start and end of each ProfilerStep, shape [steps, 2]."""
    loading: np.ndarray
    """Start and end of each wait of the host for its data loader, shape [waits, 2]."""
    step_thread: np.ndarray
    """Thread that marks each step."""
    step_numbers: frozenset[int]
    """Numbers at the end of the names of the steps."""
    loading_thread: np.ndarray
    """Thread that waits for the data loader."""
    host: HostCalls
    host_names: tuple[str, ...]
    """Names of the runtime calls, operators and annotations."""
    thread_process: np.ndarray
    """Process of each thread of the host, shape [threads]."""
    operator_costs: Mapping[int, OperatorCost]
    """FLOP and bytes by operator id, if the shapes of the operator were recorded."""
    origin: float
    """Start of the first GPU activity on the clock of the trace, in seconds."""
    rank: int | None
    world_size: int | None
    gpu: str
    """Name of the GPU."""
    schema: int | None
    """Schema version of the file."""
    events: int
    """Number of events that were read."""
    remarks: tuple[str, ...] = ()
    """Damage of the file and skipped events, a sentence each; empty: the file is sound."""
    groups: tuple[str, ...] = ()
    """Names and ranks of the process groups of the collectives."""
