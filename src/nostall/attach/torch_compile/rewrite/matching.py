"""Match stitched kernels with the ATen calls of an FX graph that they can replace.

An ATen call is replaced completely or not at all: a kernel that would compute only a part of one is
dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.fx import GraphModule
from torch.fx import Node as FxNode

from nostall.attach.torch_compile.rewrite.kernel_selection import (
    PRODUCTS_ONLY,
    KernelFilter,
    KernelMatch,
    RewriteResult,
    match_key,
)
from nostall.attach.torch_compile.rewrite.nodes import fill_metadata
from nostall.attach.torch_compile.store.kernel_store import KernelStore
from nostall.attach.torch_compile.store.records import RegionRecord, StepRecord
from nostall.attach.torch_compile.store.regions import NO_REGIONS, load_region, save_region
from nostall.attach.warning import warn_once
from nostall.fusion.capture import CapturedGraph, capture
from nostall.fusion.capture.randomness import numbers_depend_on_kernels
from nostall.fusion.errors import BadCapture
from nostall.fusion.explain import explain_graph
from nostall.fusion.graph.dynamic_size import SizeReader, factors, primes_of, used_sizes
from nostall.fusion.graph.graph import MAX_ELEMENTS, Graph
from nostall.fusion.graph.operations import COMPUTE
from nostall.fusion.graph.regions import Region
from nostall.fusion.region_plans import captured_regions, plan_region

KEPT = "not faster than Inductor's code or a product's kernel for it, or not accurate"
"""Reason why a kernel is not inserted."""


def match_kernels(
    module: GraphModule, store: KernelStore, kernel_filter: KernelFilter, result: RewriteResult
) -> tuple[CapturedGraph, list[KernelMatch]] | None:
    """Capture a functional ATen graph and find the kernels that can replace some of its operators.

    Regions without stored kernels are planned.  Operators that are not fused are counted in
    ``result``.  Returns None if the graph must not be changed.

    Raises :class:`BadCapture` for nodes without ``meta["val"]`` if it cannot be computed.
    """
    captured = capture_module(module)
    if captured is None:
        # Beside other kernels the forward and the backward pass could draw different numbers.
        reason = "random numbers that depend on the kernel they are in"
        result.not_fused[reason, "whole graph"] += 1
        return None
    result.not_fused.update(captured.report.unsupported)
    matches: list[KernelMatch] = []
    for region in _regions(captured):
        try:
            record = region_record(region.graph, store, kernel_filter.regions)
        except Exception as error:  # one region must not cost the kernels of the others
            warn_once(f"a region is not stitched: {type(error).__name__}: {error}")
            result.not_fused[f"{type(error).__name__} while stitching", "a region"] += 1
            continue
        result.regions.append((region.graph, record))
        for reason, count in record.not_fused.items():
            # The text before the colon names the operator with its sizes.
            result.not_fused[reason.partition(": ")[2] or reason, "no kernel"] += count
        matches += [_kernel_match(step, region) for step in record.steps]
    accepted = _accepted(captured.graph, matches, kernel_filter, result)
    matches = _drop_partial_calls(captured, accepted, result)
    kernels = [match.operators for match in matches]
    result.explanations.append(explain_graph(captured, kernels).lines())
    if matches:
        _limit_dynamic_size(captured)
    return captured, matches


def region_record(
    graph: Graph, store: KernelStore, known: Mapping[str, RegionRecord] = NO_REGIONS
) -> RegionRecord:
    """The kernels of a region, in the order of their launches; the same ones in every process.

    They are loaded; a region that neither ``known`` (by key) nor the store has is planned and
    saved.
    """
    record = load_region(graph, store, known)
    return record if record is not None else save_region(graph, plan_region(graph), store)


def find_region_graphs(module: GraphModule) -> list[Graph]:
    """The distinct regions of an ATen graph, as :func:`match_kernels` will find them.

    Called while Dynamo compiles, it adds a guard: PyTorch compiles again for a dynamic size at
    which a tensor has more elements than kernels can count.
    """
    captured = capture_module(module)
    if captured is None:
        return []
    _limit_dynamic_size(captured, only_as_guard=True)
    return list({region.graph.key: region.graph for region in _regions(captured)}.values())


def _regions(captured: CapturedGraph) -> tuple[Region, ...]:
    return captured_regions(captured, operator_owners(captured), seed_pairs(captured))


def seed_pairs(captured: CapturedGraph) -> frozenset[int]:
    """Views of pairs of random seeds, of which Inductor draws a vector for each graph.

    As inputs of kernels they make regions equal that differ in their seed only, such as the layers
    of a model.
    """
    graph, pairs = captured.graph, set[int]()
    for node, value in captured.values.items():
        is_seed = str(node.target) == "prims.inductor_lookup_seed.default"
        if is_seed and isinstance(value, int) and graph[value].op == "view":
            pairs.update(graph[graph[value].inputs[0]].inputs)
    return frozenset(pairs)


def capture_module(module: GraphModule) -> CapturedGraph | None:
    """The captured graph; None if its random numbers depend on the kernels that draw them."""
    fill_metadata(module.graph)
    return None if _random_numbers_depend_on_kernels(module) else capture(module)


def _random_numbers_depend_on_kernels(module: GraphModule) -> bool:
    random = [n for n in module.graph.nodes if str(n.target) == "prims.inductor_random.default"]
    on_gpu = any(node.meta["val"].device.type == "cuda" for node in random)
    return on_gpu and numbers_depend_on_kernels()


def _kernel_match(step: StepRecord, region: Region) -> KernelMatch:
    def in_graph(indices: Iterable[int]) -> tuple[int, ...]:
        return tuple(region.origins[i] for i in indices)

    key = match_key(region.graph.key, step.operators)
    inputs, outputs, operators = map(in_graph, (step.inputs, step.outputs, step.operators))
    return KernelMatch(key, step.kernel, inputs, outputs, operators, step.reduces)


def _accepted(
    graph: Graph, matches: list[KernelMatch], kernel_filter: KernelFilter, result: RewriteResult
) -> list[KernelMatch]:
    """The matches that the filter accepts and whose device and dynamic sizes the inputs show."""
    possible = [match for match in matches if match.inputs and _shows_sizes(graph, match)]
    hidden = sum(bool(match.inputs) and match not in possible for match in matches)
    if hidden:
        result.not_fused["a dynamic size that no operand shows", "a kernel"] += hidden
    if kernel_filter.products_only and possible:
        result.not_fused[PRODUCTS_ONLY, "a kernel"] += len(possible)
        return []
    not_faster = sum(match.key in kernel_filter.kept_in_inductor for match in possible)
    if not_faster:
        result.not_fused[KEPT, "a kernel"] += not_faster
    return [match for match in possible if kernel_filter.accepts(match)]


def _shows_sizes(graph: Graph, match: KernelMatch) -> bool:
    """Whether the inputs of a kernel show the sizes of all that it computes."""
    # A kernel may add up n equal rows: its loops have the dynamic size, its results do not.
    inside = {i for index in match.operators for i in (index, *graph[index].inputs)}
    numbers = (n for i in (*match.inputs, *inside) for n in (*graph[i].shape, *graph[i].strides))
    varying = used_sizes(numbers, graph.varying)
    return SizeReader(varying, [graph[index].shape for index in match.inputs]).is_complete


def _limit_dynamic_size(captured: CapturedGraph, *, only_as_guard: bool = False) -> None:
    """Make PyTorch compile again for dynamic sizes with more elements than kernels can count.

    Evaluating a comparison of symbolic sizes becomes a guard while Dynamo compiles.
    ``only_as_guard``: do nothing if Dynamo has already written its guards.

    Raises :class:`BadCapture` if the current size is too large.
    """
    varying = captured.graph.varying
    if varying is None:
        return
    most: dict[tuple[int, ...], int] = {}
    for count in (count for node in captured.graph for count in node.counts):
        constant, powers = factors(count, varying)
        if any(powers):
            most[powers] = max(constant, most.get(powers, 0))
    sizes = _symbolic_sizes(captured)
    for powers, constant in most.items():
        elements: Any = constant
        for prime, power in zip(primes_of(varying), powers, strict=True):
            for _ in range(power):
                elements = elements * sizes[prime]
        if only_as_guard and elements.node.shape_env.frozen:
            return
        if not elements <= MAX_ELEMENTS:
            raise BadCapture("more elements than kernels can count")


def _symbolic_sizes(captured: CapturedGraph) -> dict[int, torch.SymInt]:
    """PyTorch's dynamic sizes by the primes that stand for them.

    Raises :class:`BadCapture` if the graph has only multiples of one.
    """
    found: dict[int, torch.SymInt] = {}
    for node in captured.values:
        value = node.meta.get("val")
        for size in value.shape if isinstance(value, torch.Tensor) else (value,):
            prime = captured.primes.get(size.node.expr) if isinstance(size, torch.SymInt) else None
            if prime is not None and prime not in found:
                found[prime] = size
    if len(found) < len(captured.primes):
        raise BadCapture("a dynamic size of which the graph has only multiples")
    return found


def _drop_partial_calls(
    captured: CapturedGraph, matches: list[KernelMatch], result: RewriteResult
) -> list[KernelMatch]:
    """The largest subset of the matches that together compute only complete ATen calls.

    A match is also dropped if it reads a value that neither PyTorch nor another match provides, or
    if an output has other strides than PyTorch expects.
    """
    graph = captured.graph
    owners = operator_owners(captured)
    known = {*captured.origins, *seed_pairs(captured)}
    while True:
        fused = {index for match in matches for index in match.operators}
        provided = {index for match in matches for index in match.outputs}
        cut_calls = {owners[i] for i in graph.operators if i not in fused and i in owners}
        partial = [
            match
            for match in matches
            if any(owners.get(i) in cut_calls for i in match.operators)
            or any(i not in provided and i not in known for i in match.inputs)
        ]
        other_layout = [
            m for m in matches if m not in partial and not _has_expected_layouts(captured, m)
        ]
        if not partial and not other_layout:
            return matches
        result.not_fused["a part of an ATen call", "no kernel"] += len(partial)
        result.not_fused["a result with other strides", "no kernel"] += len(other_layout)
        dropped = [*partial, *other_layout]
        matches = [match for match in matches if match not in dropped]


def operator_owners(captured: CapturedGraph) -> dict[int, FxNode]:
    """For each operator, the ATen call that it was lowered from; nodes are lowered in order."""
    owners: dict[int, FxNode] = {}
    first = 0
    for node, value in captured.values.items():
        last = max((value,) if isinstance(value, int) else value, default=-1)
        for index in range(first, last + 1):
            if captured.graph[index].kind in COMPUTE:
                owners[index] = node
        first = max(first, last + 1)
    return owners


def _has_expected_layouts(captured: CapturedGraph, match: KernelMatch) -> bool:
    """Whether all outputs that are results of ATen calls have PyTorch's shapes and strides."""
    for index in match.outputs:
        origin, node = captured.origins.get(index), captured.graph[index]
        if origin is None:
            continue
        value = origin.meta["val"]
        expected = _static_sizes(value.shape, captured), _static_sizes(value.stride(), captured)
        if expected != (node.shape, node.strides):
            return False
    return True


def _static_sizes(sizes: Iterable[Any], captured: CapturedGraph) -> tuple[int, ...]:
    """Sizes with the captured graph's primes in place of the dynamic ones."""
    return tuple(
        size if isinstance(size, int) else int(size.node.expr.subs(captured.primes))
        for size in sizes
    )
