"""Measure which matrix products are faster as one kernel with the elementwise operators around.

A product is measured in a graph of its own: the product, the operators of the kernel, and their
producers and consumers up to the next product, which Inductor would fuse with them. One version has
the kernel, the other cuBLAS and Inductor's kernels. A product is replaced only if its version is
measured faster. Of several such kernels of one product the one that saves the most time is used.
"""

from __future__ import annotations

import contextlib
import math
import operator
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

from msgspec import structs
from torch import Tensor
from torch.fx import GraphModule
from torch.fx import Node as FxNode

from nostall.attach.torch_compile.measure.baselines import copy_graph, extract_calls
from nostall.attach.torch_compile.measure.kernel_accuracy import inaccurate_kernels
from nostall.attach.torch_compile.measure.kernel_comparison import (
    Comparisons,
    compiled_run,
    graph_device,
    isolated_state,
    with_samples,
)
from nostall.attach.torch_compile.measure.plan_tuning import product_kernels
from nostall.attach.torch_compile.rewrite.compilers import GraphCompiler
from nostall.attach.torch_compile.rewrite.direct_call import use_direct_calls
from nostall.attach.torch_compile.rewrite.kernel_selection import (
    KernelFilter,
    RewriteResult,
    match_key,
)
from nostall.attach.torch_compile.rewrite.matching import operator_owners
from nostall.attach.torch_compile.rewrite.products import product_record, products_of
from nostall.attach.torch_compile.rewrite.rewrite import insert_kernels, insert_products
from nostall.attach.torch_compile.runtime.custom_op import STITCHED_OP, load_op
from nostall.attach.torch_compile.store.kernel_store import KernelStore
from nostall.attach.torch_compile.store.records import KernelComparisonRecord, RegionRecord
from nostall.attach.torch_compile.store.regions import region_key
from nostall.attach.warning import warn_once
from nostall.core.errors import one_line
from nostall.fusion.capture import CapturedGraph
from nostall.fusion.graph.graph import Graph
from nostall.fusion.graph.operations import COMPUTE
from nostall.fusion.hardware import hardware_of
from nostall.fusion.products.find import FoundProduct, prologue_sources
from nostall.fusion.products.rules import product_call
from nostall.gpu.clock import Clock, Run
from nostall.gpu.synthetic_inputs import synthetic_inputs

LEAST_GAIN = 1.015
"""Ratio that the lower end of the interval must reach: two captures of one product differ by up to
1.4 % on an H200 (benchmarks/serving/results/gemm_h200.json.gz)."""
SCREEN_SECONDS = 0.1
"""Measurement of all configurations of one product together, in seconds."""
COMPARISON_SECONDS = 0.15
"""Measurement of the best configuration against cuBLAS and Inductor, in seconds."""
MAX_NEIGHBOURS = 64
"""Operators that read a kernel's results and are measured with it, at most."""
SUMS = frozenset({"add", "sub", "mul", "div", "neg", "reciprocal", "cast", "copy"})
"""Operators of a product's kernel that replace no stitched kernel: of 30 such kernels in 24 steps
of whole models (benchmarks/torch_compile/results/user_models) 29 were slower than cuBLAS."""
MIN_DEPTH = 64
"""Kernels of sums are compiled for products up to this depth, as those of adapters: the one of 30
that was faster has such a depth."""
COPIES = frozenset({"cast", "copy"})
"""Operators in front of a product that a kernel computes again for each block of columns; with
others all of 14 such kernels were slower, 0.21 to 0.68 times as fast."""
MAX_BLOCK_COLUMNS = 256
"""Columns of the widest block."""
SURPASSED = "; another kernel of this product saves more and is used"


@dataclass(frozen=True)
class ProductCase:
    """A product of a graph, and the graph of its own in which it is measured."""

    found: FoundProduct
    module: GraphModule


