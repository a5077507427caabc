"""Measure which matrix products are faster as one kernel with the elementwise operators around.

A product is measured in a graph of its own: the product, the operators of the kernel, and those
before and behind them up to the next product, which Inductor would fuse with them. One version has
the kernel, the other cuBLAS and Inductor's kernels. A product is replaced only if its version is
measured faster. Of several such kernels of one product the one that saves the most time is used.
"""

from __future__ import annotations

import hashlib
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from msgspec import structs
from torch import Tensor
from torch.fx import GraphModule
from torch.fx import Node as FxNode

from nostall.attach.torch_compile.graph_copies import fake_inputs
from nostall.attach.torch_compile.graph_key import graph_key
from nostall.attach.torch_compile.measure.baselines import copy_graph, extract_calls
from nostall.attach.torch_compile.measure.kernel_accuracy import inaccurate_kernels
from nostall.attach.torch_compile.measure.kernel_comparison import (
    fake_placeholders,
    graph_device,
    isolated_state,
)
from nostall.attach.torch_compile.measure.product_tuning import product_kernels
from nostall.attach.torch_compile.options import Options
from nostall.attach.torch_compile.rewrite.compilers import GraphCompiler
from nostall.attach.torch_compile.rewrite.direct_call import use_direct_calls
from nostall.attach.torch_compile.rewrite.kernel_selection import KernelFilter, RewriteResult
from nostall.attach.torch_compile.rewrite.matching import operator_owners
from nostall.attach.torch_compile.rewrite.products import (
    insert_products,
    product_record,
    products_of,
)
from nostall.attach.torch_compile.rewrite.rewrite import insert_kernels
from nostall.attach.torch_compile.runtime.custom_op import load_op
from nostall.attach.torch_compile.store.kernel_store import KernelStore
from nostall.attach.torch_compile.store.records import KernelComparisonRecord, RegionRecord
from nostall.attach.torch_compile.store.regions import region_key
from nostall.attach.warning import warn_once
from nostall.core.errors import one_line
from nostall.fusion.capture import CapturedGraph
from nostall.fusion.graph.graph import Graph
from nostall.fusion.graph.operations import COMPUTE
from nostall.fusion.products.find import FoundProduct
from nostall.fusion.products.neighbours import operators_in_front
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
"""Operators behind a kernel that are measured with it, at most."""


@dataclass(frozen=True)
class ProductCase:
    """A product of a graph, and the graph of its own in which it is measured."""

    found: FoundProduct
    module: GraphModule


@dataclass
class ProductComparisons:
    """Measures the products of one Dynamo graph, forward and backward."""

    # None disables the measurements, and no product is replaced.
    clock: Clock | None
    options: Options
    # The user's changes of Inductor's configuration.
    patches: dict[str, Any]
    graphs: list[GraphModule] = field(default_factory=list)
    # One line for each measured product, for the report.
    lines: list[str] = field(default_factory=list)

    @property
    def is_enabled(self) -> bool:
        return self.clock is not None and self.options.products == "measure"

    def add(self, module: GraphModule) -> None:
        """Keep a copy of a graph that Inductor is about to compile."""
        if self.is_enabled:
            self.graphs.append(copy_graph(module))

    def product_graphs(self, kernel_filter: KernelFilter) -> list[Graph]:
        """The distinct graphs of the products' kernels."""
        return [case.found.kernel.graph for case in self._cases(kernel_filter)]

    def chosen(
        self, compiler: GraphCompiler, kernel_filter: KernelFilter
    ) -> dict[str, RegionRecord]:
        """Kernels measured faster than cuBLAS with Inductor's kernels, by the key of their graph.

        Products that are not measured within ``options.product_seconds`` stay with cuBLAS. Those
        that could save the most bytes come first, and kernels with operators in front last.
        """
        if not self.is_enabled or not self.graphs:
            return {}
        try:
            with isolated_state(self.graphs[0]):
                return self._chosen(compiler, kernel_filter)
        except Exception as error:  # optional: products stay with cuBLAS
            warn_once(f"matrix products were not measured: {one_line(error)}")
            return {}

    def _chosen(
        self, compiler: GraphCompiler, kernel_filter: KernelFilter
    ) -> dict[str, RegionRecord]:
        store, end = KernelStore(), time.perf_counter() + self.options.product_seconds
        # The fastest kernel of some products: the key of its graph, its record, the seconds saved.
        chosen: dict[tuple[FxNode, ...], tuple[str, RegionRecord, float]] = {}
        for case in self._cases(kernel_filter):
            products = case.found.products
            if any(set(products) & set(others) for others in chosen if others != products):
                continue  # a pair with this product is one kernel
            key = self._key(case)
            record = store.load(KernelComparisonRecord, key)
            if record is None:
                if time.perf_counter() > end:
                    self.lines.append(f"{title(case)}: not measured, the time was up")
                    continue
                record = self._measure(case, key, compiler, store, end)
                store.save(key, record)
            self.lines.append(f"{title(case)}: {_outcome(record)}")
            saved = _saved_seconds(record)
            if _is_gain(record) and saved > (chosen[products][2] if products in chosen else 0.0):
                region = _region(case, record, store)
                chosen[products] = (region_key(case.found.kernel.graph), region, saved)
        return {key: region for key, region, _ in chosen.values()}

    def _cases(self, kernel_filter: KernelFilter) -> list[ProductCase]:
        """The distinct products behind the kernels that are inserted first."""
        cases: dict[str, ProductCase] = {}
        saved: Counter[str] = Counter()
        for graph in self.graphs:
            module = copy_graph(graph)
            insert_kernels(module, KernelStore(), kernel_filter, RewriteResult())
            captured_and_products = products_of(module)
            if captured_and_products is None:
                continue
            captured, products = captured_and_products
            for found in products.found:
                key = found.kernel.graph.key
                saved[key] += found.bytes_saved
                if key not in cases:
                    cases[key] = ProductCase(found, product_module(module, captured, found))
        by_bytes = [cases[key] for key, _ in saved.most_common()]
        return sorted(by_bytes, key=lambda case: bool(case.found.kernel.prologue))

    def _key(self, case: ProductCase) -> str:
        graph = graph_key(case.module, fake_placeholders(case.module), self.options, self.patches)
        text = f"product {graph} {case.found.kernel.graph.key}"
        return hashlib.sha256(text.encode()).hexdigest()

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
        first, second, null = map(tuple, samples)
        return structs.replace(record, inductor=first, stitched=second, null=null)


