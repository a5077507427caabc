"""Compare each kernel with Inductor's code for the same operators, to drop slower kernels.

The comparison of the whole graph measures what kernels gain in their context; this one finds out
which of them would spoil that.  It runs on the user's thread, after plan tuning.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from msgspec import structs
from torch import Tensor
from torch.fx import GraphModule

from nostall.attach.torch_compile.graph_copies import fake_inputs
from nostall.attach.torch_compile.graph_key import graph_key
from nostall.attach.torch_compile.measure.baselines import (
    InductorBaseline,
    copy_graph,
    inductor_baselines,
)
from nostall.attach.torch_compile.options import Options
from nostall.attach.torch_compile.rewrite.compilers import GraphCompiler
from nostall.attach.torch_compile.rewrite.kernel_selection import KernelFilter, RewriteResult
from nostall.attach.torch_compile.rewrite.list_kernels import has_list_calls
from nostall.attach.torch_compile.rewrite.matching import match_kernels
from nostall.attach.torch_compile.runtime.custom_op import load_op
from nostall.attach.torch_compile.store.kernel_store import KernelStore
from nostall.attach.torch_compile.store.records import KernelComparisonRecord
from nostall.attach.warning import warn_once
from nostall.core.errors import one_line
from nostall.gpu.clock import Clock, Run, Samples
from nostall.gpu.synthetic_inputs import synthetic_inputs

MAX_COMPARISON_S = 0.1
"""Longest measurement of one comparison in seconds, without compiling the baseline."""


class AllKernelsSlower(Exception):
    """Every kernel was measured slower than Inductor's code for the same operators."""

    def __init__(self, message: str, kernels: frozenset[str] = frozenset()) -> None:
        """``kernels``: keys of the matches of all kernels."""
        super().__init__(message)
        self.kernels = kernels


@dataclass
class Comparisons:
    """What kernels of one Dynamo graph are compared with: parts of Inductor's graphs of it."""

    # None disables the comparisons.
    clock: Clock | None
    options: Options
    # The user's changes of Inductor's configuration.
    patches: dict[str, Any]
    # Inductor's graphs, forward and backward.
    graphs: list[GraphModule] = field(default_factory=list)

    def key(self, title: str, module: GraphModule, kernels: str) -> str:
        """Key of the comparison of some kernels with Inductor's code for ``module``."""
        graph = graph_key(module, fake_placeholders(module), self.options, self.patches)
        return hashlib.sha256(f"{title}{graph} {kernels}".encode()).hexdigest()


def with_samples(record: KernelComparisonRecord, samples: Samples) -> KernelComparisonRecord:
    """The record with the samples of Inductor's code, the kernels, and Inductor's code again."""
    first, second, null = map(tuple, samples)
    return structs.replace(record, inductor=first, stitched=second, null=null)