@dataclass(frozen=True)
class Occurrence:
    """A product where it occurs in a graph; equal layers have equal products."""

    found: FoundProduct
    captured: CapturedGraph
    module: GraphModule
    graph: int
    """Number of the graph."""
    reader_kernels: frozenset[str] = frozenset()
    """Keys of the matches of stitched kernels that compute readers of the product."""

    @property
    def places(self) -> frozenset[tuple[int, str]]:
        """The calls of the products: number of the graph, name of the call."""
        return frozenset((self.graph, node.name) for node in self.found.products)

    @property
    def case(self) -> ProductCase:
        return ProductCase(self.found, product_module(self.module, self.captured, self.found))


def occurrences(graphs: Sequence[GraphModule], kernel_filter: KernelFilter) -> Iterator[Occurrence]:
    """All products of some graphs, after the kernels that are inserted first."""
    for number, graph in enumerate(graphs):
        module = copy_graph(graph)
        if not kernel_filter.products_only:
            insert_kernels(module, KernelStore(), kernel_filter, RewriteResult())
        captured_and_products = products_of(module)
        if captured_and_products is not None:
            captured, products = captured_and_products
            for found in products.found:
                yield Occurrence(found, captured, module, number)


def is_promising(found: FoundProduct, *, replaces: bool) -> bool:
    """Whether a product's kernel is worth a compilation, by what kernels of its kind gained.

    ``replaces``: in the place of a stitched kernel that computes the product's readers.
    """
    kernel = found.kernel
    in_front = {kernel.graph[index].op for index in kernel.prologue[:-1]}
    if not in_front <= COPIES and kernel.shape.columns > MAX_BLOCK_COLUMNS:
        return False
    only_sums = {kernel.graph[index].op for index in kernel.epilogue} <= SUMS
    return not (replaces and only_sums and kernel.shape.depth > MIN_DEPTH)


def by_bytes(found: Iterable[Occurrence]) -> list[list[Occurrence]]:
    """Occurrences of equal kernels together; those that could save the most bytes come first.

    Kernels with a prologue come last.
    """
    groups: dict[str, list[Occurrence]] = {}
    saved: Counter[str] = Counter()
    for each in found:
        key = each.found.kernel.graph.key
        groups.setdefault(key, []).append(each)
        saved[key] += each.found.bytes_saved
    ordered = [groups[key] for key, _ in saved.most_common()]
    return sorted(ordered, key=lambda same: bool(same[0].found.kernel.prologue))


def product_module(
    module: GraphModule, captured: CapturedGraph, found: FoundProduct
) -> GraphModule:
    """The graph of a product, the operators around it and what Inductor would fuse with those."""
    graph, owners = captured.graph, operator_owners(captured)
    operators = {*found.operators, *prologue_sources(graph, found)}
    # Calls that need the product: what needs their results is no part of Inductor's next kernels.
    dependent_calls = 0
    for index in found.anchors:
        dependent_calls |= graph.descendants[index] & graph.opaque
    waiting = list(found.captured(found.kernel.graph.outputs))
    most = len(operators) + MAX_NEIGHBOURS
    while waiting and len(operators) < most:
        for reader in graph.consumers[waiting.pop()]:
            is_next = (
                graph[reader].kind in COMPUTE and not graph.ancestors[reader] & dependent_calls
            )
            if is_next and reader not in operators:
                operators.add(reader)
                waiting.append(reader)
    calls = {owners[index] for index in operators if index in owners} | set(found.products)
    return extract_calls(module, captured, frozenset(calls))


def title(case: ProductCase) -> str:
    shape = case.found.kernel.shape
    graph = case.found.kernel.graph
    operators: Sequence[str] = list(dict.fromkeys(graph[i].op for i in case.found.kernel.epilogue))
    prologue = ", ".join(dict.fromkeys(graph[i].op for i in case.found.kernel.prologue[:-1]))
    return (
        f"{shape.rows} x {shape.columns} x {shape.depth} {shape.dtype}"
        f"{' (two products)' if shape.count == 2 else ''} with {', '.join(operators)}"
        f"{f' behind it and {prologue} in front' if prologue else ''}"
    )


