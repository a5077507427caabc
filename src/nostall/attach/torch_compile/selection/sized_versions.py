"""Which version of a graph with dynamic sizes runs at which sizes.

Sizes belong to a bucket if each of them lies within the same power of 4.  The first choice holds
for the bucket of the call that it was measured at.  Another bucket runs the version of the nearest
one, is measured once at its second call, and then has a choice of its own: a size that occurs once,
as the last batch of an epoch may, costs nothing.  Both versions are compiled for all sizes, so no
measurement compiles for a size.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from nostall.attach.torch_compile.measure.call import AccuracyError, Call, run_and_find_mutations
from nostall.attach.torch_compile.report import GraphReport
from nostall.attach.torch_compile.rewrite.compilers import CompiledGraph
from nostall.attach.torch_compile.store.kernel_store import KernelStore
from nostall.attach.torch_compile.store.rank_sync import Selection
from nostall.attach.torch_compile.store.records import (
    ComparisonRecord,
    SelectionRecord,
    Version,
)
from nostall.attach.torch_compile.training_steps import STEPS
from nostall.attach.warning import warn_once
from nostall.core.errors import one_line

_log = logging.getLogger("nostall")

Bucket = tuple[int, ...]
Compared = tuple[ComparisonRecord, tuple[str, ...]]
"""A comparison, and the kernels that the candidate called."""
MOST_BUCKETS = 8
"""Buckets with a choice of their own; others run the version of the nearest one."""


def sized_key(graph: str, bucket: Bucket) -> str:
    """The key of the choice for a bucket, from the key of the graph."""
    return hashlib.sha256(f"{graph} {bucket}".encode()).hexdigest()


def load_choice(store: KernelStore, graph: str, bucket: Bucket) -> SelectionRecord | None:
    """The stored choice for a bucket, or for all sizes; None if there is none."""
    record = store.load(SelectionRecord, sized_key(graph, bucket))
    if record is None:
        record = store.load(SelectionRecord, graph)
        if record is not None and record.comparison is not None:
            return None  # a job of several ranks has measured it at one size
    return record


class SizePlaces:
    """Where the arguments of a graph show its dynamic sizes."""

    def __init__(self, inputs: Sequence[Any]) -> None:
        """``inputs``: the arguments as Dynamo traced them."""
        shown: dict[str, tuple[int, int | None]] = {}
        hints: dict[str, int] = {}

        def note(value: Any, index: int, axis: int | None) -> None:
            if isinstance(value, torch.SymInt) and (name := str(value.node.expr)).isidentifier():
                shown.setdefault(name, (index, axis))
                hints.setdefault(name, int(value.node.hint or 0))

        for index, value in enumerate(inputs):
            note(value, index, None)
            for axis, size in enumerate(value.shape if isinstance(value, Tensor) else ()):
                note(size, index, axis)
        self._places = tuple(shown.values())
        self.traced = tuple(size.bit_length() // 2 for size in hints.values())
        """The bucket of the sizes that the graph was traced at."""

    def bucket(self, args: Sequence[Any]) -> Bucket:
        """The bucket of a call's sizes."""
        return tuple(
            (args[index] if axis is None else args[index].shape[axis]).bit_length() // 2
            for index, axis in self._places
        )


@dataclass(frozen=True)
class SizedContext:
    """What choices for buckets are made with."""

    graph: str
    """Key of the graph, which holds for all sizes."""
    store: KernelStore
    places: SizePlaces
    compile: Callable[[Selection], CompiledGraph]
    """Compiles a version for all sizes."""
    compare: Callable[[CompiledGraph, CompiledGraph, Call], Compared]
    """Compares Inductor's version and the candidate.  Raises :class:`AccuracyError`."""
    about: dict[str, str]
    report: GraphReport


