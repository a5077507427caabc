"""Decide between the kernel of a product with its readers and stitched kernels for these readers.

Stitched kernels are inserted first.  One that reduces a reader of a product, such as the gradient
of a bias, computes the reader, so that the product has none left.  Both were measured against the
same operators by Inductor: the stitched kernels alone, the product in a graph of its own.  The
product's kernel takes the readers if it saves more time than the stitched kernels and the product
kernels that are lost for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch.fx import GraphModule

from nostall.attach.torch_compile.measure.baselines import copy_graph
from nostall.attach.torch_compile.measure.product_comparison import (
    Occurrence,
    ProductComparisons,
    by_bytes,
    is_gain,
    is_promising,
    measured_region,
    seconds_saved,
)
from nostall.attach.torch_compile.rewrite.compilers import GraphCompiler
from nostall.attach.torch_compile.rewrite.kernel_selection import (
    KernelFilter,
    KernelMatch,
    RewriteResult,
)
from nostall.attach.torch_compile.rewrite.matching import match_kernels, seed_pairs
from nostall.attach.torch_compile.store.kernel_store import KernelStore
from nostall.attach.torch_compile.store.records import KernelComparisonRecord, RegionRecord
from nostall.attach.torch_compile.store.regions import region_key
from nostall.fusion.capture import CapturedGraph
from nostall.fusion.products.find import FoundProduct, find_products

Measured = Mapping[frozenset[str], KernelComparisonRecord]
"""Measurements of stitched kernels, by the keys of the matches that were measured together."""


@dataclass
class Replacement:
    """Product kernels that take the place of stitched kernels."""

    kernels: set[str] = field(default_factory=set)
    """Keys of the matches of stitched kernels that are not inserted."""
    regions: dict[str, RegionRecord] = field(default_factory=dict)
    """The product kernels, by the key of their graph."""


def replace_kernels(
    products: ProductComparisons,
    stitched: Measured,
    compiler: GraphCompiler,
    kernel_filter: KernelFilter,
    chosen: Mapping[str, RegionRecord],
) -> Replacement:
    """Measure the products whose readers stitched kernels compute, and choose by the time saved.

    ``chosen``: product kernels that are chosen after the stitched kernels of ``kernel_filter``,
    which has no product kernels itself.
    Stitched kernels without a measurement keep their operators.
    """
    replacement = Replacement()
    if not (products.is_enabled and products.graphs and stitched):
        return replacement
    with products.measuring():
        counts = Counter[str]()
        candidates = list(_with_stitched_readers(products.graphs, kernel_filter, counts))
        if candidates:
            current = [
                each
                for each in products.occurrences(kernel_filter)
                if region_key(each.found.kernel.graph) in chosen
            ]
            comparison = _SavingsComparison(products, compiler, stitched, counts, current)
            for same in by_bytes(candidates):
                comparison.decide(same, replacement)
    return replacement


class _SavingsComparison:
    """Compares what kernels save, in seconds of the whole graph."""

    def __init__(
        self,
        products: ProductComparisons,
        compiler: GraphCompiler,
        stitched: Measured,
        counts: Mapping[str, int],
        current: Sequence[Occurrence],
    ) -> None:
        """``counts``: occurrences of each match by key.  ``current``: those of product kernels."""
        self._products, self._compiler = products, compiler
        self._stitched, self._counts, self._current = stitched, counts, current
        self._taken: set[tuple[int, str]] = set()

    def decide(self, same: Sequence[Occurrence], replacement: Replacement) -> None:
        """Measure a product that occurs at some places, and add it if it saves more there."""
        same = [each for each in same if not each.places & self._taken]
        if not same:
            return  # a pair with this product is one kernel
        keys = frozenset[str]().union(*(each.reader_kernels for each in same))
        lost = {group for group in self._stitched if group & keys}
        if not keys <= frozenset[str]().union(*lost):
            return  # a stitched kernel was not measured
        case = same[0].case
        key, record = self._products.measured(case, self._compiler, ", for its stitched readers")
        if record is None or not is_gain(record):
            return
        places = frozenset[tuple[int, str]]().union(*(each.places for each in same))
        gain = len(same) * seconds_saved(record, record.comparison.low)
        loss = self._stitched_seconds(lost, replacement) + self._product_seconds(places)
        wins = gain > loss
        self._products.outcomes[key] += (
            f"; with all kernels: saves {1e6 * gain:.1f} us, the kernels that it would replace "
            f"{1e6 * loss:.1f} us, so {'it replaces them' if wins else 'they stay'}"
        )
        if wins:
            # First what may fail: a kernel is replaced only if another one is there.
            region = region_key(case.found.kernel.graph)
            replacement.regions[region] = measured_region(case, record)
            self._products.records[region] = record
            replacement.kernels |= keys.union(*lost)
            self._taken |= places

    def _stitched_seconds(self, groups: set[frozenset[str]], replacement: Replacement) -> float:
        """What stitched kernels save that are not replaced yet."""
        seconds = 0.0
        for group in groups:
            if not group <= replacement.kernels:
                record = self._stitched[group]
                most = max(self._counts[key] for key in group)
                seconds += most * max(0.0, seconds_saved(record, record.comparison.high))
        return seconds

    def _product_seconds(self, places: frozenset[tuple[int, str]]) -> float:
        """What the product kernels save that were chosen for the same products."""
        records = (
            self._products.records[region_key(each.found.kernel.graph)]
            for each in self._current
            if each.places & places
        )
        return sum(seconds_saved(record, record.comparison.high) for record in records)


def _with_stitched_readers(
    graphs: Sequence[GraphModule], kernel_filter: KernelFilter, counts: Counter[str]
) -> Iterator[Occurrence]:
    """The products of which stitched kernels compute readers; counts these kernels' matches."""
    for number, graph in enumerate(graphs):
        module = copy_graph(graph)
        matched = match_kernels(module, KernelStore(), kernel_filter, RewriteResult())
        if matched is None or not matched[1]:
            continue
        captured, matches = matched
        counts.update(match.key for match in matches)
        for found in find_products(captured, seed_pairs(captured)).found:
            # The same product without a prologue has these readers, too.
            if found.kernel.prologue or not is_promising(found, replaces=True):
                continue
            keys = frozenset(m.key for m in matches if _computes_reader(captured, m, found))
            if keys:
                yield Occurrence(found, captured, module, number, keys)


def _computes_reader(captured: CapturedGraph, match: KernelMatch, found: FoundProduct) -> bool:
    """Whether a stitched kernel computes an operator of a product's kernel.

    Values of fewer elements do not count: both kernels may compute them.
    """
    elements = found.kernel.shape.rows * found.kernel.shape.columns
    shared = found.operators.intersection(match.operators)
    return any(captured.graph[index].elements >= elements for index in shared)