@dataclass
class ProductComparisons(Comparisons):
    """Comparisons of all matrix products. Without a clock no product is replaced."""

    # The outcome for each product as text, by the key of its measurement.
    outcomes: dict[str, str] = field(default_factory=dict)
    # The measurements of chosen kernels, by the key of their graph.
    records: dict[str, KernelComparisonRecord] = field(default_factory=dict)
    # Time that measurements have taken, in seconds.
    seconds: float = 0.0
    # Graphs of products that Inductor compiles for measurements, by the key of the measurement.
    baselines: dict[str, GraphModule] = field(default_factory=dict)
    # The products after the kernels of a filter, by what they depend on.
    _found: dict[str, list[Occurrence]] = field(default_factory=dict)
    # When no further measurement may begin, as ``time.perf_counter`` counts.
    _end: float = 0.0

    @property
    def lines(self) -> list[str]:
        """One line for each product, for the report."""
        return [*self.outcomes.values()]

    @property
    def is_enabled(self) -> bool:
        return self.clock is not None and self.options.products == "measure"

    def add(self, module: GraphModule) -> None:
        """Keep a copy of a graph that Inductor is about to compile, if it has products."""
        if self.is_enabled and any(map(product_call, module.graph.nodes)):
            self.graphs.append(copy_graph(module))

    def occurrences(self, kernel_filter: KernelFilter) -> list[Occurrence]:
        """All products after the kernels that are inserted first.

        They are searched once for each filter, because steps wait for it.
        """
        inserted = "" if kernel_filter.products_only else str(kernel_filter.cache_key)
        key = f"{len(self.graphs)} {inserted}"
        if key not in self._found:
            replaces = kernel_filter.products_only
            self._found[key] = [
                each
                for each in occurrences(self.graphs, kernel_filter)
                if is_promising(each.found, replaces=replaces)
            ]
        return self._found[key]

    def product_graphs(self, kernel_filter: KernelFilter) -> list[Graph]:
        """The distinct graphs of the products' kernels."""
        groups = by_bytes(self.occurrences(kernel_filter))
        return [same[0].found.kernel.graph for same in groups]

    def add_baselines(self, kernel_filter: KernelFilter) -> None:
        """Add the graphs of products that Inductor is to compile, to compare their kernels with.

        ``kernel_filter``: the kernels that are inserted before the products are searched.
        """
        for same in by_bytes(self.occurrences(kernel_filter)):
            case = same[0].case
            self.baselines.setdefault(self._case_key(case), case.module)

    def _case_key(self, case: ProductCase) -> str:
        """The key of the measurement of a product."""
        return self.key("product ", case.module, case.found.kernel.graph.key)

    def chosen(
        self,
        compiler: GraphCompiler,
        kernel_filter: KernelFilter,
        known: Mapping[str, RegionRecord] = MappingProxyType({}),
    ) -> dict[str, RegionRecord]:
        """Kernels measured faster than cuBLAS with Inductor's kernels, by the key of their graph.

        Those that could save the most bytes come first, and kernels with a prologue last.
        ``known``: kernels that are chosen already, which are not measured again.
        """
        if not self.is_enabled or not self.graphs:
            return {}
        chosen: dict[str, RegionRecord] = {}
        with self.measuring():
            chosen |= self._chosen(compiler, kernel_filter, known)
        return chosen

    @contextlib.contextmanager
    def measuring(self) -> Iterator[None]:
        """A context for measurements; they end with the time that all contexts have together.

        Errors are logged: products stay with cuBLAS then.
        """
        began = time.perf_counter()
        self._end = began + self.options.product_seconds - self.seconds
        try:
            with isolated_state(self.graphs[0]):
                yield
        except Exception as error:  # products are optional: they stay with cuBLAS
            warn_once(f"matrix products were not measured: {one_line(error)}")
        finally:
            self.seconds += time.perf_counter() - began

    def measured(
        self, case: ProductCase, compiler: GraphCompiler, note: str = ""
    ) -> tuple[str, KernelComparisonRecord | None]:
        """The measurement of a product, inside of :meth:`measuring`, and its key.

        None if ``options.product_seconds`` are over.  ``note`` is added to the line of the report.
        """
        store, text = KernelStore(), f"{title(case)}{note}"
        key = self._case_key(case)
        record = store.load(KernelComparisonRecord, key)
        if record is None:
            if time.perf_counter() > self._end:
                self.outcomes[key] = f"{text}: not measured, the time was up"
                return key, None
            record = self._measure(case, key, compiler, store, self._end)
            store.save(key, record)
        self.outcomes.setdefault(key, f"{text}: {_outcome(record)}")
        return key, record

    def _chosen(
        self,
        compiler: GraphCompiler,
        kernel_filter: KernelFilter,
        known: Mapping[str, RegionRecord],
    ) -> dict[str, RegionRecord]:
        # Products -> the key of the kernel that saves the most time.
        best: dict[tuple[FxNode, ...], str] = {}
        regions: dict[str, RegionRecord] = {}
        # Keys of kernels -> keys of their measurements.
        measurements: dict[str, str] = {}
        note = ", beside Inductor's kernels" if kernel_filter.products_only else ""
        for same in by_bytes(self.occurrences(kernel_filter)):
            found = same[0].found
            products = found.products
            if any(set(products) & set(others) for others in best if others != products):
                continue  # a pair with this product is one kernel
            graph, key = found.kernel.graph, region_key(found.kernel.graph)
            if match_key(graph.key, graph.operators) in kernel_filter.kept_in_inductor:
                continue  # it was not accurate
            if key in known:
                regions[key] = known[key]
            else:
                case = same[0].case
                measurement, record = self.measured(case, compiler, note)
                if record is None or not is_gain(record):
                    continue
                measurements[key] = measurement
                regions[key], self.records[key] = measured_region(case, record), record
            if products not in best or self._saved(key) > self._saved(best[products]):
                best[products] = key
        for key in measurements.keys() - best.values():
            text = self.outcomes[measurements[key]].removesuffix(SURPASSED)
            self.outcomes[measurements[key]] = text + SURPASSED
        return {key: regions[key] for key in best.values()}

    def _saved(self, key: str) -> float:
        """Seconds that a chosen kernel was measured to save; infinite without a measurement.

        Such a kernel was chosen by another selection, and stays.
        """
        record = self.records.get(key)
        return math.inf if record is None else seconds_saved(record, record.comparison.ratio)

    def _measure(
        self, case: ProductCase, key: str, compiler: GraphCompiler, store: KernelStore, end: float
    ) -> KernelComparisonRecord:
        """Measure a product; a failure is part of the record, and the product stays apart."""
        clock = self.clock
        assert clock is not None
        record = KernelComparisonRecord(kernels=(), kind=clock.kind, clock=clock.name)
        try:
            kernel, inputs = fastest_kernel(case.found, store, clock, key, end)
            record = structs.replace(record, kernels=(kernel,))
            region = product_record(case.found, kernel, inputs)
            check_accuracy(case.found, region, graph_device(case.module))
            runs = comparison_runs(case, region, compiler)
            samples = clock.samples(key, [runs[0], runs[1], runs[0]], COMPARISON_SECONDS)
        except Exception as error:  # out of memory, a compiler error, an inaccurate kernel
            return structs.replace(record, failure=one_line(error))
        return with_samples(record, samples)


