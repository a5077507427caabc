"""Kernels of regions: programs exchange values of the region's graph only."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton")
pytest.importorskip("torch")

from nostall.attach.torch_compile.rewrite.matching import region_record
from nostall.attach.torch_compile.store.kernel_store import KernelStore
from nostall.fusion import region_plans
from nostall.fusion.errors import BadFusion
from nostall.fusion.graph.builder import Builder
from nostall.fusion.graph.graph import Graph
from nostall.fusion.recompute.copies import Kernels
from nostall.fusion.recompute.partial_reads import read_parts
from tests.unit.fusion.recompute.test_shared_values import normalised_half


def normalised_exponentials(rows: int = 4096, columns: int = 16384) -> Graph:
    build = Builder()
    value = build("exp", build.input((rows, columns), "float16"))
    return build.graph(normalised_half(build, value))


def kernels_of_single_operators(graph: Graph) -> Kernels:
    """Kernels that exchange parts of values."""
    changed, origins = read_parts(graph) or (graph, ())
    return Kernels(changed, tuple((index,) for index in changed.operators), origins)


def check_arguments(graph: Graph, store: KernelStore) -> None:
    """Every kernel gets the arguments of its program from an earlier kernel or the caller."""
    given = set(graph.inputs)
    for step in region_record(graph, store).steps:
        kernel, _ = store.load_kernel(step.kernel)
        assert [tuple(graph[i].shape) for i in step.inputs] == [t.shape for t in kernel.inputs]
        assert [tuple(graph[i].shape) for i in step.outputs] == [t.shape for t in kernel.outputs]
        assert given.issuperset(step.inputs)
        given.update(step.outputs)
    assert given.issuperset(graph.outputs)


def test_kernels_of_parts_get_all_their_arguments(tmp_path: Path) -> None:
    check_arguments(normalised_exponentials(), KernelStore(tmp_path))


def test_a_region_whose_programs_exchange_parts_has_no_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = normalised_exponentials(8, 512)
    monkeypatch.setattr(region_plans, "default_kernels", kernels_of_single_operators)
    assert region_plans.region_kernels(graph).graph is graph
    check_arguments(graph, KernelStore(tmp_path))


def test_a_part_has_no_node_in_the_region() -> None:
    kernels = kernels_of_single_operators(normalised_exponentials(8, 512))
    part = kernels.origins.index(None)
    with pytest.raises(BadFusion, match="a part of a value"):
        kernels.in_region([part])
