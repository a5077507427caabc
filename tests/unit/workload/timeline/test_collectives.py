"""Collectives matched across ranks: transfer time on the last rank, waiting on the others."""

from __future__ import annotations

from pathlib import Path

import pytest

from nostall.core import BadTrace
from nostall.workload.timeline.collectives import match_collectives
from nostall.workload.traces.kineto.reader import read_kineto
from nostall.workload.traces.recording import Recording
from tests.unit.workload.trace_events import event, kernel, trace, write

H200 = Path(__file__).parents[1] / "h200"


def record_rank(tmp_path: Path, rank: int, *durations: float, **args: int) -> Recording:
    """A rank whose AllReduces take ``durations`` (microseconds), with a product before each.

    ``args`` are those of each AllReduce.
    """
    events = []
    for i, duration in enumerate(durations):
        reduce = kernel("ncclAllReduce", 1000 * i + 20, duration, **args)
        events += [kernel("gemm", 1000 * i, 10), reduce]
    path = tmp_path / f"{rank}_{len(durations)}.json.gz"
    return read_kineto(write(path, trace(*events, rank=rank, world=2)))


def test_the_last_rank_does_not_wait(tmp_path: Path) -> None:
    collectives, _ = match_collectives(
        [record_rank(tmp_path, 0, 30, 200), record_rank(tmp_path, 1, 130, 50)]
    )
    assert [c.transfer for c in collectives] == pytest.approx([30e-6, 50e-6])
    assert [c.waits for c in collectives] == [
        pytest.approx((0, 100e-6)),
        pytest.approx((150e-6, 0)),
    ]


def test_kernels_of_one_collective_match_by_their_order(tmp_path: Path) -> None:
    ranks = [record_rank(tmp_path, rank, 30, 40 + rank, Seq=7) for rank in range(2)]
    assert [c.seconds for c in match_collectives(ranks)[0]] == [
        pytest.approx((30e-6, 30e-6)),
        pytest.approx((40e-6, 41e-6)),
    ]


def test_ranks_that_do_not_match_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(BadTrace, match="two or more"):
        match_collectives([record_rank(tmp_path, 0, 30)])
    with pytest.raises(BadTrace, match="its 2 collectives are not the 1 of"):
        match_collectives([record_rank(tmp_path, 0, 30), record_rank(tmp_path, 1, 30, 40)])


@pytest.mark.skipif(not H200.is_dir(), reason="there are no traces of two GPUs")
def test_waiting_is_half_of_the_communication_of_a_rank_on_two_h200() -> None:
    """One step of BERT: 219 MB of gradients in the buckets of DistributedDataParallel."""
    recordings = [read_kineto(H200 / f"ddp_rank{rank}.json.gz") for rank in (0, 1)]
    all_reduces = [c for c in match_collectives(recordings)[0] if "AllReduce" in c.name]
    assert sum(c.message_bytes for c in all_reduces) == pytest.approx(219e6, rel=0.01)
    transfer = sum(c.transfer for c in all_reduces)
    on_rank_1 = sum(c.seconds[1] for c in all_reduces)
    assert 0.9e-3 < transfer < 1.1e-3
    assert on_rank_1 > 1.9 * transfer


def test_other_steps_are_refused_and_missing_steps_are_not(tmp_path: Path) -> None:
    def of(rank: int, *numbers: int) -> Recording:
        events = []
        for number in numbers:
            events.append(event("user_annotation", f"ProfilerStep#{number}", 1000 * number, 999))
            events.append(kernel("ncclAllReduce", 1000 * number, 50))
        path = tmp_path / f"{rank}_{numbers[0]}.json"
        return read_kineto(write(path, trace(*events, rank=rank, world=2)))

    with pytest.raises(BadTrace, match=r"has the steps 1 to 12 and .* the steps 2 to 13,"):
        match_collectives([of(0, *range(1, 13)), of(1, *range(2, 14))])
    lacks_one, _ = match_collectives([of(0, *range(1, 13)), of(1, *range(2, 13))])
    assert len(lacks_one) == 11
