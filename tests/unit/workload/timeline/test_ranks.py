"""Several traces of one job: what can be read is, and what is odd is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from nostall.core import BadTrace
from nostall.workload.traces.ranks import read_ranks
from tests.unit.workload.trace_events import kernel, trace, write


def one(tmp_path: Path, rank: int | None, world: int = 4, **more: object) -> Path:
    made = trace(kernel("k", 0, 10), rank=rank, world=world, **more)
    return write(tmp_path / f"rank{rank}_{len(more)}.json.gz", made)


@pytest.mark.parametrize("processes", [1, 2])
def test_the_rest_is_read_and_what_is_missing_is_said(tmp_path: Path, processes: int) -> None:
    broken = tmp_path / "broken.json"
    broken.write_bytes(b"{")
    paths = [one(tmp_path, 0), broken, one(tmp_path, 2), tmp_path / "absent.json"]
    found = read_ranks(paths, processes=processes)
    assert [r.rank for r in found.recordings] == [0, 2]
    assert len(found.left_out) == 2
    assert "broken.json" in found.left_out[0] and "absent.json" in found.left_out[1]
    assert found.remarks == ("2 of 4 ranks have no trace here (1, 3)",)


def test_doubled_ranks_and_mixed_versions_are_said(tmp_path: Path) -> None:
    paths = [one(tmp_path, 0, 1), one(tmp_path, 0, 1, schemaVersion=2)]
    remarks = read_ranks(paths).remarks
    assert any("rank 0 comes more than once" in r for r in remarks)
    assert any("schema versions (1, 2)" in r for r in remarks)


def test_traces_without_ranks_say_nothing_about_ranks(tmp_path: Path) -> None:
    assert read_ranks([one(tmp_path, None)]).remarks == ()


def test_nothing_readable_is_refused_with_the_first_reason(tmp_path: Path) -> None:
    with pytest.raises(BadTrace, match=r"a\.json"):
        read_ranks([tmp_path / "a.json", tmp_path / "b.json"])
    with pytest.raises(BadTrace, match="no traces"):
        read_ranks([])


def test_progress_tells_files_apart(tmp_path: Path) -> None:
    paths = [one(tmp_path, 0), one(tmp_path, 1)]
    seen: dict[Path, int] = {}
    read_ranks(paths, progress=lambda path, done: seen.update({path: done}))
    assert seen == {path: path.stat().st_size for path in paths}
