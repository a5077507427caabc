"""Collectives of several ranks: who came last transfers, the others also wait."""

from __future__ import annotations

from pathlib import Path

import pytest

from nostall.core import BadTrace
from nostall.workload.timeline.meetings import meetings
from nostall.workload.traces.kineto import read_kineto
from nostall.workload.traces.recording import Recording
from tests.unit.workload.trace_events import kernel, trace, write

H200 = Path(__file__).parents[1] / "h200"


def rank(tmp_path: Path, number: int, *seconds: float) -> Recording:
    """A rank whose all-reduces take so many microseconds, with a product before each."""
    events = []
    for i, duration in enumerate(seconds):
        events += [kernel("gemm", 1000 * i, 10), kernel("ncclAllReduce", 1000 * i + 20, duration)]
    made = trace(*events, rank=number, world=2)
    return read_kineto(write(tmp_path / f"{number}_{len(seconds)}.json.gz", made))


def test_the_rank_that_came_last_waits_for_nobody(tmp_path: Path) -> None:
    found = meetings([rank(tmp_path, 0, 30, 200), rank(tmp_path, 1, 130, 50)])
    assert [m.transfer for m in found] == pytest.approx([30e-6, 50e-6])
    assert [m.waits for m in found] == [
        pytest.approx((0, 100e-6)),
        pytest.approx((150e-6, 0)),
    ]


def test_ranks_that_do_not_match_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadTrace, match="two or more"):
        meetings([rank(tmp_path, 0, 30)])
    with pytest.raises(BadTrace, match="2 collectives, not the 1 of"):
        meetings([rank(tmp_path, 0, 30), rank(tmp_path, 1, 30, 40)])


@pytest.mark.skipif(not H200.is_dir(), reason="no traces of two GPUs are here")
def test_on_two_h200_waiting_is_most_of_a_ranks_communication() -> None:
    """BERT's 219 MB of gradients in DistributedDataParallel's buckets, one step."""
    found = [
        m
        for m in meetings([read_kineto(H200 / f"ddp_rank{r}.json.gz") for r in (0, 1)])
        if "AllReduce" in m.name
    ]
    assert sum(m.message for m in found) == pytest.approx(219e6, rel=0.01)
    transfer, whole = sum(m.transfer for m in found), sum(m.seconds[1] for m in found)
    assert 0.9e-3 < transfer < 1.1e-3
    assert whole > 1.9 * transfer