class NotComparable(Exception):
    """A product cannot be measured; the message says why."""


def fastest_kernel(
    found: FoundProduct,
    store: KernelStore,
    clock: Clock,
    key: str,
    end: float,
    note: Callable[[str], None] = lambda text: None,
) -> tuple[str, tuple[int, ...]]:
    """The name of the fastest kernel of a product, and the nodes that it reads.

    All configurations are measured together. Those that are not compiled by ``end``
    (``time.perf_counter``) are left out. Raises :class:`NotComparable` if none can run.
    """
    runs: list[Run] = []
    kernels: list[tuple[str, tuple[int, ...]]] = []
    names: list[str] = []
    device = found.products[0].meta["val"].device
    tensors: list[Tensor] = []
    for config, kernel, inputs in product_kernels(found.kernel, store, hardware_of(device)):
        if runs and time.perf_counter() > end:
            break
        try:
            op = load_op(kernel)
            tensors = tensors or synthetic_inputs(op.launcher(None).inputs, device)
            call = op.unchecked_call
            call(tensors)  # compiles; too much shared memory, for example, is an error
        except Exception as error:  # another configuration may fit
            note(f"{config}: {one_line(error)}")
            continue
        runs.append(partial(call, tensors))
        kernels.append((kernel, inputs))
        names.append(str(config))
    if not runs:
        raise NotComparable("no tile configuration fits the GPU")
    medians = [statistics.median(row) for row in clock.samples(key, runs, SCREEN_SECONDS)]
    for name, median in sorted(zip(names, medians, strict=True), key=lambda pair: pair[1]):
        note(f"{name}: {1e6 * median:.1f} us")
    return kernels[medians.index(min(medians))]