@dataclass
class KernelComparisons(Comparisons):
    """Comparisons of all stitched kernels."""

    # Whether a graph calls operators of lists.  The comparison of the whole graph decides on their
    # kernels, so it is made even if all other kernels are slower.
    has_lists: bool = False
    # The measurements, by the keys of the matches that were measured together.
    records: dict[frozenset[str], KernelComparisonRecord] = field(default_factory=dict)

    def add(self, module: GraphModule) -> None:
        """Keep a copy of a graph that Inductor is about to compile."""
        if self.clock is not None and self.options.keep == "faster":
            self.graphs.append(copy_graph(module))
            self.has_lists |= has_list_calls(module)

    def kept_in_inductor(self, compiler: GraphCompiler, limit: float) -> frozenset[str]:
        """Keys of the kernel matches that stay with Inductor, because they are not faster.

        Each comparison is measured once and stored.  Kernels that move the most bytes come first.
        Kernels that are not compared within ``limit`` seconds, or whose comparison fails, are
        fused; the comparison of the whole graph still decides.  If no kernel is faster, only slower
        ones stay with Inductor, unless there are kernels over lists.

        Raises :class:`AllKernelsSlower`.
        """
        if self.clock is None or not self.graphs:
            return frozenset()
        try:
            with isolated_state(self.graphs[0]):
                return self._kept_in_inductor(compiler, self.clock, limit)
        except AllKernelsSlower:
            raise
        except Exception as error:  # optional: the whole graph is compared in any case
            warn_once(f"kernels were not compared on their own: {type(error).__name__}: {error}")
            return frozenset()

    def _kept_in_inductor(
        self, compiler: GraphCompiler, clock: Clock, limit: float
    ) -> frozenset[str]:
        store, end = KernelStore(), time.perf_counter() + limit
        baselines = self.baselines(store)
        seconds = min(MAX_COMPARISON_S, self.options.seconds / max(1, len(baselines)))
        not_faster, slower = set[str](), set[str]()
        for key, baseline in baselines.items():
            record = store.load(KernelComparisonRecord, key)
            if record is None and time.perf_counter() < end:
                record = _compare(key, baseline, compiler, clock, seconds)
                store.save(key, record)
            keys = frozenset(match.key for match in baseline.matches)
            if record is not None and record.failure is None:
                self.records[keys] = record
            not_faster |= keys if record is not None and record.is_not_faster else frozenset()
            slower |= keys if record is not None and record.is_slower else frozenset()
        kernels = {match.key for baseline in baselines.values() for match in baseline.matches}
        if self.has_lists:
            return frozenset(not_faster)
        if kernels and slower == kernels:
            raise AllKernelsSlower(
                "every kernel is slower than what Inductor makes of the same operators",
                frozenset(kernels),
            )
        return frozenset(slower if not_faster == kernels else not_faster)

    def baselines(self, store: KernelStore) -> dict[str, InductorBaseline]:
        """The distinct baselines by key, sorted by the bytes that all equal ones move together."""
        kernel_filter = KernelFilter(self.options.fuse)
        baselines: dict[str, InductorBaseline] = {}
        bytes_moved: Counter[str] = Counter()
        for module in self.graphs:
            matched = match_kernels(module, store, kernel_filter, RewriteResult())
            for baseline in [] if matched is None else inductor_baselines(module, *matched):
                kernels = " ".join(match.kernel for match in baseline.matches)
                key = self.key("", baseline.module, kernels)
                baselines.setdefault(key, baseline)
                bytes_moved[key] += baseline.bytes_moved
        return {key: baselines[key] for key, _ in bytes_moved.most_common()}


def _compare(
    key: str, baseline: InductorBaseline, compiler: GraphCompiler, clock: Clock, seconds: float
) -> KernelComparisonRecord:
    """Measure kernels and their baseline; a failure is part of the record."""
    kernels = tuple(match.kernel for match in baseline.matches)
    record = KernelComparisonRecord(kernels=kernels, kind=clock.kind, clock=clock.name)
    try:
        inductor, stitched = compiled_run(baseline.module, compiler), _kernel_run(baseline)
        samples = clock.samples(key, [inductor, stitched, inductor], seconds)
    except Exception as error:  # out of memory, a compiler error: the kernels are fused untried
        failure = one_line(error)
        warn_once(f"a kernel is fused without a comparison of its own: {failure}")
        return structs.replace(record, failure=failure)
    return with_samples(record, samples)


def compiled_run(module: GraphModule, compiler: GraphCompiler) -> Run:
    """A graph as Inductor compiles it, on synthetic inputs."""
    fakes = fake_placeholders(module)
    inputs = synthetic_inputs([(x.shape, x.stride(), x.dtype) for x in fakes], graph_device(module))
    with fake_inputs(inputs) as traced:
        compiled = compiler.compile_baseline(module, traced)
    return lambda: compiled(*inputs)


def _kernel_run(baseline: InductorBaseline) -> Run:
    calls: list[tuple[Callable[..., Any], list[Tensor]]] = []
    device = graph_device(baseline.module)
    for match in baseline.matches:
        op = load_op(match.kernel)
        calls.append((op.unchecked_call, synthetic_inputs(op.launcher(None).inputs, device)))

    def run() -> None:
        for call, inputs in calls:
            call(inputs)

    return run


@contextlib.contextmanager
def isolated_state(module: GraphModule) -> Iterator[None]:
    """The graph's device without gradients and autocast; restores random generators at the end."""
    device = graph_device(module)
    on_gpu = device.type == "cuda"
    with (
        torch.cuda.device(device) if on_gpu else contextlib.nullcontext(),
        torch.random.fork_rng([device.index or 0] if on_gpu else []),
        torch.no_grad(),
        torch.autocast(device.type, enabled=False),
    ):
        yield


def fake_placeholders(module: GraphModule) -> list[Any]:
    """The fake values of a graph's inputs."""
    return [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]


def graph_device(module: GraphModule) -> torch.device:
    """The device of a graph's first input tensor."""
    tensors = (x for x in fake_placeholders(module) if isinstance(x, Tensor))
    device: torch.device = next(tensors).device
    return device
