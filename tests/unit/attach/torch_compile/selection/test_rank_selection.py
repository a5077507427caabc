"""Which version of a graph runs on the ranks of one job: rank 0 selects it for all."""

from __future__ import annotations

import logging
from typing import Any

import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")


from nostall.attach.torch_compile.rewrite.kernel_selection import RewriteResult  # noqa: E402
from nostall.attach.torch_compile.selection.versions import Candidate  # noqa: E402
from nostall.attach.torch_compile.store.kernel_store import KernelStore  # noqa: E402
from nostall.attach.torch_compile.store.rank_sync import RankSync, Selection  # noqa: E402
from tests.unit.attach.torch_compile.selection.dispatching import (  # noqa: E402
    GRAPH,
    REGION,
    Versions,
    call,
    dispatch,
)

pytestmark = pytest.mark.usefixtures("steps")


def set_rank(monkeypatch: pytest.MonkeyPatch, job_store: Any, rank: int) -> None:
    """From now on this process is a rank of a job."""
    monkeypatch.setattr(RankSync, "current", classmethod(lambda cls: cls(job_store, rank)))


def test_other_ranks_compile_the_candidate_by_the_selection_of_rank_0(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job_store, versions, selections = torch.distributed.HashStore(), Versions(), []

    def build(args: Any, selection: Any) -> Candidate:
        selections.append(selection)
        return Candidate(versions.candidate, RewriteResult(["kernel"]), selection)

    set_rank(monkeypatch, job_store, 1)
    graph = dispatch(versions, build=build)
    assert call(graph, versions, 3) == ["baseline"] * 3
    assert selections == [], "nothing is compiled before rank 0 has selected"
    selection = Selection("stitched", frozenset({"a", "b"}), {"region": REGION})
    RankSync(job_store, 0).publish(GRAPH, selection, KernelStore())
    assert call(graph, versions, 1) == ["candidate"]
    assert selections == [selection]


def test_an_unreadable_selection_of_rank_0_is_logged_and_inductors_version_runs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    job_store, versions = torch.distributed.HashStore(), Versions()
    set_rank(monkeypatch, job_store, 1)
    graph = dispatch(versions)
    job_store.set(GRAPH, b"stitched")
    with caplog.at_level(logging.WARNING, "nostall"):
        assert call(graph, versions, 4) == ["baseline"] * 4
    (record,) = caplog.records
    assert "rank 0's selection is not readable" in record.message


def test_other_ranks_compile_nothing_if_rank_0_selects_inductors_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def build(args: Any, selection: Any) -> Candidate:
        raise AssertionError("the candidate is not needed")

    job_store, versions = torch.distributed.HashStore(), Versions()
    set_rank(monkeypatch, job_store, 1)
    graph = dispatch(versions, build=build)
    RankSync(job_store, 0).publish(GRAPH, Selection("inductor"), KernelStore())
    assert call(graph, versions, 3) == ["baseline"] * 3
    assert (graph.report.state, graph.report.reason) == ("inductor", "rank 0 has chosen")


def test_other_ranks_run_the_version_of_rank_0_without_comparing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job_store = torch.distributed.HashStore()
    leader_versions, follower_versions = Versions(), Versions()
    leader, follower = dispatch(leader_versions), dispatch(follower_versions)
    set_rank(monkeypatch, job_store, 1)
    assert call(follower, follower_versions, 3) == ["baseline"] * 3
    set_rank(monkeypatch, job_store, 0)
    assert call(leader, leader_versions, 2)[-1] == "candidate"
    set_rank(monkeypatch, job_store, 1)
    assert call(follower, follower_versions, 2)[-1] == "candidate"
    assert follower.report.reason == "rank 0 has chosen"
    assert follower.report.comparison is None