def comparison_runs(
    case: ProductCase, region: RegionRecord, compiler: GraphCompiler
) -> tuple[Run, Run]:
    """Runs of a product's graph: by cuBLAS and Inductor, and with its kernel.

    Raises :class:`NotComparable` if the graph has no such product on its own.
    """
    use_direct_calls()
    changed = copy_graph(case.module)
    regions = {region_key(case.found.kernel.graph): region}
    kernel_filter = KernelFilter(regions=regions, products=True)
    if not insert_products(changed, kernel_filter, RewriteResult()):
        raise NotComparable("the product has another kernel on its own than in its graph")
    return compiled_run(copy_graph(case.module), compiler), (
        _kernel_alone(changed) or compiled_run(changed, compiler)
    )


def _kernel_alone(module: GraphModule) -> Run | None:
    """A run of a graph that is one kernel, which needs no compilation; None for other graphs."""
    calls = [
        node
        for node in module.graph.nodes
        if node.op not in ("placeholder", "output")
        and node.target is not operator.getitem
        and not getattr(node.target, "is_view", False)
    ]
    if [node.target for node in calls] != [STITCHED_OP]:
        return None
    op = load_op(calls[0].args[1])
    return partial(
        op.unchecked_call, synthetic_inputs(op.launcher(None).inputs, graph_device(module))
    )


def check_accuracy(found: FoundProduct, region: RegionRecord, device: Any) -> None:
    """Raise :class:`NotComparable` if the kernel is less accurate than PyTorch's operators."""
    (step,) = region.steps
    tensors = synthetic_inputs(load_op(step.kernel).launcher(None).inputs, device)
    for wrong in inaccurate_kernels([(found.kernel.graph, region)], {step.kernel: tensors}):
        raise NotComparable(f"not accurate: {wrong.reason}")


def measured_region(case: ProductCase, record: KernelComparisonRecord) -> RegionRecord:
    """The record of the kernel that a comparison measured."""
    (name,) = record.kernels
    hardware = hardware_of(graph_device(case.module))
    for _, kernel, inputs in product_kernels(case.found.kernel, KernelStore(), hardware):
        if kernel == name:
            return product_record(case.found, kernel, inputs)
    raise NotComparable("the measured kernel is not generated any more")


def seconds_saved(record: KernelComparisonRecord, ratio: float) -> float:
    """Seconds that kernels save if they are so many times as fast as Inductor's."""
    return statistics.median(record.inductor) * (1.0 - 1.0 / ratio)


def is_gain(record: KernelComparisonRecord) -> bool:
    """Whether the kernel was measured faster, by more than captures of one product differ."""
    return record.is_faster and record.comparison.low >= LEAST_GAIN


def _outcome(record: KernelComparisonRecord) -> str:
    """The measured ratio or the failure as text."""
    if record.failure is not None:
        return f"stays with cuBLAS: {record.failure}"
    found = record.comparison
    what = "one kernel" if is_gain(record) else "stays with cuBLAS"
    return f"{what}, measured {found.ratio:.3f} x ({found.low:.3f} to {found.high:.3f})"
