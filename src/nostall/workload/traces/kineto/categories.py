"""Categories of the events of Kineto traces, and what the reader does with each."""

from __future__ import annotations

import re
from enum import IntEnum

from nostall.workload.traces.recording import ActivityType


class EventRole(IntEnum):
    """Use of an event in the analysis."""

    KERNEL = ActivityType.KERNEL
    MEMCPY = ActivityType.MEMCPY
    MEMSET = ActivityType.MEMSET
    CALL = 3
    """Call of the GPU runtime on the host."""
    OPERATOR = 4
    ANNOTATION = 5
    FRAME = 6
    """Frame of Python on the host."""
    IGNORED = 7


# Old and new versions of Kineto spell categories differently.  ROCm writes CUDA's categories, with
# names such as hipLaunchKernel; the lists are those of Kineto's ActivityType.
_CATEGORIES = {
    EventRole.KERNEL: ("kernel", "Kernel"),
    EventRole.MEMCPY: ("gpu_memcpy", "Memcpy"),
    EventRole.MEMSET: ("gpu_memset", "Memset"),
    EventRole.CALL: (
        *("cuda_runtime", "cuda_driver", "Runtime", "hip_runtime", "hip_driver"),
        *("xpu_runtime", "xpu_driver", "mtia_runtime", "glow_runtime"),
        *("privateuse1_runtime", "privateuse1_driver"),
    ),
    EventRole.OPERATOR: ("cpu_op", "Operator"),
    EventRole.ANNOTATION: ("user_annotation",),
    EventRole.FRAME: ("python_function",),
    EventRole.IGNORED: (
        *("Trace", "overhead", "gpu_user_annotation", "ac2g", "async_cpu_to_gpu"),
        *("fwdbwd", "forward_backward", "external_correlation", "cpu_instant_event", "cuda_sync"),
        *("cuda_event", "cuda_profiler_range", "mtia_insight", "mtia_counters", "collective_comm"),
        *("python", "PyTorch Profiler", "profile_event", "async"),
    ),
}
ROLES: dict[str | None, EventRole] = {
    category: role for role, categories in _CATEGORIES.items() for category in categories
}
"""Role of each known category."""

PHASES = frozenset("BEXiICbneSTpFstfPNODMVvRc(),=")
"""Phases of the Trace Event Format; only complete events (X) are analysed."""

SYNCHRONISING_CALL = re.compile(
    "Synchronize|urQueueFinish|urEventWait|piQueueFinish|piEventsWait|clFinish|clWaitForEvents|"
    r"^(?:cuda|cu|hip)Memcpy(?!\w*(?:Async|Peer|DtoD|DtoA|AtoD|AtoA|ArrayToArray))"
)
"""Names of runtime calls in which the host waits for the GPU: copies that do not say async do,
except for those within one GPU and between GPUs."""

DATA_LOADER = "enumerate(DataLoader)"
"""Start of the name of PyTorch's data loader, as an annotation or as an operator."""
PROFILER_STEP = "ProfilerStep"
"""Start of the name of a recorded step."""
