"""Replace matrix products and elementwise operators around them by kernels measured faster.

This runs after stitched kernels are inserted: operators that those compute are calls by then, and
no part of a product's kernel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch.fx import GraphModule

from nostall.attach.torch_compile.rewrite.kernel_selection import (
    KernelFilter,
    KernelMatch,
    RewriteResult,
    match_key,
)
from nostall.attach.torch_compile.rewrite.matching import capture_module, seed_pairs
from nostall.attach.torch_compile.store.records import RegionRecord, StepRecord
from nostall.attach.torch_compile.store.regions import region_key
from nostall.fusion.capture import CapturedGraph
from nostall.fusion.products.find import FoundProduct, Products, find_products


def products_of(module: GraphModule) -> tuple[CapturedGraph, Products] | None:
    """A captured ATen graph and its products; None if the graph must not be changed."""
    captured = capture_module(module)
    if captured is None:
        return None
    return captured, find_products(captured, seed_pairs(captured))


def match_products(
    module: GraphModule, kernel_filter: KernelFilter, result: RewriteResult
) -> tuple[CapturedGraph, list[KernelMatch]] | None:
    """The product kernels that ``kernel_filter.regions`` has, as :func:`.match_kernels` does.

    The kernels' records and an explanation are added to ``result``.
    """
    captured_and_products = products_of(module)
    if captured_and_products is None:
        return None
    captured, products = captured_and_products
    chosen = _compatible(captured, products.found, kernel_filter)
    lines = products.lines()
    lines.append(f"  {len(chosen)} kernels of products were measured faster and are inserted")
    result.explanations.append(lines)
    result.regions += [(found.kernel.graph, record) for found, _, record in chosen]
    return captured, [match for _, match, _ in chosen]


def product_record(found: FoundProduct, kernel: str, inputs: Sequence[int]) -> RegionRecord:
    """The record of a kernel by its name; ``inputs``: nodes of its graph, as the kernel reads them.

    It has the form of a region with one kernel, so the store, the other ranks and the check of
    accuracy handle it like any other kernel.
    """
    graph = found.kernel.graph
    step = StepRecord(kernel, tuple(inputs), graph.outputs, graph.operators, reduces=True)
    return RegionRecord(steps=(step,), not_fused={})


Chosen = tuple[FoundProduct, KernelMatch, RegionRecord]


def _compatible(
    captured: CapturedGraph, found: Sequence[FoundProduct], kernel_filter: KernelFilter
) -> list[Chosen]:
    """The products with kernels that can run in one graph; earlier ones take precedence."""
    chosen: list[Chosen] = []
    taken: set[int] = set()
    groups: list[frozenset[int]] = []
    for each in found:
        match_and_record = _match(each, kernel_filter.regions)
        if match_and_record is None or match_and_record[0].key in kernel_filter.kept_in_inductor:
            continue
        match, record = match_and_record
        group = frozenset(match.operators)
        # A value of few elements may be computed by several kernels, but only as a part of them.
        shared = {i for i in group & taken if i in match.outputs or _is_large(captured, each, i)}
        # What the kernel repeats of its own results does not leave it.
        again = each.repeated_behind(captured.graph) - taken
        owned = group - taken | again
        if shared or not captured.graph.is_acyclic([*groups, owned]):
            continue
        chosen.append((each, match, record))
        groups.append(owned)
        taken |= group
    return chosen


def _is_large(captured: CapturedGraph, found: FoundProduct, index: int) -> bool:
    shape = found.kernel.shape
    columns = min(shape.columns, shape.depth) if found.kernel.prologue else shape.columns
    return captured.graph[index].elements >= shape.rows * columns


def _match(
    found: FoundProduct, regions: Mapping[str, RegionRecord]
) -> tuple[KernelMatch, RegionRecord] | None:
    """The kernel of a product as nodes of the captured graph; None without a record."""
    graph = found.kernel.graph
    record = regions.get(region_key(graph))
    if record is None:
        return None
    (step,) = record.steps
    anchors = {i for i in found.captured(graph.operators) if i >= 0}
    match = KernelMatch(
        match_key(graph.key, step.operators),
        step.kernel,
        found.captured(step.inputs),
        found.captured(step.outputs),
        tuple(sorted((anchors | found.operators) - found.repeated)),
        reduces=True,
    )
    return match, record
