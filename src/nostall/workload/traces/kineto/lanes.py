"""Roles of the events of Chrome traces without categories, by the names of their lanes.

JAX, TensorFlow and ROCm's profilers write no ``cat``; the names of a process and of a thread say
what its events are.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from nostall.workload.traces.kineto.categories import DATA_LOADER, PROFILER_STEP, EventRole
from nostall.workload.traces.kineto.schema import Event, EventArguments, Scalar

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
        process = self.processes.get(event.pid)
        if process is None:
            return None
        gpu = _GPU.search(process)
        if gpu is not None:
            return self._gpu_role(event, int(gpu[1]))
        return _host_role(event) if _HOST.search(process) else None

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
