"""Reading of the traces of several ranks: unreadable files, and notes about the set."""

from __future__ import annotations

from pathlib import Path

import pytest

from nostall.core import BadTrace
from nostall.workload.traces.ranks import read_ranks
from tests.unit.workload.trace_events import kernel, trace, write


def write_rank(tmp_path: Path, rank: int | None, world: int = 4, **fields: object) -> Path:
    path = tmp_path / f"rank{rank}_{len(fields)}.json.gz"
    return write(path, trace(kernel("k", 0, 10), rank=rank, world=world, **fields))


@pytest.mark.parametrize("processes", [1, 2])
def test_unreadable_files_and_missing_ranks_are_reported(tmp_path: Path, processes: int) -> None:
    broken = tmp_path / "broken.json"
    broken.write_bytes(b"{")
    paths = [write_rank(tmp_path, 0), broken, write_rank(tmp_path, 2), tmp_path / "absent.json"]
    ranks = read_ranks(paths, processes=processes)
    assert [r.rank for r in ranks.recordings] == [0, 2]
    assert len(ranks.unreadable) == 2
    assert "broken.json" in ranks.unreadable[0] and "absent.json" in ranks.unreadable[1]
    assert ranks.notes == ("no trace for 2 of 4 ranks (1, 3)",)


def test_repeated_ranks_and_mixed_schema_versions_are_reported(tmp_path: Path) -> None:
    paths = [write_rank(tmp_path, 0, 1), write_rank(tmp_path, 0, 1, schemaVersion=2)]
    notes = read_ranks(paths).notes
    assert any("more than one trace has rank 0" in note for note in notes)
    assert any("schema versions (1, 2)" in note for note in notes)


def test_traces_without_ranks_have_no_notes_about_ranks(tmp_path: Path) -> None:
    assert read_ranks([write_rank(tmp_path, None)]).notes == ()


def test_the_error_if_nothing_is_readable_has_the_first_reason(tmp_path: Path) -> None:
    with pytest.raises(BadTrace, match=r"a\.json"):
        read_ranks([tmp_path / "a.json", tmp_path / "b.json"])
    with pytest.raises(BadTrace, match="no traces"):
        read_ranks([])


def test_progress_counts_each_file(tmp_path: Path) -> None:
    paths = [write_rank(tmp_path, 0), write_rank(tmp_path, 1)]
    bytes_read: dict[Path, int] = {}
    read_ranks(paths, progress=lambda path, done: bytes_read.update({path: done}))
    assert bytes_read == {path: path.stat().st_size for path in paths}
