"""What the GPU benchmark of chains does without one."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")
pytest.importorskip("torch")

from benchmarks.fusion_chain_programs import CHAINS
from benchmarks.fusion_chains import compared, copies, graph_of, least_bytes, partitions

from nostall.fusion.codegen.choice import first_choice
from nostall.fusion.codegen.emit import emit
from nostall.fusion.codegen.region import cover, scheduled

FIRST = {
    "softmax + mask 16384x3000": "block 1x2048+1024",
    "log-sum-exp + softmax 64x131072": "split",
    "SwiGLU 16384x5504": "thread",
    "short attention 64x12x48x64": "matrix 1x4096",
    "attention by a query 4096x100x64": "matrix 1x8192",
}


def test_there_are_enough_chains() -> None:
    assert len(CHAINS) >= 16


@pytest.mark.parametrize("name", FIRST)
def test_a_chain_is_one_kernel_with_the_expected_scheme(name: str) -> None:
    graph = graph_of(CHAINS[name])
    (group,) = cover(graph)
    of = scheduled(graph, group)
    program = emit(of, first_choice(of))
    assert str(program.plan).startswith(FIRST[name])
    assert program.outputs == tuple(sorted(graph.results))


def test_a_sum_down_strided_columns_takes_many_of_them_at_once() -> None:
    graph = graph_of(CHAINS["bias + gelu backward 16384x3072"])
    (group,) = cover(graph)
    assert first_choice(scheduled(graph, group)).rows >= 16


def test_equal_partitions_are_measured_once() -> None:
    assert list(partitions(graph_of(CHAINS["SwiGLU 16384x5504"]))) == ["explorer"]


def test_copies_are_more_than_the_cache_and_bytes_are_counted_once() -> None:
    chain = CHAINS["softmax + mask 32768x1024"]
    elements = 32768 * 1024
    assert least_bytes(chain) == elements * (2 + 1 + 2)
    assert copies(chain) == 3


def test_a_gain_counts_only_beyond_the_null() -> None:
    steady = [100.0 + i % 3 for i in range(40)]
    half = [time / 2 for time in steady]
    samples = {"eager": steady, "eager again": steady, "compile": half, "max-autotune": half}
    found = compared({**samples, "stitched": half})
    assert found["eager"]["verdict"] == "faster"
    assert found["compile"]["verdict"] == "same"
    noisy = [time * (1.2 if i % 2 else 0.8) for i, time in enumerate(steady)]
    found = compared({**samples, "eager again": noisy, "stitched": [t * 0.49 for t in steady]})
    assert found["compile"]["verdict"] == "same"


def test_a_row_that_is_read_again_stays_in_the_cache() -> None:
    """Many rows in a program would fill L2 and have every pass go to memory."""
    graph = graph_of(CHAINS["log-sum-exp + softmax 8192x32000"])
    plan = first_choice(scheduled(graph, graph.operators))
    assert (plan.scheme, plan.rows) == ("looped", 1)