class NotComparable(Exception):
    """A product cannot be measured; the message says why."""


def product_module(
    module: GraphModule, captured: CapturedGraph, found: FoundProduct
) -> GraphModule:
    """The graph of a product, the operators around it and what Inductor would fuse with those."""
    graph, owners = captured.graph, operator_owners(captured)
    in_front = operators_in_front(graph, found)
    operators = found.operators | set(in_front)
    # Calls behind the product: what needs their results is no part of Inductor's next kernels.
    calls_behind = 0
    for index in found.anchors:
        calls_behind |= graph.descendants[index] & graph.opaque
    waiting = list(found.captured(found.kernel.graph.outputs))
    most = len(operators) + MAX_NEIGHBOURS
    while waiting and len(operators) < most:
        for reader in graph.consumers[waiting.pop()]:
            is_next = graph[reader].kind in COMPUTE and not graph.ancestors[reader] & calls_behind
            if is_next and reader not in operators:
                operators |= {reader}
                waiting.append(reader)
    calls = {owners[index] for index in operators if index in owners} | set(found.products)
    return extract_calls(module, captured, frozenset(calls))


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
    for config, kernel, inputs in product_kernels(found.kernel, store):
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
    plain, fused = (_compiled(module, compiler) for module in (copy_graph(case.module), changed))
    return plain, fused


def _compiled(module: GraphModule, compiler: GraphCompiler) -> Run:
    fakes = fake_placeholders(module)
    inputs = synthetic_inputs([(x.shape, x.stride(), x.dtype) for x in fakes], graph_device(module))
    with fake_inputs(inputs) as traced:
        run = compiler.compile_baseline(module, traced)
    return lambda: run(*inputs)


def check_accuracy(found: FoundProduct, region: RegionRecord, device: Any) -> None:
    """Raise :class:`NotComparable` if the kernel is less accurate than PyTorch's operators."""
    (step,) = region.steps
    tensors = synthetic_inputs(load_op(step.kernel).launcher(None).inputs, device)
    for wrong in inaccurate_kernels([(found.kernel.graph, region)], {step.kernel: tensors}):
        raise NotComparable(f"not accurate: {wrong.reason}")


def _region(case: ProductCase, record: KernelComparisonRecord, store: KernelStore) -> RegionRecord:
    """The record of the kernel that a comparison measured."""
    (name,) = record.kernels
    for _, kernel, inputs in product_kernels(case.found.kernel, store):
        if kernel == name:
            return product_record(case.found, kernel, inputs)
    raise NotComparable("the measured kernel is not generated any more")


def title(case: ProductCase) -> str:
    shape = case.found.kernel.shape
    graph = case.found.kernel.graph
    operators: Sequence[str] = list(dict.fromkeys(graph[i].op for i in case.found.kernel.epilogue))
    before = ", ".join(dict.fromkeys(graph[i].op for i in case.found.kernel.prologue[:-1]))
    return (
        f"{shape.rows} x {shape.columns} x {shape.depth} {shape.dtype}"
        f"{' (two products)' if shape.count == 2 else ''} with {', '.join(operators)}"
        f"{f' behind it and {before} in front' if before else ''}"
    )


def _is_gain(record: KernelComparisonRecord) -> bool:
    """Whether the kernel was measured faster, by more than captures of one product differ."""
    return record.is_faster and record.comparison.low >= LEAST_GAIN


def _saved_seconds(record: KernelComparisonRecord) -> float:
    """Seconds that a kernel was measured to save in each run; 0 without a measurement."""
    if record.failure is not None:
        return 0.0
    return statistics.median(record.inductor) - statistics.median(record.stitched)


def _outcome(record: KernelComparisonRecord) -> str:
    """The measured ratio or the failure as text."""
    if record.failure is not None:
        return f"stays with cuBLAS: {record.failure}"
    found = record.comparison
    what = "one kernel" if _is_gain(record) else "stays with cuBLAS"
    return f"{what}, measured {found.ratio:.3f} x ({found.low:.3f} to {found.high:.3f})"
