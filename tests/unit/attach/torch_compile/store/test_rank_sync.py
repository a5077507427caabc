"""Selections of rank 0 on their way to the other ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from nostall.attach.torch_compile.rewrite.matching import region_record  # noqa: E402
from nostall.attach.torch_compile.store.kernel_store import KernelStore  # noqa: E402
from nostall.attach.torch_compile.store.rank_sync import RankSync, Selection  # noqa: E402
from nostall.attach.torch_compile.store.regions import region_key  # noqa: E402
from tests.unit.fusion.patterns import layer_norm  # noqa: E402

GRAPH = "a" * 64


@pytest.mark.parametrize("products_only", [False, True])
def test_kernels_are_sent_with_the_selection(tmp_path: Path, products_only: bool) -> None:
    graph = layer_norm((4, 24), "float32")
    leader, follower = KernelStore(tmp_path / "leader"), KernelStore(tmp_path / "follower")
    region = region_record(graph, leader)
    regions = {region_key(graph): region}
    selection = Selection("stitched", frozenset({"kept"}), regions, products_only)
    job_store = torch.distributed.HashStore()
    RankSync(job_store, 0).publish(GRAPH, selection, leader)
    assert RankSync(job_store, 1).fetch(GRAPH, follower) == selection
    assert region.steps
    for step in region.steps:
        assert follower.load_kernel(step.kernel) == leader.load_kernel(step.kernel)