class SizedVersions:
    """The versions of a graph; a call runs the one of the bucket that its sizes belong to."""

    def __init__(
        self,
        context: SizedContext,
        candidate: Selection,
        versions: Mapping[Version, CompiledGraph],
        bucket: Bucket,
        version: Version,
    ) -> None:
        """``candidate``: how the stitched version is compiled.  ``versions``: those that are
        compiled.  ``version``: the choice for ``bucket``."""
        self._context, self._versions = context, dict(versions)
        self._selections = {
            "stitched": replace(candidate, version="stitched"),
            "inductor": Selection("inductor"),
        }
        self._runs: dict[Bucket, CompiledGraph] = {bucket: self._versions[version]}
        # Arguments that the first call of a bucket mutated, by their index.
        self._mutated: dict[Bucket, frozenset[int]] = {}
        self._lock = threading.Lock()

    def __call__(self, *args: Any) -> Any:
        bucket = self._context.places.bucket(args)
        run = self._runs.get(bucket)
        return run(*args) if run is not None else self._call_undecided(bucket, args)

    def _call_undecided(self, bucket: Bucket, args: tuple[Any, ...]) -> Any:
        """A call of a bucket without a choice."""
        nearest = self._nearest(bucket)
        if not (_is_outside_of_steps() and self._lock.acquire(blocking=False)):
            return nearest(*args)
        try:
            if len(self._runs) >= MOST_BUCKETS:
                self._runs[bucket] = nearest
            elif bucket in self._mutated:
                self._decide(bucket, Call.record(args, self._mutated.pop(bucket)))
            elif not self._load(bucket):
                result, self._mutated[bucket] = run_and_find_mutations(args, lambda: nearest(*args))
                return result
        finally:
            self._lock.release()
        return self._runs[bucket](*args)

    def _nearest(self, bucket: Bucket) -> CompiledGraph:
        def distance(other: Bucket) -> int:
            return sum(abs(a - b) for a, b in zip(bucket, other, strict=True))

        return self._runs[min([*self._runs], key=distance)]  # another thread may add a bucket

    def _load(self, bucket: Bucket) -> bool:
        """Take the choice of an earlier run; False if there is none that can run."""
        try:
            record = load_choice(self._context.store, self._context.graph, bucket)
            if record is None:
                return False
            selection, version = Selection.stored(record), record.version
            # Another candidate was neither checked nor measured.
            if version not in self._versions:
                self._selections[version] = selection
            elif version == "stitched" and selection != self._selections[version]:
                return False
            self._runs[bucket] = self._version(version)
        except Exception as error:  # must not end the user's process: it is measured again
            _log.debug("nostall: a choice was not loaded", exc_info=error)
            return False
        return True

    def _decide(self, bucket: Bucket, call: Call) -> None:
        """Measure both versions at a call, and choose one for its bucket."""
        context = self._context
        from nostall.attach.torch_compile.measure.graph_comparison import (
            CHOSEN,
            VERDICTS,
            judge,
        )

        try:
            versions: tuple[Version, Version] = ("inductor", "stitched")
            baseline, candidate = map(self._version, versions)
        except Exception as error:  # as a guard that Dynamo does not check
            self._keep(bucket, self._nearest(bucket), f"not compared: {one_line(error)}", call)
            return
        try:
            record, kernels = context.compare(baseline, candidate, call)
        except AccuracyError as error:
            warn_once(f"the stitched version is not used at {call.sizes}: {error}")
            self._keep(bucket, baseline, f"inductor, {one_line(error)}", call)
            return
        except Exception as error:  # out of memory: Inductor's version needs no comparison
            self._keep(bucket, baseline, f"inductor, not compared: {one_line(error)}", call)
            return
        verdict = judge(record)
        version: Version = "stitched" if verdict in CHOSEN else "inductor"
        self._keep(bucket, self._versions[version], f"{version}, {record.kind} {record}", call)
        chosen = self._selections[version]
        try:
            stored = chosen.record(VERDICTS[verdict], kernels, record, context.about)
            context.store.save(sized_key(context.graph, bucket), stored)
        except Exception as error:  # the choice is valid for this process all the same
            warn_once(f"a selection is not stored: {error}")

    def _keep(self, bucket: Bucket, run: CompiledGraph, outcome: str, call: Call) -> None:
        self._runs[bucket] = run
        self._context.report.at_sizes.append(f"{call.sizes}: {outcome}")

    def _version(self, version: Version) -> CompiledGraph:
        if version not in self._versions:
            self._versions[version] = self._context.compile(self._selections[version])
        return self._versions[version]


def _is_outside_of_steps() -> bool:
    """Whether nothing is in progress that a measurement would disturb, as far as that is known."""
    in_backward = torch._C._current_graph_task_id() != -1
    return STEPS.between_steps and not in_backward
