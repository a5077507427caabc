"""Roles of trace events: what the reader does with each.

Kineto writes a category (``cat``) in each event.  JAX, TensorFlow and ROCm's profilers write none;
the names of a process and of a thread say what its events are.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import IntEnum

from nostall.workload.traces.kineto.schema import Event, EventArguments, Scalar
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

_GPU = re.compile(r"\bGPU[\s:#]*(\d+)", re.IGNORECASE)
_HOST = re.compile(r"\bCPU\b|/host:|\bhost\b|python|\bAPI\b", re.IGNORECASE)
_STREAM = re.compile(r"(?:stream|queue)\s*[#:]?\s*(\d+)?", re.IGNORECASE)
_COPY = re.compile(r"^(?:gpu[_ ]?)?mem_?cpy|^copy(?:host|device)|^hcMemcpy", re.IGNORECASE)
_FILL = re.compile(r"^(?:gpu[_ ]?)?mem_?set|^fillbuffer", re.IGNORECASE)
_CALL = re.compile(r"^(?:cuda|cu|hip|ur|ze|pi)[A-Z]\w*")
_PYTHON = ("$", "<built-in")
"""Starts of the names of Python frames."""


@dataclass(slots=True)
class Lanes:
    """Names of the processes and threads of a trace."""

    processes: dict[Scalar, str] = field(default_factory=dict)
    threads: dict[tuple[Scalar, Scalar], str] = field(default_factory=dict)

    def name(self, event: Event) -> None:
        """Learn a name from a metadata event (phase M)."""
        args = event.args
        if args is None:
            return
        text = args.name if args.name is not None else args.labels
        if not isinstance(text, str):
            return
        if event.name == "thread_name":
            self.threads[event.pid, event.tid] = text
        elif event.name in ("process_name", "process_labels"):
            known = self.processes.get(event.pid)
            self.processes[event.pid] = f"{known} {text}" if known else text

    def label(self, event: Event) -> str:
        """The names of the lane of an event, for a remark."""
        thread = self.threads.get((event.pid, event.tid), "")
        return f"{self.processes.get(event.pid, 'no name')}/{thread}".rstrip("/")

    def classify(self, event: Event) -> EventRole | None:
        """The role of an event without a category; None: the names of its lane do not say it.

        The stream, the device and the correlation id of GPU work are put into its arguments, and a
        step gets the name of a step.
        """
        process = self.processes.get(event.pid, "")
        device = self.device(event.pid)
        if device is not None:
            return self._gpu_role(event, device)
        return _host_role(event) if _HOST.search(process) else None

    def device(self, pid: Scalar) -> int | None:
        """The number of the GPU that a process stands for, by its names; None: they have none."""
        gpu = _GPU.search(self.processes.get(pid, ""))
        return int(gpu[1]) if gpu else None

    def _gpu_role(self, event: Event, device: int) -> EventRole:
        thread = self.threads.get((event.pid, event.tid), "")
        stream = _STREAM.search(thread)
        if thread and stream is None:
            # Such lanes repeat the time of the streams: modules, operators, name scopes, steps.
            return EventRole.IGNORED
        args = event.args = event.args or EventArguments()
        args.device = device
        args.stream = int(stream[1]) if stream and stream[1] else event.tid
        if args.correlation is None:
            args.correlation = args.correlation_id
        name = str(event.name)
        if _COPY.search(name):
            return EventRole.MEMCPY
        return EventRole.MEMSET if _FILL.search(name) else EventRole.KERNEL


def _host_role(event: Event) -> EventRole:
    name, args = str(event.name), event.args
    if name.startswith(_PYTHON):
        return EventRole.FRAME
    if args is not None and args.step_num is not None:
        event.name = f"{PROFILER_STEP}#{args.step_num}"
        return EventRole.ANNOTATION
    if name.startswith((PROFILER_STEP, DATA_LOADER)):
        return EventRole.ANNOTATION
    if _CALL.match(name):
        if args is not None and args.correlation is None:
            args.correlation = args.correlation_id
        return EventRole.CALL
    return EventRole.OPERATOR
